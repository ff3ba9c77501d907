"""Removes additions of zero.

Python's ``sum([a, b])`` starts from 0, so the graph contains ``add(a, 0)``.  The x86 quantizer fails on it with a bare
``AssertionError``, and XNNPACK's would round its result again.
"""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases
from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import changes_of
from pt2qa._graph.internals import flow_passes


def remove_added_zeros(program: ExportedProgram) -> tuple[Change, ...]:
    """Makes the users of ``add(x, 0)`` read ``x``, if shape and dtype are the same, in place.

    All numbers stay equal, except that a ``-0.0``, which the addition would turn into ``0.0``, keeps its sign.  If the
    result or the operand is written to in place later, the addition makes a copy that is needed, so it stays.
    """

    def edit(graph_module: GraphModule) -> list[tuple[Node, str]]:
        removed = flow_passes.remove_added_zeros(graph_module, _written)
        return [(node, "removed: what reads it now reads its operand") for node in removed]

    return changes_of(program, "add of zero", edit)


def _written(graph_module: GraphModule, node: Node) -> bool:
    aliases = Aliases(graph_module)
    return any(aliases.written_after(node, value) for value in (node, *node.all_input_nodes))
