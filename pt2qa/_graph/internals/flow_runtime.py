"""What pt2qa does to graphs, and a printed ``quantizer.py`` too: it has the source of those functions that it needs.

So this file needs torch alone, and of pt2qa only what is printed with it: see :func:`pt2qa.plugins.code.runtime`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from pt2qa._graph.internals.nodes import clean_path, module_stack


def ops_by_name(graph: Graph) -> dict[str, Node]:
    """The ops of a graph by module path, op and ordinal, such as layer1.0.conv1/conv2d; inputs and output by name."""
    output, names, used = graph.output_node(), dict[Node, str](), dict[str, int]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        path = clean_path([("", None), *module_stack(node).values()][-1][0])
        stem = f"{path}/{op_of(node.target)}" if path else op_of(node.target)
        if node.target is operator.getitem and node.args[0] in names:
            stem = f"{names[node.args[0]]}[{node.args[1]}]"
        used[stem] = ordinal = used.get(stem, -1) + 1
        names[node] = f"{stem}_{ordinal}" if ordinal else stem
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    return {**inputs, output.name: output, **{name: node for node, name in names.items()}}


def op_of(target: Callable[..., Any] | str) -> str:
    """What a node's target does, without namespace, overload and in-place underscore.

    >>> import torch
    >>> op_of(torch.ops.aten.relu_.default), op_of(torch.ops.aten.conv2d.default), op_of(operator.getitem)
    ('relu', 'conv2d', 'getitem')
    """
    if isinstance(target, HigherOrderOperator):
        return str(target.name()).removesuffix("_impl")
    target = target.overloadpacket if isinstance(target, OpOverload) else target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.strip("_") if name.startswith("__") else name.removesuffix("_")
