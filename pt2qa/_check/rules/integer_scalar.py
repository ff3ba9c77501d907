"""Scalars of integer arithmetic that a quantizer turns into float tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Additions and products of integers (or doubles) whose scalar the quantizer replaces."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    plugin = context.plugin
    scalars = {change.name for change in context.changes if change.rule == "scalar"}
    if not scalars:
        return
    graph = copy.deepcopy(context.graph)
    try:
        transformed = plugin.build(graph, qat=context.qat).transform_for_annotation(graph)
    except Exception as error:
        raise DoesNotApplyError("where the quantizer fails; see quantizer-fails") from error
    after = {handle_of(node): node for node in transformed.graph.nodes}
    for name in scalars & context.nodes.keys():
        before = context.nodes[name]
        new = after.get(handle_of(before))
        if new is not None and not isinstance(before.args[1], Node) and isinstance(new.args[1], Node):
            dtype = str(before.meta[VALUE].dtype).removeprefix("torch.")
            yield Found(
                name, f"{plugin.name} makes its scalar {before.args[1]} a float32 tensor, in arithmetic of {dtype}"
            )


RULE = Rule(
    id="integer-scalar",
    severity="error",
    title="integer arithmetic that the quantizer turns into float",
    why="Some quantizers replace the scalar of every add and mul by a float32 tensor: an index becomes a float "
    "(IndexError), and 16777217 + 1 becomes 16777216.",
    fix="make the graph with pt2qa.capture, which keeps such scalars",
    find=find,
)
