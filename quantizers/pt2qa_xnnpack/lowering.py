"""From a converted graph to two ``.pte`` programs: the model, and the model with further outputs.

Imported when a model is lowered, since ExecuTorch takes seconds to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import handle_of, observing, with_outputs
from pt2qa_xnnpack.backend import XNNPACKProgram
from pt2qa_xnnpack.internals import (
    contents_of,
    merged_in_delegate,
    op_name,
    outputs_by_delegate,
    programs_of_delegates,
    reason_of,
    runtime,
    without_rounding,
)

COPIED = "XNNPACK removes the copy that makes it"
DISTURBS = "the program computes other outputs where it is returned"
FAILS = "the program does not run where it is returned"
MOVES = ("expand_copy", "view_copy", "permute_copy", "unsqueeze_copy", "squeeze_copy", "clone")
"""Parts of a decomposed op that may stay outside of its delegate: they compute nothing."""

NO_KERNEL = "it is rounded outside of a delegate, and ExecuTorch's Python package has no kernel that does"


def lower(
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    dynamic_shapes: tuple[Any, ...] | None,
    progress: Callable[[str], None],
) -> XNNPACKProgram:
    """See :meth:`pt2qa.plugins.Backend.lower`."""
    # Programs take inputs in the layout of their example.
    inputs = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in inputs]
    progress("lowering the model")
    try:
        model = _lowered(graph, inputs, dynamic_shapes, XnnpackPartitioner())
    except DeploymentError as error:
        progress("lowering it in float")
        raise DeploymentError(f"{error}. {_in_float(graph, inputs, dynamic_shapes)}") from error
    if model.missing:
        raise DeploymentError(
            f"not delegated to XNNPACK, and ExecuTorch's Python package has no kernel for {', '.join(model.missing)}. "
            "Run the program where there is one, and compare what it recorded there: compare_deployed(deployed=...)"
        )
    facts = tuple(_facts(model))
    lost: dict[str, str] = {}
    found = XNNPACKProgram(model.data, b"", {}, lost, model.delegated, facts, bool(model.written), len(model.inputs))
    replace(found).run(inputs)  # a copy, so that the weights that it packs are freed

    def attempt(wanted: list[str]) -> tuple[XNNPACKProgram, str]:
        progress(f"lowering it with {len(wanted)} taps")
        observed, positions = _observed(graph, inputs, wanted, dynamic_shapes, lost)
        tried = replace(found, observed=observed, positions=positions)
        return tried, _disturbance(tried, inputs)

    return observing(taps, attempt, lost) or found


def _in_float(graph: GraphModule, inputs: Sequence[Any], dynamic_shapes: tuple[Any, ...] | None) -> str:
    """Whether quantization is why a model cannot be lowered."""
    try:
        _lowered(without_rounding(graph), inputs, dynamic_shapes, XnnpackPartitioner())
    except DeploymentError as error:
        return f"Neither can it be in float: {error}"
    return "In float, without any rounding, it is lowered"


def _disturbance(program: XNNPACKProgram, inputs: Sequence[Any]) -> str:
    """Why the values of a program cannot be trusted; the program without taps runs."""
    try:
        return DISTURBS if program.run(inputs).changed else ""
    except DeploymentError:
        return FAILS


# -- taps --------------------------------------------------------------------------------------------------------------


class _Watched(XnnpackPartitioner):  # type: ignore[misc]
    """Knows what the program returned before it was cut into delegates, and which output of which delegate that is."""

    def __init__(self, own: int) -> None:
        super().__init__()
        self.own = own  # outputs of the model, which come first
        self.returned: list[str] = []
        self.by_delegate: dict[str, list[Node]] = {}

    def partition(self, exported_program: ExportedProgram) -> Any:
        self.returned = [node.name for node in _outputs(exported_program)]
        if self.merged():
            raise _MergedError
        result = super().partition(exported_program)
        self.by_delegate = outputs_by_delegate(result.tagged_exported_program.graph_module)
        return result

    def merged(self) -> list[tuple[int, int]]:
        """Positions of outputs that are one node: the first, and each later one that is not the model's own."""
        first = {name: position for position, name in reversed(list(enumerate(self.returned)))}
        pairs = [(first[name], position) for position, name in enumerate(self.returned) if first[name] != position]
        return [pair for pair in pairs if pair[1] >= self.own]

    def merged_later(self, error: DeploymentError) -> list[tuple[int, int]]:
        """The outputs that XNNPACK's own passes made one value, as :meth:`merged`; -1 for a delegate's input."""
        merged = merged_in_delegate(error.__cause__)
        if merged is None:
            return []
        names = [node.name for node in self.by_delegate[merged.tag]]
        where = {name: position for position, name in enumerate(self.returned)}
        numbered = [
            (-1 if first < 0 else where.get(names[first], -1), where.get(names[later], -1))
            for first, later in merged.pairs
        ]
        return [(min(pair), max(pair)) for pair in numbered if max(pair) >= self.own]


class _MergedError(Exception):
    """Two outputs have become one node."""


def _observed(
    graph: GraphModule,
    inputs: Sequence[Any],
    taps: Sequence[str],
    dynamic_shapes: tuple[Any, ...] | None,
    lost: dict[str, str],
) -> tuple[bytes, dict[str, int]]:
    """The program that also returns the taps, and the position of each among its outputs; adds to ``lost``.

    It is empty where the model itself returns them all.

    XNNPACK refuses outputs that have become one value, as before and after a copy that it removes.  Then one of them is
    returned and serves for both.
    """
    own = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    same = dict[str, str | int]()
    while wanted := [name for name in taps if name not in lost and name not in same]:
        names = [""] * own + wanted
        partitioner = _Watched(own)
        try:
            found = _lowered(with_outputs(graph, wanted), inputs, dynamic_shapes, partitioner)
        except _MergedError:
            merged = partitioner.merged()
        except DeploymentError as error:
            merged = partitioner.merged_later(error)
            if not merged:
                raise
        else:
            gone = [name for name, op in zip(names, found.outputs, strict=True) if name and op in found.missing]
            if not gone:
                return found.data, _positions(names, same)
            lost |= dict.fromkeys(gone, NO_KERNEL)
            continue
        for kept, tap in merged:
            if kept < 0:
                lost[names[tap]] = COPIED
            else:
                same[names[tap]] = names[kept] or kept
    return b"", _positions([], same)


def _positions(names: Sequence[str], same: dict[str, str | int]) -> dict[str, int]:
    """By tap, the output that has its value."""
    found = {name: position for position, name in enumerate(names) if name}
    for name in same:
        kept: str | int = name
        while isinstance(kept, str) and kept in same:
            kept = same[kept]
        if isinstance(kept, int) or kept in found:
            found[name] = kept if isinstance(kept, int) else found[kept]
    return found


# -- one program -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A lowered program.

    Attributes:
        data: the ``.pte`` file.
        delegated: handles of the ops that are in a delegate as a whole; -1 for all ops without one.
        delegates: how many there are.
        portable: names of the ops outside of delegates, once for each op.
        outputs: name of the op that makes each output; empty for a delegate's.
        missing: names of ops for which the runtime of the Python package has no kernel.
        written: names of the buffers that the program writes to.
        inputs: names of the inputs that it writes to, whose values come before its outputs.
    """

    data: bytes
    delegated: frozenset[int]
    delegates: int
    portable: tuple[str, ...]
    outputs: tuple[str, ...]
    missing: tuple[str, ...]
    written: tuple[str, ...]
    inputs: tuple[str, ...] = ()


def _lowered(
    graph: GraphModule, inputs: Sequence[Any], dynamic_shapes: tuple[Any, ...] | None, partitioner: XnnpackPartitioner
) -> _Lowered:
    try:
        with torch.no_grad():
            exported = torch.export.export(graph, tuple(inputs), dynamic_shapes=dynamic_shapes)
            edge = to_edge_transform_and_lower(exported, partitioner=[partitioner])
        program = edge.exported_program()
        delegates = programs_of_delegates(program.graph_module)
        outside = [node for node in program.graph.nodes if op_name(node)]
        computed = [node for node in outside if op_name(node).partition("::")[2] not in MOVES]
        delegated = _handles([node for each in delegates for node in each.graph.nodes]) - _handles(computed)
        # Whatever was put in without a handle is inside, if nothing outside lacks one.
        delegated |= {-1} if all(handle_of(node) is not None for node in computed) else set()
        portable, outputs = tuple(map(op_name, outside)), tuple(map(op_name, _outputs(program)))
        data = bytes(edge.to_executorch().buffer)
    except _MergedError:
        raise
    except Exception as error:
        raise DeploymentError(f"ExecuTorch could not lower the model: {reason_of(error)}") from error
    known = runtime().operator_registry.operator_names
    missing = {name.partition(".")[0] for name in contents_of(data).operators if name not in known}
    signature = program.graph_signature
    written = tuple(signature.buffers_to_mutate.values()), tuple(signature.user_inputs_to_mutate.values())
    return _Lowered(data, delegated, len(delegates), portable, outputs, tuple(sorted(missing)), *written)


def _outputs(program: ExportedProgram) -> list[Node]:
    """What the caller gets, without the buffers and inputs that the program writes to."""
    every: Sequence[Node] = program.graph.output_node().args[0]
    return list(every)[-len(program.graph_signature.user_outputs) :]


def _handles(nodes: Collection[Node]) -> frozenset[int]:
    return frozenset(handle for node in nodes if (handle := handle_of(node)) is not None)


def _facts(model: _Lowered) -> Iterator[str]:
    what = f"{model.delegates} XNNPACK delegate" + "s" * (model.delegates != 1)
    counts = Counter(name.partition("::")[2] for name in model.portable)
    listed = ", ".join(f"{op} ({count})" for op, count in counts.items())
    yield f"{what}; outside, in portable kernels: {listed}" if listed else f"{what}, no op outside"
    if model.written:
        yield f"the file does not hold the values of buffers that it writes to: {', '.join(model.written)}"
    if model.inputs:
        yield f"it returns what it writes to its inputs before its outputs: {', '.join(model.inputs)}"
