"""Removes additions of zero.

Python's ``sum([a, b])`` starts from 0, so the graph contains ``add(a, 0)``.  The x86 quantizer fails on it with a bare
``AssertionError``, and XNNPACK's would round its result again.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases
from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import alike, graph_modules, names_by_node, read_instead
from pt2qa._graph.internals.nodes import VALUE

_RULE: Final = "add of zero"
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


def remove_added_zeros(program: ExportedProgram) -> tuple[Change, ...]:
    """Makes the users of ``add(x, 0)`` read ``x``, if shape and dtype are the same, in place.

    All numbers stay equal, except that a ``-0.0``, which the addition would turn into ``0.0``, keeps its sign.  If the
    result or the operand is written to in place later, the addition makes a copy that is needed, so it stays.
    """
    changes = []
    for graph_module in graph_modules(program):
        found = [node for node in graph_module.graph.nodes if _adds_zero(node)]
        for node in found:
            if _is_needed_copy(node, graph_module):
                continue
            changes.append(Change(_RULE, names_by_node(program)[node], "removed: what reads it now reads its operand"))
            read_instead(program, node, node.args[0])
            graph_module.graph.erase_node(node)
        if found:
            graph_module.recompile()
    return tuple(changes)


def _adds_zero(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _ADDS or len(node.args) != 2:
        return False
    operand, zero = node.args
    if not isinstance(operand, Node) or isinstance(zero, (Node, complex)) or zero != 0:
        return False
    before, after = operand.meta.get(VALUE), node.meta.get(VALUE)
    return isinstance(before, Tensor) and isinstance(after, Tensor) and alike(before, after)


def _is_needed_copy(node: Node, graph_module: GraphModule) -> bool:
    operand = node.args[0]
    assert isinstance(operand, Node)
    # A model that returned its own input would return the caller's tensor.
    if operand.op != "call_function" and any(user.op == "output" for user in node.users):
        return True
    aliases = Aliases(graph_module)
    return aliases.written_after(node, node) or aliases.written_after(node, operand)
