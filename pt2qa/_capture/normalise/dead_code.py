"""Removes ops whose results nothing reads.

The x86 quantizer reads the first output of a matched convolution or linear.  An unused pooler has none, so it raises
``IndexError``.
"""

from __future__ import annotations

import operator

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, in_place_argument
from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import changes_of
from pt2qa._graph.internals import flow_passes


def remove_dead_code(program: ExportedProgram) -> tuple[Change, ...]:
    """Removes ops without effect, in place.

    An op that writes to its argument has an effect, unless that memory was allocated in the graph and is not read later
    (the ``ReLU(inplace=True)`` after an unused linear).  Inputs, parameters and buffers stay, used or not.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        removed = flow_passes.remove_dead_code(graph_module, _unread_write)
        return [(node, "removed: nothing reads it") for node in removed if node.target is not operator.getitem]

    return changes_of(program, "dead code", edit)


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
