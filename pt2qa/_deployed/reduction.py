"""The smallest part of a converted graph that still shows a fault, as a file that runs alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from tqdm import tqdm

from pt2qa._ambient import torch_defaults
from pt2qa._capture.inputs import detached
from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.causes import apart
from pt2qa._deployed.deployment import backend_for, inputs_for, lowerable
from pt2qa._exclusion import exports
from pt2qa._graph.handles import copy_nodes, handle_of, name_of
from pt2qa._layers.analysis import compare_layers
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._report.prose import counted, decibel, few
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, leaves_of
from pt2qa._simulator.simulator import graph_values
from pt2qa.errors import BatchError, DeploymentError, SelectionError
from pt2qa.plugins import Backend

Fault = Literal["kernel", "lowering", "nonfinite", "rounding"]

TRIES: Final = 60
"""The most parts that are tried once one is found by halves."""

PROGRAM, TENSORS, SCRIPT = "part.pt2", "part.safetensors", "run.py"


@dataclass(frozen=True)
class Reduction:
    """The smallest part found that still shows a fault.

    Attributes:
        graph: the part of the converted graph, with flat inputs and a flat tuple of outputs.
        inputs: what it read in the model, as many tensors as the graph has inputs.
        expected: what it should return: the converted part's outputs, or of the fault ``rounding`` the float model's.
        ops: names of its ops, in graph order.
        shows: what is wrong with it, in a sentence.
        fault: as requested.
        of: how many ops the model has.
        tried: how many parts were looked at.
        script: code that defines ``deployed(part, inputs)`` with the backend alone; empty without a backend.

    What :func:`pt2qa.reduce` returns.
    """

    graph: GraphModule
    inputs: tuple[Any, ...]
    expected: tuple[Tensor, ...]
    ops: tuple[str, ...]
    shows: str
    fault: Fault
    of: int
    tried: int
    script: str

    def __str__(self) -> str:
        return (
            f"{counted(len(self.ops), 'op')} of {self.of} (after {counted(self.tried, 'try', 'tries')}): "
            f"{few(self.ops)}. {self.shows}"
        )

    @exports
    def save(self, folder: str | Path) -> Path:
        """Writes the part, its inputs and ``run.py``, which shows the fault without pt2qa, to a new folder.

        Raises:
            DeploymentError: the folder exists, or cannot be written.
        """
        folder = Path(folder)
        program = torch.export.export(copy_nodes(self.graph), self.inputs, strict=False)
        tensors = {f"input{at}": value for at, value in enumerate(self.inputs)}
        tensors |= {f"expected{at}": value for at, value in enumerate(self.expected)}
        try:
            folder.mkdir(parents=True)
            torch.export.save(program, folder / PROGRAM)
            # In memory of its own: the file holds no views.
            save_file({name: detached(value).contiguous() for name, value in tensors.items()}, folder / TENSORS)
            (folder / SCRIPT).write_text(self._code(), encoding="utf-8")
        except OSError as error:
            raise DeploymentError(
                f"{folder}: {error.strerror or error}. Give a folder that does not exist yet."
            ) from error
        return folder

    def _code(self) -> str:
        graph = "".join(f"# {line}".rstrip() + "\n" for line in self.graph.code.strip().splitlines())
        return _CODE.format(shows=self.shows.replace('"""', "'''"), script=self.script or _EAGER, graph=graph)


_EAGER: Final = """\
def deployed(part, inputs):
    return part(*inputs)
"""
_CODE: Final = '''\
"""{shows}"""

from pathlib import Path

import torch
import torchao.quantization.pt2e.quantize_pt2e  # registers the ops of quantized graphs
from safetensors.torch import load_file

{script}

folder = Path(__file__).parent
part = torch.export.load(folder / "part.pt2").module()
tensors = load_file(folder / "part.safetensors")
inputs = tuple(tensors[f"input{{at}}"] for at in range(len(tensors)) if f"input{{at}}" in tensors)
for at, found in enumerate(deployed(part, inputs)):
    expected, found = tensors[f"expected{{at}}"].double(), found.double()
    noise = (expected - found).square().sum()
    apart = f"{{10 * (expected.square().sum() / noise).log10():.1f}} dB" if noise else "nothing"
    print(f"output {{at}}: {{apart}} apart, by {{(expected - found).abs().max():.4g}} at most")

# The part:
{graph}'''


@torch_defaults
def reduce(
    pair: QuantizedPair,
    batch: Batch,
    fault: Fault = "kernel",
    *,
    backend: str | Backend | None = None,
    progress: bool | None = None,
) -> Reduction:
    """Cuts the smallest part that still shows a fault out of a quantized model, with its weights and its inputs.

    Parts of the converted graph run on the values that they read in the model: first and last ops are taken away by
    halves, then others, as long as the rest shows the same. What is found is no proof that nothing smaller does.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batch: one batch, as the model takes it.
        fault: what to look for. ``"kernel"``: the backend's kernels are more than one integer step from the converted
            graph (float values: below 60 dB). ``"lowering"``: the backend refuses the model, or cannot run it, with the
            same message. ``"nonfinite"``: NaN or infinite values from finite ones. ``"rounding"``: the region whose
            rounding costs most, of lowest isolated SQNR.
        backend: as in :func:`pt2qa.compare_deployed`; only for the first two.
        progress: whether to show progress; None: if stderr is a terminal.

    Returns:
        The part; :meth:`Reduction.save` writes it as a script.

    Raises:
        SelectionError: the model does not show the fault, or an argument does not belong to it.
        BatchError: the batch is none of the model's, such as a list of batches.
        DeploymentError: no backend runs the model here.

    Source:
        "Simplifying and Isolating Failure-Inducing Input" (Zeller and Hildebrandt, 2002).

    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    >>> pair = pt2qa.quantize(pt2qa.capture(model, x), "x86", [x], progress=False)
    >>> pt2qa.reduce(pair, x, "rounding").ops
    ('0/linear', '1/relu')
    """
    check_pair(pair)
    if fault not in get_args(Fault):
        raise SelectionError(f"unknown fault {fault!r}; expected one of {', '.join(get_args(Fault))}.")
    lowers = fault in ("kernel", "lowering")
    if backend is not None and not lowers:
        raise SelectionError(f'fault="{fault}" is looked for without a backend; leave out backend={backend!r}.')
    with tqdm(desc="reduce", unit="part", disable=None if progress is None else not progress) as bar:
        return _Search(pair, batch, fault, backend_for(pair, backend) if lowers else None, bar).reduction()


class _Search:
    """The parts of one converted graph.

    Attributes:
        order: its ops, in graph order.
        values: of all nodes: those of the converted graph; for ``rounding``, ops have the float model's.
        says: what the last part that shows the fault shows.
    """

    def __init__(self, pair: QuantizedPair, batch: Batch, fault: Fault, backend: Backend | None, bar: Any) -> None:
        self.pair, self.batch, self.fault, self.backend, self.bar = pair, batch, fault, backend, bar
        self.place = lowerable(pair)
        try:
            inputs = pair.values(batch)
        except BatchError as error:
            one = " reduce looks at one batch; of a list of them, pass one." if isinstance(batch, list) else ""
            raise BatchError(f"{error}{one}") from error
        self.graph = self.place.graph
        self.order = [node for node in self.graph.graph.nodes if node.op == "call_function"]
        self.values: dict[Node, Any] = {}
        self.tried, self.says, self.refusal = 0, "", ""
        floats: dict[str, Any] = {}
        if fault == "rounding":
            pair.simulator.run(inputs, False, lambda step, value: floats.update({step.node: detached(value)}))
        original = self.place.original

        def keep(node: Node, value: Any) -> Any:
            self.values[node] = detached(
                value if quant_ops.is_quantization(node) else floats.get(original[node.name], value)
            )
            return self.values[node]

        graph_values(self.graph, inputs, keep)

    def found(self) -> list[Node]:
        """The ops of the smallest part found."""
        if self.fault == "rounding":
            rows: Any = compare_layers(self.pair, [self.batch], progress=False).rows
            ops = {handle_of(node) for node in self.order}
            rows = [row for row in rows if row.handle in ops and math.isfinite(row.isolated_sqnr)]
            if not rows:
                raise SelectionError(f"{self.pair.model}: {_ABSENT[self.fault]}.")
            worst = min(rows, key=lambda row: row.isolated_sqnr)
            self.says = f"On the float model's values, {worst.name} is {decibel(worst.isolated_sqnr)} dB from float."
            return self._region(worst.handle)
        for candidate in self._candidates():
            if self._shows(candidate):
                return self._without_needless(candidate)
        if self.fault == "nonfinite" or not self._shows(self.order):
            raise SelectionError(f"{self.pair.model}: {_ABSENT[self.fault]}.")
        # Whatever is needed comes before the shortest beginning ends, and after the longest rest of it begins.
        count = len(self.order)
        end = count - _most(count, lambda fewer: self._shows(self.order[: count - fewer]))
        start = _most(end, lambda fewer: self._shows(self.order[fewer:end]))
        return self._without_needless(self.order[start:end])

    def _candidates(self) -> Iterator[list[Node]]:
        """Parts that probably show the fault."""
        if self.fault == "kernel":
            report = compare_deployed(self.pair, [self.batch], backend=self.backend, progress=False)
            if not report.suspects:  # the output alone is no proof: right kernels' single steps grow along the graph
                raise SelectionError(f"{self.pair.model}: {_ABSENT[self.fault]}.")
            yield from (self._region(row.handle) for row in report.suspects)
        elif self.fault == "nonfinite":
            yield from ([node] for node in self.order if not _is_finite(self.values[node]))

    def _without_needless(self, chosen: list[Node]) -> list[Node]:
        """Leaves ops out, many at a time and then one by one, as long as the rest shows the fault."""
        size, limit = len(chosen) // 2, self.tried + TRIES
        while size and self.tried < limit:
            for at in range(len(chosen) - size, -1, -size):
                if self.tried < limit and self._shows(fewer := chosen[:at] + chosen[at + size :]):
                    chosen = fewer
            size //= 2
        return chosen

    def _region(self, handle: int) -> list[Node]:
        """The ops that compute a value from values that the report has rows for, with all roundings."""
        nodes = {node.name: node for node in self.order}
        rows = [each for each in self.place.values if each.node in nodes]
        ends = [nodes[each.node] for each in rows if each.owner is not None and each.owner.handle == handle]
        last = ends[-1] if ends else [node for node in self.order if handle_of(node) == handle][-1]
        given = {nodes[each.node] for each in rows} - {last}
        given = {node.all_input_nodes[0] if quant_ops.is_quantize(node) else node for node in given} - {last}
        needed, ahead = {last, *(node for node in last.users if quant_ops.is_dequantize(node))}, [last]
        while ahead:
            ahead = [node for each in ahead for node in each.all_input_nodes if node not in needed | given]
            needed.update(ahead)
        return [node for node in self.order if node in needed]

    def _cut(self, chosen: Collection[Node]) -> tuple[GraphModule, tuple[Any, ...], list[Node]]:
        """These ops as a graph of their own, its inputs, and the nodes of its outputs."""
        needed = {*chosen}
        for node in reversed(self.order):
            if node in needed:  # what only ops can hand on, and integers with the op that rounds to them
                needed.update(each for each in node.all_input_nodes if self._inside(each))
        graph, copies, given = Graph(), dict[Node, Node](), list[Node]()
        for node in self.graph.graph.nodes:
            if node in needed or (node.op == "get_attr" and not needed.isdisjoint(node.users)):
                copies[node] = graph.node_copy(node, copies.__getitem__)
            elif not needed.isdisjoint(node.users):
                copies[node] = graph.placeholder(f"input{len(given)}")
                given.append(node)
        ends = [node for node in self.order if node in needed and isinstance(self.values[node], Tensor)]
        ends = [node for node in ends if not node.users or not needed.issuperset(node.users)]
        graph.output(tuple(copies[node] for node in ends))
        return GraphModule(self.graph, graph), inputs_for([self.values[node] for node in given]), ends

    def _inside(self, node: Node) -> bool:
        value = self.values.get(node)
        return node.op == "call_function" and (not isinstance(value, Tensor) or quant_ops.is_quantize(node))

    def _shows(self, chosen: Sequence[Node]) -> bool:
        self.tried += 1
        self.bar.update()
        said = ""
        if chosen:
            part, inputs, _ = self._cut(chosen)
            said = (self._differs if self.fault == "kernel" else self._refused if self.backend else _nonfinite)(
                part, inputs
            )
        self.says = said or self.says
        return bool(said)

    def _differs(self, part: GraphModule, inputs: Sequence[Any]) -> str:
        expected = leaves_of(part(*inputs_for(inputs)))
        try:
            outputs = self._run(part, inputs)
        except DeploymentError:
            return ""
        differ = [found for found in map(apart, expected, outputs) if found]
        return f"The kernel is {differ[0]} from the converted graph." if differ else ""

    def _refused(self, part: GraphModule, inputs: Sequence[Any]) -> str:
        try:
            self._run(part, inputs)
        except DeploymentError as error:
            line = str(error).partition("\n")[0]
            kind = re.sub(r"\d+|'[^']*'", "", line.partition(". ")[0])
            self.refusal = self.refusal or kind
            return line if kind == self.refusal else ""
        return ""

    @exports
    def _run(self, part: GraphModule, inputs: Sequence[Any]) -> Sequence[Tensor]:
        assert self.backend is not None
        program = self.backend.lower(
            copy_nodes(part), inputs_for(inputs), (), dynamic_shapes=None, progress=self.bar.set_postfix_str
        )
        return program.run(inputs_for(inputs)).outputs

    def reduction(self) -> Reduction:
        chosen = self.found()
        part, inputs, ends = self._cut(chosen)
        expected = leaves_of(part(*inputs_for(inputs)))
        if self.fault == "rounding":  # what is rounded to integers, as the float model has it before
            sources = [next(iter(node.all_input_nodes)) if quant_ops.is_dequantize(node) else node for node in ends]
            sources = [next(iter(node.all_input_nodes)) if quant_ops.is_quantize(node) else node for node in sources]
            expected = [self.values[node] for node in sources]
        names = [self._names(chosen), self._names(self.order)]
        script = getattr(self.backend, "script", "")
        return Reduction(
            part, inputs, tuple(expected), names[0], self.says, self.fault, len(names[1]), self.tried, script
        )

    def _names(self, nodes: Collection[Node]) -> tuple[str, ...]:
        found = {node: name_of(node, self.pair.names) for node in nodes if not quant_ops.is_quantization(node)}
        return tuple(dict.fromkeys(name or node.name for node, name in found.items()))


_ABSENT: Final = {
    "kernel": "on this batch the kernels compute what the converted graph computes, within a step",
    "lowering": "the backend lowers it, and runs it on this batch",
    "rounding": "on this batch no op differs from the float model's",
    "nonfinite": "on this batch all values are finite, or the batch itself is not",
}


def _most(count: int, holds: Callable[[int], bool]) -> int:
    """The largest number below ``count`` that holds, if all below it do; 0 holds."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _nonfinite(part: GraphModule, inputs: Sequence[Any]) -> str:
    """Which outputs are not finite; nothing if an input is not."""
    if not all(_is_finite(value) for value in inputs):
        return ""
    bad = sum(not _is_finite(value) for value in leaves_of(part(*inputs_for(inputs))))
    return f"Of finite inputs, {counted(bad, 'output')} has NaN or infinite values." if bad else ""


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())
