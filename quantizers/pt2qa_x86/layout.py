"""A change of a graph that oneDNN's kernels need, and that costs nothing when they run.

Needs torch alone: a printed ``quantizer.py`` has the source of this file.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def for_x86(graph_module: GraphModule) -> list[tuple[Node, str]]:
    """Edits a prepared or converted graph so that oneDNN computes what it says; returns what was done to which op.

    The graph's own numbers stay.  torch 2.13 packs the int8 weight of a linear in the order of memory, whatever its
    strides: one that is another tensor's transpose is read as that tensor.  So such a weight gets memory of its own.

    >>> linear = torch.nn.Linear(4, 4)
    >>> linear.weight = torch.nn.Parameter(torch.randn(4, 4).t())
    >>> graph = torch.export.export(linear, (torch.zeros(1, 4),)).module()
    >>> [(str(node), done) for node, done in for_x86(graph)]
    [('linear', 'has its weight in the order of memory')]
    """
    changed = []
    for node in list(graph_module.graph.nodes):
        if not is_strided(graph_module, weight := weight_of(node)):
            continue
        assert weight is not None
        reader = node  # what stands between the weight and the linear reads the copy
        while weight not in reader.all_input_nodes:
            reader = reader.args[1 if reader is node else 0]
        with node.graph.inserting_after(weight):
            if weight.op == "get_attr":
                own = _copied(graph_module, weight)
            else:
                own = node.graph.call_function(torch.ops.aten.contiguous.default, (weight,))
        own.meta = copy.copy(weight.meta)
        reader.replace_input_with(weight, own)
        changed.append((node, "has its weight in the order of memory"))
    graph_module.recompile()
    return changed


def weight_of(node: Node) -> Node | None:
    """The constant, or what is computed of one, that a linear multiplies by, behind observers and rounding."""
    weight: Any = node.args[1] if str(node.target).startswith("aten.linear") else None
    while (
        isinstance(weight, Node) and weight.args and (weight.op == "call_module" or "quantize_" in str(weight.target))
    ):
        weight = weight.args[0]
    return weight if isinstance(weight, Node) and weight.op in ("get_attr", "call_function") else None


def is_strided(graph_module: GraphModule, weight: Node | None) -> bool:
    """Whether a weight is not in the order of memory."""
    value = None if weight is None else _value(graph_module, weight)
    return isinstance(value, Tensor) and not value.is_contiguous()


def _value(graph_module: GraphModule, node: Node) -> Any:
    """What is computed of constants, on the meta device, so that nothing is written; None of anything else."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(graph_module)
        return value.detach().to("meta") if isinstance(value, Tensor) else None
    values = {each: _value(graph_module, each) for each in node.all_input_nodes}
    if node.op != "call_function" or not values or any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except NotImplementedError:  # an op that does not say what strides it gives
        return None


def _copied(graph_module: GraphModule, weight: Node) -> Node:
    """A copy of a constant, as one of the same kind."""
    name = next(free for number in range(1, 10**6) if not hasattr(graph_module, free := f"{weight.name}_{number}"))
    value = operator.attrgetter(str(weight.target))(graph_module).detach()
    value = value.clone(memory_format=torch.contiguous_format)
    if value.is_floating_point():
        setattr(graph_module, name, torch.nn.Parameter(value, requires_grad=False))
    else:
        graph_module.register_buffer(name, value)
    return weight.graph.get_attr(name)
