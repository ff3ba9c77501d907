"""Parts of a converted graph that are run alone, to find the smallest that shows a fault."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Literal

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from tqdm import tqdm

from pt2qa._capture.inputs import detached
from pt2qa._deployed.causes import apart
from pt2qa._deployed.deployment import inputs_for, lowerable
from pt2qa._exclusion import exports
from pt2qa._graph.handles import computed_from, copy_nodes, handle_of, name_of
from pt2qa._layers.analysis import compare_layers
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import counted, decibel, few
from pt2qa._simulator import quant_ops
from pt2qa._simulator.accumulate import is_finite
from pt2qa._simulator.batches import Batch, leaves_of
from pt2qa._simulator.simulator import graph_values
from pt2qa.errors import DeploymentError, SelectionError
from pt2qa.plugins import Backend

Fault = Literal["kernel", "lowering", "nonfinite", "rounding"]

TRIES: Final = 60
"""The most parts that are tried once one is found by halves."""


class Parts:
    """The parts of one converted graph.

    Attributes:
        order: its ops, in graph order.
        values: of all nodes: those of the converted graph; for ``rounding``, ops have the float model's.
        suspects: handles of ops whose kernel probably differs.
        says: what the last part that shows the fault shows.
    """

    def __init__(
        self, pair: QuantizedPair, batch: Batch, fault: Fault, backend: Backend | None, bar: Any, suspects: Any = ()
    ) -> None:
        self.pair, self.batch, self.fault, self.backend, self.bar = pair, batch, fault, backend, bar
        self.suspects = suspects
        self.place, inputs = lowerable(pair), pair.values(batch)
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
                raise SelectionError(f"{self.pair.model}: {ABSENT[self.fault]}.")
            worst = min(rows, key=lambda row: row.isolated_sqnr)
            self.says = f"On the float model's values, {worst.name} is {decibel(worst.isolated_sqnr)} dB from float."
            return self._region(worst.handle)
        for candidate in self._candidates():
            if self.shows(candidate):
                return self._without_needless(candidate)
        if self.fault == "nonfinite" or not self.shows(self.order):
            raise SelectionError(f"{self.pair.model}: {ABSENT[self.fault]}.")
        return self._without_needless(self.narrowed())

    def narrowed(self) -> list[Node]:
        """The shortest run of ops that shows the fault, which all of them show."""
        # Whatever is needed comes before the shortest beginning ends, and after the longest rest of it begins.
        count = len(self.order)
        end = count - _most(count, lambda fewer: self.shows(self.order[: count - fewer]))
        start = _most(end, lambda fewer: self.shows(self.order[fewer:end]))
        return self.order[start:end]

    def _candidates(self) -> Iterator[list[Node]]:
        """Parts that probably show the fault."""
        if self.fault == "kernel":
            yield from map(self._region, self.suspects)
        elif self.fault == "nonfinite":
            yield from ([node] for node in self.order if not is_finite(self.values[node]))

    def _without_needless(self, chosen: list[Node]) -> list[Node]:
        """Leaves ops out, many at a time and then one by one, as long as the rest shows the fault."""
        size, limit = len(chosen) // 2, self.tried + TRIES
        while size and self.tried < limit:
            for at in range(len(chosen) - size, -1, -size):
                if self.tried < limit and self.shows(fewer := chosen[:at] + chosen[at + size :]):
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
        needed = computed_from([last], given) | {node for node in last.users if quant_ops.is_dequantize(node)}
        return [node for node in self.order if node in needed]

    def cut(self, chosen: Collection[Node]) -> tuple[GraphModule, tuple[Any, ...], list[Node]]:
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

    def shows(self, chosen: Sequence[Node]) -> bool:
        self.tried += 1
        self.bar.update()
        said = ""
        if chosen:
            part, inputs, _ = self.cut(chosen)
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

    def names(self, nodes: Collection[Node]) -> tuple[str, ...]:
        found = {node: name_of(node, self.pair.names) for node in nodes if not quant_ops.is_quantization(node)}
        return tuple(dict.fromkeys(name or node.name for node, name in found.items()))


ABSENT: Final = {
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
    if not all(is_finite(value) for value in inputs):
        return ""
    bad = sum(not is_finite(value) for value in leaves_of(part(*inputs_for(inputs))))
    return f"Of finite inputs, {counted(bad, 'output')} has NaN or infinite values." if bad else ""


def crashing_ops(pair: QuantizedPair, batch: Batch, backend: Backend) -> str:
    """In a sentence, which ops a backend's process needs to die."""
    with tqdm(desc="look for the op", unit="part", disable=None) as bar:
        search = Parts(pair, batch, "lowering", backend, bar)
        if not search.shows(search.order):
            return "It did not die again on the first batch. "
        return f"It dies of {few(search.names(search.narrowed()))} alone. "
