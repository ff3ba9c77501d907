"""Writes to a part of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._capture.aliases import Aliases
from pt2qa._check.context import CheckContext
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Writes that are lost where the tensor is rounded: those of a plain program, those that capture had to leave."""
    writes = [change for change in context.changes if change.rule == "partial write"]
    aliases = Aliases(context.graph) if writes else None
    annotations = context.known_annotations
    rounded = None if annotations is None else {edge.source for edge in annotations.edges}
    for change in writes:
        if change.what.startswith("left as it is"):
            reason = change.what.partition(": ")[2]
            yield Found(change.name, f"capture could not write it another way: {reason}", "warning", _FIX)
        if context.given not in ("program", "graph"):
            continue
        node = context.nodes.get(change.name)
        group = aliases.group(node) if aliases is not None and node is not None else []
        if rounded is None:
            yield Found(change.name, "the tensor that it writes to is read later on", "warning")
        elif lost := [name for member in group if (name := context.name_of(member)) in rounded]:
            why = f"the tensor that it writes to is read later on, and {context.plugin.name} rounds it at {lost[0]}"
            yield Found(change.name, why)


_FIX = "compute the new tensor and use that: torch.cat, torch.where or slice_scatter in the place of the assignment"

RULE = Rule(
    id="partial-write",
    severity="error",
    title="writes to a part of a tensor that is read later on",
    why="After y[:, :2].mul_(0.1) the graph goes on to read y from before the write. In one memory that is right; once "
    "y is rounded, the slice is another tensor, the write is lost, and the quantized model computes something else.",
    fix=f"make the graph with pt2qa.capture, which makes such writes functional; or {_FIX}",
    find=find,
)
