"""Buffers that forward writes to."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._capture.aliases import Aliases
from pt2qa._check.context import CheckContext
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Buffers to which an op of the graph writes."""
    graph = context.graph
    buffers = graph.graph.find_nodes(op="get_attr")
    for node in Aliases(graph).written(buffers):
        name = str(node.target)
        if not name.endswith("num_batches_tracked"):  # of a batch norm in training mode, which train-mode reports
            yield Found(name, "forward writes to it")


RULE = Rule(
    id="written-buffer",
    severity="note",
    title="buffers that forward writes to",
    why="What a run leaves there, the next run finds. pt2qa compares every batch from the captured state; an app that "
    "runs the quantized model does not begin there, and what it writes was rounded before.",
    fix="nothing for counters; state that outputs depend on belongs into the inputs and outputs of forward",
    needs=("graph",),
    find=find,
)
