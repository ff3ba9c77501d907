"""One site of a converted graph given another function, by plain ``torch.fx``; pt2qa says where it is, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def with_function(pair: pt2qa.QuantizedPair, site: Site, function: Function) -> GraphModule:
    """A copy of the float model that applies a function to the value of one site."""
    graph = quantized_at(pair, [site.index])
    for node in list(graph.graph.nodes):
        if ".dequantize_per_" not in str(node.target):
            continue
        source = node.args[0]
        source = source.args[0] if source.op == "call_function" else source
        with graph.graph.inserting_before(node):
            if site.kind == "activation":
                graph.add_submodule("changed", Applied(function))
                instead = graph.graph.call_module("changed", (source,))
            else:
                graph.register_buffer("changed", function(float_value(pair, site)))
                instead = graph.graph.get_attr("changed")
        node.replace_all_uses_with(instead)
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
