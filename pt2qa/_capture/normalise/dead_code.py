"""Removes ops whose results nothing reads.

The x86 quantizer reads the first output of a matched convolution or linear.  An unused pooler has none, so it raises
``IndexError``.
"""

from __future__ import annotations

import operator
from typing import Final

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, in_place_argument
from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node

_RULE: Final = "dead code"


def remove_dead_code(program: ExportedProgram) -> tuple[Change, ...]:
    """Removes ops without effect, in place.

    An op that writes to its argument has an effect, unless that memory was allocated in the graph and is not read later
    (the ``ReLU(inplace=True)`` after an unused linear).  Inputs, parameters and buffers stay, used or not.
    """
    names = names_by_node(program)
    for graph_module in graph_modules(program):
        graph_module.graph.eliminate_dead_code()
        while dead := _unread_write(graph_module):
            graph_module.graph.erase_node(dead)
            graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    left = {node for graph_module in graph_modules(program) for node in graph_module.graph.nodes}
    return tuple(
        Change(_RULE, name, "removed: nothing reads it")
        for node, name in names.items()
        if node not in left and node.target is not operator.getitem
    )


def _unread_write(graph_module: GraphModule) -> Node | None:
    """An in-place op whose result nothing reads, under any name."""
    candidates: list[Node] = [
        node for node in graph_module.graph.nodes if not node.users and in_place_argument(node) is not None
    ]
    if not candidates:
        return None
    aliases = Aliases(graph_module)
    for node in candidates:
        made_here = all(member.op == "call_function" for member in aliases.group(node))
        if made_here and not aliases.read_after(node, node):
            return node
    return None
