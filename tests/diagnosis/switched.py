"""One site of a converted graph given another function, by plain ``torch.fx``; pt2qa says where it is, no more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2qa
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator.program import QuantParams, Site
from tests.sensitivity.brute_force import quantized_at

Function = Callable[[Tensor], Tensor]


class Applied(nn.Module):
    """A function as a module, which graphs can call."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def with_function(pair: pt2qa.QuantizedPair, site: Site, function: Function, also: Collection[int] = ()) -> GraphModule:
    """A copy of the float model, or with some activation sites on, that applies a function to one site's value."""
    graph = quantized_at(pair, [site.index, *also])
    own = next((step.node for step in pair.program.steps if step.site == site.index), "")
    for node in list(graph.graph.nodes):
        if ".dequantize_per_" not in str(node.target):
            continue
        source = node.args[0]
        if source.op == "get_attr" and site.kind != "activation":
            graph.register_buffer("changed", function(float_value(pair, site)))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr("changed"))
        elif node.name == own:
            graph.add_submodule("changed", Applied(function))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_module("changed", (source.args[0],)))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def float_value(pair: pt2qa.QuantizedPair, site: Site) -> Tensor:
    """The float value of a weight or bias."""
    value: Tensor = next(c.reference for c in pair.program.constants if c.site == site.index)
    return value.detach()


def noise(pair: pt2qa.QuantizedPair, batches: Sequence[Any], end: GraphModule, start: GraphModule) -> float:
    """The squared difference of two models' outputs, summed over batches."""
    total = 0.0
    for batch in batches:
        with torch.no_grad():
            left, right = (pytree.tree_leaves(graph(*batch)) for graph in (end, start))
        total += sum(float(((a.double() - b.double()) ** 2).sum()) for a, b in zip(left, right, strict=True))
    return total


def clamped(params: QuantParams, x: Tensor) -> Tensor:
    """The end of the range where the value is more than half a step outside."""
    if params.dynamic:
        return x
    shape = [1] * x.dim()
    if params.axis is not None:
        shape[params.axis] = -1
    scale, zero_point = (torch.as_tensor(each).reshape(shape) for each in (params.scale, params.zero_point))
    low, high = ((end - zero_point) * scale.double() for end in (params.quant_min, params.quant_max))
    ends = torch.maximum(torch.minimum(x.double(), high), low)
    outside = (x.double() - ends).abs() > 0.501 * scale.double()
    return torch.where(outside, ends.to(x.dtype), x)
