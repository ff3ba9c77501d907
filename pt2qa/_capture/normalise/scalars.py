"""Keeps scalars in integer (and in double, half, complex) arithmetic exact.

XNNPACK's quantizer turns the scalar of ``add.Tensor(x, 1)`` and ``mul.Tensor(x, 2)`` into a float32 tensor, whatever
the dtype of ``x``: an index becomes a float (``IndexError``), 16777217 + 1 becomes 16777216, a double loses digits.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node
from pt2qa._graph.internals.nodes import VALUE

_RULE: Final = "scalar"
_WITH_SCALAR = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add.Scalar,
    torch.ops.aten.mul.Tensor: torch.ops.aten.mul.Scalar,
}


def keep_scalars(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives ``add`` and ``mul`` of a Python scalar their ``Scalar`` overload if the result is not float32, in place.

    Both overloads wrap the scalar the same way and promote dtypes alike, so the numbers are the same.
    """
    found = []
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            if _takes_scalar(node):
                node.target = _WITH_SCALAR[node.target]
                found.append(node)
        graph_module.recompile()
    if not found:
        return ()
    names = names_by_node(program)
    return tuple(
        Change(_RULE, names[node], f"{node.target}: its scalar {node.args[1]} stays a scalar, exact in {_dtype(node)}")
        for node in found
    )


def _takes_scalar(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _WITH_SCALAR:
        return False
    takes_scalar = isinstance(node.args[0], Node) and not isinstance(node.args[1], Node)
    value = node.meta.get(VALUE)
    return takes_scalar and isinstance(value, Tensor) and value.dtype != torch.float32


def _dtype(node: Node) -> str:
    return str(node.meta[VALUE].dtype).removeprefix("torch.")
