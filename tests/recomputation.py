"""The values of the layer table by an independent computation.

``torch.fx.Interpreter`` runs the reference and the converted graph, and isolated values come from the converted graph's
own nodes on the reference graph's values.  Nothing of pt2qa's engine takes part, but for the regions, which say what is
run together.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

import pt2qa


class Values(NamedTuple):
    """What one row compares, on one batch."""

    reference: Tensor
    quantized: Tensor
    isolated: Tensor
    rounded: Tensor


class Recording(Interpreter):
    """Runs a graph and keeps a copy of every value as it was made; memory that is not written yet is NaN."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[Node, Any] = {}

    def run_node(self, node: Node) -> Any:
        if node.target == "_guards_fn":
            return None
        result = super().run_node(node)
        if "empty" in str(node.target) and isinstance(result, Tensor) and result.is_floating_point():
            result.fill_(math.nan)  # as it was, it would be a number that differs from run to run
        self.values[node] = result.clone() if isinstance(result, Tensor) else result
        return result

    @classmethod
    def of(cls, graph: GraphModule, *batch: Tensor) -> dict[Node, Any]:
        recording = cls(graph)
        with torch.no_grad():
            recording.run(*(value.clone() for value in batch), enable_io_processing=False)
        return recording.values


def is_quantization(node: Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.")


def by_handle(graph: GraphModule) -> dict[int, Node]:
    """The node of each handle; where an op became several, the last one."""
    found = {}
    for node in graph.graph.nodes:
        if node.op in ("call_function", "placeholder") and not is_quantization(node) and "custom" in node.meta:
            found[node.meta["custom"]["numeric_debug_handle"]] = node
    return found


def of_constants(graph: GraphModule) -> set[Node]:
    """The nodes of a graph that compute something of constants alone."""
    found: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and all(each.op == "get_attr" or each in found for each in node.all_input_nodes):
            found.add(node)
    return found


class Recomputation:
    """The values of all rows of a pair on one batch, from its two graphs."""

    def __init__(self, pair: pt2qa.QuantizedPair, *batch: Tensor) -> None:
        self.pair = pair
        self.nodes, self.quantized = by_handle(pair.quantized), Recording.of(pair.quantized, *batch)
        reference, values = by_handle(pair.reference), Recording.of(pair.reference, *batch)
        self.reference = {number: values[node] for number, node in reference.items()}
        self.floats = {self.nodes[number]: value for number, value in self.reference.items() if number in self.nodes}
        nodes = {node.name: node for node in pair.quantized.graph.nodes}
        own = ({nodes[pair.program.steps[step].node] for step in region.steps} for region in pair.regions)
        self.region = {node: region for region in own for node in region}
        # A constant is the quantized one wherever it is read; what is computed of rounded ones is a step with an error.
        steps = {step.node for step in pair.program.steps}
        for node in of_constants(pair.quantized):
            if node.name not in steps:
                self.floats.pop(node, None)
        # Ops that a plug-in put there, which have no handle.
        self.unnamed = {
            step.name: nodes[step.node] for step in pair.program.steps if step.site is None and step.handle < 0
        }
        for node in self.unnamed.values():
            self.floats[node] = self._evaluated(node, {node}, self._unrounded(node))

    def of(self, row: pt2qa.LayerRow, nth: int = 0) -> Values:
        """The values of a row; where nothing is rounded, the rounded one is the reference.

        Of several rows of one op with equal dtype, scale and zero point, as those that are rounded by channel have,
        ``nth`` is the row's number.
        """
        op = self.nodes[row.handle] if row.handle >= 0 else self.unnamed[row.name]
        seen = op if row.observed_at == "raw" else self._dequantized(op, row, nth)
        inside = self.region.get(op, set())
        isolated, rounded = self._evaluated(seen, inside, {}), self._evaluated(seen, set(), {})
        reference = self.reference[row.handle] if row.handle >= 0 else self.floats[op]
        return Values(reference, self.quantized[seen], isolated, rounded)

    def _unrounded(self, node: Node) -> dict[Node, Any]:
        """The reference's values of what a node reads, rounded ones before rounding."""
        found = {}
        for read in node.all_input_nodes:
            source: Any = read
            while is_quantization(source):
                source = source.args[0]
            if source in self.floats:
                found[read] = self.floats[source]
        return found

    def _dequantized(self, op: Node, row: pt2qa.LayerRow, nth: int) -> Node:
        """The dequantize node behind an op with this dtype, scale and zero point; equal ones of a value count once."""
        found: dict[tuple[Any, ...], Node] = {}
        behind = [*op.users]
        for quantize in behind:  # a value may be rounded twice, for two specs at the ends of one edge
            if not is_quantization(quantize) or "choose_qparams" in str(quantize.target):
                continue
            behind += quantize.users
            if ".dequantize" in str(quantize.target):
                continue
            scale, zero_point, dtype = quantize.args[1], quantize.args[2], str(quantize.args[-1])
            if isinstance(scale, Node) and scale.op == "get_attr":  # by channel; a row has the largest
                scale = float(self.quantized[scale].max())
                points = self.quantized[zero_point].unique().tolist()
                zero_point = points[0] if len(points) == 1 else math.nan
            same_scale = math.isnan(row.scale) if isinstance(scale, Node) else scale == row.scale
            same_zero_point = isinstance(zero_point, Node) or str(float(zero_point)) == str(float(row.zero_point))
            if same_scale and same_zero_point and dtype == f"torch.{row.dtype}":
                found.setdefault(quantize.args, next(iter(quantize.users)))
        if nth >= len(found):
            raise AssertionError(f"no site of scale {row.scale} and dtype {row.dtype} reads {op}")
        return list(found.values())[nth]

    def _evaluated(self, node: Node, inside: set[Node], known: dict[Node, Any]) -> Any:
        """A node on the reference's values: nodes inside and quantization are run, all others are looked up."""
        if node not in known:
            if node.op == "get_attr":
                known[node] = functools.reduce(getattr, str(node.target).split("."), self.pair.quantized)
            elif node in self.floats and node not in inside:
                known[node] = self.floats[node]
            else:
                args, kwargs = torch.fx.map_arg(
                    (node.args, node.kwargs), lambda each: self._evaluated(each, inside, known)
                )
                args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
                with torch.no_grad():
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]
