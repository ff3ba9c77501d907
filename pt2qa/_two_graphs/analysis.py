"""Two graphs of one model on the same batches: where they differ first, and by how much."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._ambient import torch_defaults
from pt2qa._capture.program import Capture
from pt2qa._exclusion import computes
from pt2qa._graph.agreement import kind_of
from pt2qa._graph.handles import OpName
from pt2qa._graph.internals.executorch import aten_op, is_delegate
from pt2qa._graph.internals.torch import pytree, storage_number
from pt2qa._graph.internals.torchao import is_fake_quantize, is_observer, without_observing
from pt2qa._graph.subclasses import with_tensors
from pt2qa._layers.comparison import Row, compared
from pt2qa._layers.sums import Totals, packed, tables
from pt2qa._metrics import error_sums
from pt2qa._quantize.calibration import without
from pt2qa._quantize.pairing import as_graph_module, common_handles, fingerprint
from pt2qa._ranks import over_ranks
from pt2qa._report.prose import counted, few
from pt2qa._report.rows import Environment
from pt2qa._report.selection import OpKind, select
from pt2qa._report.set_apart import SetApart, as_fields
from pt2qa._simulator import op_rules
from pt2qa._simulator.accumulate import Tally, accumulate, empty_batch, is_empty, refuse_empty, sample_of, unlike
from pt2qa._simulator.batches import (
    Batch,
    buffers_kept,
    count_samples,
    flat_outputs,
    flatten_batch,
    has_no_element,
    output_names,
    written_buffers,
)
from pt2qa._simulator.data import Axes, Data, Inside, Mask, without_axes
from pt2qa._simulator.graph_run import GraphRun
from pt2qa._simulator.lifetimes import UNWRITTEN, unwritten_values
from pt2qa._simulator.strides import copied
from pt2qa._two_graphs.report import LOST, GraphReport
from pt2qa._two_graphs.values import plan_values
from pt2qa.errors import PairingError, SimulationError

Graph = GraphModule | ExportedProgram | Capture | nn.Module

_SIDES: Final[dict[str, Literal["a", "b", "graphs"]]] = {"reference": "a", "quantized": "b", "both": "graphs"}
"""What a report of two graphs calls the sides of a comparison."""


@torch_defaults
@over_ranks
def compare_graphs(
    a: Graph,
    b: Graph,
    batches: Iterable[Any],
    *,
    prefixes: Sequence[str] = (),
    ops: Sequence[OpKind] = (),
    model: str = "model",
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> GraphReport:
    """Compares two graphs of one model value by value, with graph ``a`` as the signal.

    For a converted graph and the one that was saved and loaded, an edge program and the converted graph, two captures.
    Ops are matched as by :func:`pt2qa.pair`.  Both graphs run node by node, in step, and a value is freed after its
    last use.  ``docs/save_and_reload.md`` says which values are compared.

    Args:
        a: a graph; it is not changed.
        b: another graph of the same model; it is not changed.  If one graph is a capture, the other may be what
            torchao's ``quantize_`` made of its model.
        batches: iterable of batches, consumed once.
        prefixes: module paths (``layer1``) or op names; only ops under them are compared.
        ops: op types as in :func:`pt2qa.compare_layers`; only these are compared.
        model: the model's name in the report.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count, as in :func:`pt2qa.compare_layers`; graph a tells which axes these are.
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        A layer report, in which ``ref`` stands for graph a and ``quant`` for graph b.  Isolated and rounding error and
        saturation are nan.  After Ctrl-C, if at least one batch is finished, it covers the finished batches.

    Raises:
        PairingError: the graphs have no op in common, or their outputs differ in number, shape or dtype.
        BatchError: there is no batch, or one does not fit one of the graphs.
        SimulationError: an op of one of the graphs fails; the message names it.
        SelectionError: a prefix or op type matches nothing, ``mask`` names no input, or graph a has no shapes.

    >>> exported = torch.export.export(pair.quantized, (x,))
    >>> pt2qa.compare_graphs(pair.quantized, exported, [x]).summary().splitlines()[0]
    'The graphs agree bit for bit: 2 values and the output are equal.'
    """
    graphs = common_handles("first", _runnable("first", a, b), "second", _runnable("second", b, a))
    comparison = _Comparison(*graphs, prefixes, ops, mask)
    data = Data("batches", batches, inputs_of, mask, progress)
    notes = accumulate(comparison, data, title="compare graphs", purpose="compare on")
    refuse_empty(comparison.batches, comparison.health.set_apart)
    return comparison.report(notes, model)


def _runnable(which: str, given: Graph, other: Graph) -> GraphModule:
    """A copy of a graph that runs here: ops of torch, and no observer that would see the batches."""
    given = with_tensors(given).module(check_guards=False) if isinstance(given, ExportedProgram) else given
    graph = as_graph_module(which, given, other)
    graph = without(graph, lambda module: is_observer(module) and not is_fake_quantize(module))
    graph = GraphModule(graph, copy.deepcopy(graph.graph))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = aten_op(node.target)
        elif node.op == "call_module" and is_fake_quantize(module := graph.get_submodule(node.target)):
            graph.set_submodule(node.target, without_observing(module))
    return graph


class _Comparison(Tally):
    def __init__(
        self, a: GraphModule, b: GraphModule, prefixes: Sequence[str], ops: Sequence[OpKind], mask: Mask | None
    ) -> None:
        self.a, self.b = a, b
        self.axes = Axes(a, mask)
        self.outputs = [
            Row(compared(OpName(name, "", "", "output"), -1, None), Totals(), Totals()) for name in _output_names(a, b)
        ]
        self.plan = plan_values(a, b)
        self.written = written_buffers(a), written_buffers(b)
        self.unwritten = unwritten_values(a.graph) | unwritten_values(b.graph)
        chosen = select([value.name for value in self.plan.values], prefixes, ops)
        self.rows = [
            (value, Row(compared(value.name, value.handle, value.params), Totals(), Totals()))
            for number, value in enumerate(self.plan.values)
            if number in chosen
        ]

    def add(self, batch: Batch) -> None:
        values, others = flatten_batch(self.a, batch), flatten_batch(self.b, batch)
        if has_no_element(values):
            self.took(0, empty_batch(self.batches))
            return
        samples = count_samples(values)
        inside = self.axes.of(batch, values)
        with buffers_kept(self.a, self.written[0]), buffers_kept(self.b, self.written[1]):
            found, apart = self._run(values, others, samples, inside)
        for row, totals in found:
            if apart is None:
                row.totals = row.totals.merge(totals)
            else:
                row.apart = row.apart.merge(totals)
        self.took(samples, apart)

    @computes
    @torch.no_grad()
    def _run(
        self, values: list[Any], others: list[Any], samples: int, inside: Inside
    ) -> tuple[list[tuple[Row, Totals]], SetApart | None]:
        """Runs each graph as far as the next value to compare; the sums, and why the batch does not count."""
        a = Walk("a", self.a, values, [value.a for value, _ in self.rows])
        b = Walk("b", self.b, others, [value.b for value, _ in self.rows])
        look = _Search(self.batches, samples)
        for node, value in zip(self.a.graph.find_nodes(op="placeholder"), values, strict=True):
            look.at(str(node.target), value, value, is_input=True)
        found = []
        for value, row in self.rows:
            one, other = a.value(value.a), b.value(value.b)
            if not self.unwritten.isdisjoint((value.a, value.b)):
                row.problem = UNWRITTEN
            elif (totals := _measure(row, one, other, value.a, inside)) is not None:
                found.append((row, totals))
                look.at(row.name, one, other)
            a.compared(value.a)
            b.compared(value.b)
        ends = [flat_outputs(walk.outputs()) for walk in (a, b)]
        nodes = flat_outputs(self.a.graph.output_node().args[0])
        for row, node, one, other in zip(self.outputs, nodes, *ends, strict=True):
            if (totals := _measure(row, one, other, node, inside)) is not None:
                found.append((row, totals))
                look.at(row.name, one, other)
            elif row.problem:
                raise PairingError(f"{row.name} is {row.problem}. Expected two graphs of one model.")
            else:
                row.problem = f"no tensor: {one} in a, {other} in b"
        broken = any(totals.nonfinite for _, totals in found)
        for node, end in zip(nodes, ends[0], strict=True):
            if isinstance(end, Tensor):
                broken = broken or bool(inside.of(node.name, end).isnan().any())
        if is_empty(samples, ends[1]):
            return found, empty_batch(self.batches)
        return found, look.found if broken else None

    def report(self, notes: Sequence[str], model: str) -> GraphReport:
        sums = [
            *(row.summed("rows", read=value.read, note=value.note) for value, row in self.rows),
            *(row.summed("outputs") for row in self.outputs),
        ]
        silent = [each.compared.name for each in sums if each.compared.table == "rows" and not each.seen]
        said = [f"not compared, the value is not a tensor: {few(silent)}"] if silent else []
        settings = {"graph b": fingerprint(self.b), LOST: " ".join(map(str, self.plan.lost)), **self.axes.settings}
        if self.axes.settings:
            layouts = self.axes.layouts or {}
            tensors = [(value, row) for value, row in self.rows if row.totals.dtype or row.apart.dtype]
            said += without_axes([row.name for value, row in tensors if value.a.name not in layouts], len(tensors))
        return GraphReport(
            **tables(sums, only_apart=len(self.health.set_apart) == self.batches),
            unpaired=self.plan.unpaired,
            notes=(*notes, *self.plan.notes, *said, *_delegated("a", self.a), *_delegated("b", self.b)),
            **as_fields(self.health),
            quantizer="",
            model=model,
            environment=Environment.here(fingerprint(self.a)),
            sums=packed(sums, settings),
        )


class Walk(GraphRun):
    """One run of a graph, which writes to copies of its inputs; the caller keeps its buffers.

    ``letter`` is what the graph is called in errors, ``observed`` are the nodes whose values are compared, each as
    often as it is.
    """

    def __init__(self, letter: str, graph: GraphModule, values: Sequence[Any], observed: Sequence[Node]) -> None:
        super().__init__(graph)
        self._letter = letter
        self._writes = any(op_rules.mutates_first_argument(node.target) for node in graph.graph.nodes)
        self._steps = self.steps(*(copied(x) if self._writes and isinstance(x, Tensor) else x for x in values))
        self._comparisons = Counter(observed)
        self._kept: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of an observed node, as it was computed; runs the graph that far."""
        while node not in self._kept:
            next(self._steps)
        return self._kept[node]

    def compared(self, node: Node) -> None:
        """Notes one comparison of a value, which is released after its last."""
        self._comparisons[node] -= 1
        if not self._comparisons[node]:
            del self._kept[node]

    def outputs(self) -> Any:
        """Runs the rest of the graph; what it returns, flat."""
        return deque(self._steps, maxlen=1).pop()

    def run_node(self, n: Node) -> Any:
        if self._writes and op_rules.mutates_first_argument(n.target):
            self._save(self.env[n.all_input_nodes[0]])
        try:
            value = super().run_node(n)
        except Exception as error:
            raise SimulationError(
                f"graph {self._letter} cannot run: {n.target} fails with {type(error).__name__}: {error}. Run the "
                "graph by itself on the batch to see more."
            ) from error
        if self._comparisons[n]:
            self._kept[n] = value
        return value

    def _save(self, written: Tensor) -> None:
        """Copies the values that wait for their comparison in memory that is about to be written to."""
        for node, value in self._kept.items():
            tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
            if any(storage_number(tensor) == storage_number(written) for tensor in tensors):
                self._kept[node] = pytree.tree_map_only(Tensor, copied, value)


class _Search:
    """Looks for the first value of a batch that is NaN, or infinite in one graph alone."""

    def __init__(self, batch: int, samples: int) -> None:
        self.batch, self.samples = batch, samples
        self.found: SetApart | None = None

    def at(self, name: str, a: Any, b: Any, *, is_input: bool = False) -> None:
        culprit = unlike(a, b) if self.found is None else None
        if culprit is not None:
            what, side, wrong = culprit
            sample = sample_of(wrong, self.samples)
            whose = "batch" if is_input else _SIDES[side]
            self.found = SetApart(self.batch, self.samples, sample, whose, what, name)


def _measure(row: Row, a: Any, b: Any, node: Node, inside: Inside) -> Totals | None:
    """The sums of a node's value in both graphs; None, and the row's problem, if it cannot be compared."""
    tensors = [value for value in (a, b) if isinstance(value, Tensor)]
    floats = all(value.is_floating_point() or value.is_complex() for value in tensors)
    if len(tensors) < 2 or a.shape != b.shape or (a.dtype != b.dtype and not floats):
        row.problem = f"{kind_of(a)} in a, {kind_of(b)} in b" if tensors else ""
        return None
    sums = error_sums(inside.of(node.name, a), inside.of(node.name, b))
    return Totals(sums, dtype=str(a.dtype).removeprefix("torch."), shape=tuple(a.shape))


def _output_names(a: GraphModule, b: GraphModule) -> list[str]:
    counts = [len(flat_outputs(graph.graph.output_node().args[0])) for graph in (a, b)]
    names = [output_names(graph, count) for graph, count in zip((a, b), counts, strict=True)]
    if counts[0] != counts[1]:
        raise PairingError(
            f"the first graph returns {', '.join(names[0])}, the second {', '.join(names[1])}. "
            "Expected two graphs of one model."
        )
    return names[0]


def _delegated(letter: str, graph: GraphModule) -> list[str]:
    count = sum(is_delegate(node.target) for node in graph.graph.nodes)
    which = counted(count, "part")
    return [f"{which} of graph {letter} delegated to a backend: their ops ran in Python, not on it"] if count else []
