"""Arguments of aten ops by the names that their schemas give them."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from pt2qa._graph.internals.torch import OpOverload


def argument_of(node: Node, *names: str) -> Any:
    """The value of the first of the named arguments that the op has, its default where it is left out; None without.

    >>> import torch
    >>> x = torch.fx.Graph().placeholder("x")
    >>> argument_of(x.graph.call_function(torch.ops.aten.dropout.default, (x, 0.5, True)), "training", "train")
    True
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in names:
            if position < len(node.args) and not argument.kwarg_only:
                return node.args[position]
            return node.kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)
    return None
