"""What an ETDump recorded on a device: outputs and values inside, for the comparison with the converted graph.

An ETRecord has the edge program, whose nodes have the debug handles of the events. It keeps none of pt2qa's handles,
but each node's provenance: the op of the exported graph that it was made from. These ops and those of the converted
graph are the same, in the same order.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran, handle_of
from pt2qa_xnnpack.internals import debug_handles_of, provenance_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

BUFFER = "debug_output.bin"
"""The file beside the ETDump that has the tensors, unless it has the name of the ETDump with the suffix ``.bin``."""


@dataclass
class Recorded:
    """A program that returns what a device recorded; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        edge: the edge program.
        batches: the outputs of each, and the values inside by the node of the edge program.
        inside: the nodes that a delegate computed.
    """

    path: Path
    edge: GraphModule = field(repr=False)
    batches: Sequence[tuple[Sequence[Tensor], Mapping[Node, Tensor]]] = field(repr=False)
    inside: frozenset[Node] = field(repr=False)
    facts: tuple[str, ...]
    taps: dict[str, str] = field(default_factory=dict)
    delegated: frozenset[int] = frozenset()
    _nodes: dict[str, Node] = field(default_factory=dict, repr=False)
    _read: int = 0

    def observe(self, graph: GraphModule, taps: Mapping[str, str]) -> None:
        """Says which values of a converted graph were recorded; see :class:`pt2qa.plugins.DeployedProgram`."""
        same = matched(graph, self.edge)
        handles = {handle_of(node) for node in graph.graph.nodes if same.get(node.name) in self.inside}
        self.delegated = frozenset(handle for handle in handles if handle is not None)
        recorded = set.intersection(*(set(values) for _, values in self.batches))
        self._nodes = {name: same[name] for name in taps if same.get(name) in recorded}
        self.taps = {name: "" if name in self._nodes else "not in the ETDump" for name in taps}

    def run(self, inputs: Sequence[Any]) -> Ran:
        """What was recorded of the next batch."""
        if self._read == len(self.batches):
            had = f"{self._read} run{'s' * (self._read != 1)}"
            raise DeploymentError(f"{self.path}: has {had} of the model, but there are more batches to compare.")
        outputs, values = self.batches[self._read]
        self._read += 1
        return Ran(tuple(outputs), {name: values[node] for name, node in self._nodes.items()})

    def save(self, folder: Path) -> None:
        """Fails: there is no program."""
        raise DeploymentError(f"{self.path}: an ETDump is not a program and cannot be saved.")


def read(path: Path, etrecord: Path) -> Recorded:
    """Reads an ETDump and the values in ``debug_output.bin`` beside it; the ETRecord says of which op each is.

    Raises:
        DeploymentError: one of them is missing or is no such file, or no run has outputs.
    """
    from executorch.devtools import Inspector, parse_etrecord

    dumps = {each: _buffer_of(each) for each in _dumps(path)}
    needed = {
        etrecord: "give it as etrecord=, or put it there",
        **dict.fromkeys(dumps.values(), "the runner writes it"),
    }
    for each, what in needed.items():
        if not each.is_file():
            raise DeploymentError(f"{path}: the values in an ETDump need the file {str(each)!r}, too: {what}.")
    runs: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = parse_etrecord(str(etrecord))
            for each, buffer in dumps.items():
                blocks = Inspector(str(each), etrecord=record, debug_buffer_path=str(buffer)).event_blocks
                found = (block for block in blocks if block.run_output)
                runs += sorted(found, key=lambda block: block.bundled_input_index or 0)
    except Exception as error:  # whatever a damaged file makes it raise
        raise DeploymentError(f"{path} and {etrecord}: not read: {type(error).__name__}: {error}") from error
    if not runs:
        raise DeploymentError(
            f"{path}: has no outputs. Run the model with a debug buffer, and with --dump_outputs "
            "and --dump_intermediate_outputs."
        )
    edge = record.edge_dialect_program.graph_module
    seen = [_values(block, edge) for block in runs]
    batches = [(_tensors(block.run_output), values) for block, (values, _) in zip(runs, seen, strict=True)]
    said = f"{path.name}: {len(runs)} runs and {len(seen[0][0])} values, recorded on a device"
    return Recorded(path, edge, batches, frozenset().union(*(inside for _, inside in seen)), (said,))


def _dumps(path: Path) -> list[Path]:
    """The ETDump and, where its name ends with 0, those of the next batches beside it: the runner runs one batch."""
    stem, found = path.stem.removesuffix("0"), [path]
    while stem != path.stem and (each := path.with_name(f"{stem}{len(found)}{path.suffix}")).is_file():
        found.append(each)
    return found


def _buffer_of(path: Path) -> Path:
    own = path.with_suffix(".bin")
    return own if own.is_file() else path.with_name(BUFFER)


def matched(graph: GraphModule, edge: GraphModule) -> dict[str, Node]:
    """By the name of each op of a converted graph, the node of its edge program that has its value.

    Ops of one kind are taken in order. Where there are more on one side, as of weights that were folded, none is.
    """
    own: dict[str, list[Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            own[str(node.target)].append(node)
    others: dict[str, dict[str, Node]] = defaultdict(dict)
    for node in edge.graph.nodes:
        if node.op == "call_function":
            name, target = _origin(node)
            others[target][name] = node  # of the parts of an op, the last
    return {
        node.name: other
        for target, nodes in own.items()
        if len(nodes) == len(others[target])
        for node, other in zip(nodes, others[target].values(), strict=True)
        if not _is_quantize(node) or node.args[1:] == other.args[1:]
    }


def _origin(node: Node) -> tuple[str, str]:
    """Name and target of the op that a node of an edge program was made from; one that rounds a value is itself."""
    own = str(getattr(node.target, "_op", node.target))
    source: Any = None
    rest = () if "quantize_per" in own else provenance_of(node)
    while rest:
        source = rest[-1]
        rest = source.from_node
    return (node.name, own) if source is None else (source.name, str(source.target))


def _is_quantize(node: Node) -> bool:
    return "quantize_per_tensor" in str(node.target) and "dequantize" not in str(node.target)


def _values(block: Any, edge: GraphModule) -> tuple[dict[Node, Tensor], set[Node]]:
    """The values of a run by node, and the nodes inside delegates."""
    by_handle: dict[int, list[Node]] = defaultdict(list)
    for node in edge.graph.nodes:
        for handle in debug_handles_of(node):
            by_handle[handle].append(node)
    found: dict[Node, Tensor] = {}
    inside: set[Node] = set()
    for event in block.events:
        handles = event.debug_handles
        every = handles if isinstance(handles, tuple | list) else () if handles is None else (handles,)
        nodes = [node for handle in sorted(map(int, every)) for node in by_handle[handle]]
        if event.is_delegated_op or event.name == "DELEGATE_CALL":
            inside.update(nodes)
        tensors = _tensors(event.debug_data or ())
        if not nodes or not tensors or event.name in ("DELEGATE_CALL", "OPERATOR_CALL") or "dequantize" in event.name:
            continue
        value = tensors[-1]
        rounded = "quantize" in event.name or not value.is_floating_point() or bool(event.is_delegated_op)
        ops = [node for node in nodes if "quantize_per" not in str(node.target)]
        rounds = [node for node in (*nodes, *(ops[-1].users if ops else ())) if _is_quantize(node)]
        if rounded and rounds:
            found[rounds[-1]] = value
        elif ops:
            found[ops[-1]] = value
    return found, inside


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    import torch

    return [value.clone() for value in values if isinstance(value, torch.Tensor)]
