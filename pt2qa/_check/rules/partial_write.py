"""Writes to a part of a tensor."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._capture.aliases import Aliases
from pt2qa._check.subject import Subject, UnavailableError
from pt2qa.plugins import Found, Rule


def find(subject: Subject) -> Iterator[Found]:
    """Writes that are lost where the tensor is rounded: those of a plain program, those that capture had to leave."""
    writes = [change for change in subject.changes if change.rule == "partial write"]
    aliases = Aliases(subject.graph) if writes else None
    rounded = _rounded(subject)
    for change in writes:
        if change.what.startswith("left as it is"):
            reason = change.what.partition(": ")[2]
            yield Found(change.name, f"capture could not write it another way: {reason}", "warning", _FIX)
        if subject.given not in ("program", "graph"):
            continue
        node = subject.nodes.get(change.name)
        group = aliases.group(node) if aliases is not None and node is not None else []
        if rounded is None:
            yield Found(change.name, "the tensor that it writes to is read later on", "warning")
        elif lost := [name for member in group if (name := subject.name_of(member)) in rounded]:
            why = f"the tensor that it writes to is read later on, and {subject.plugin.name} rounds it at {lost[0]}"
            yield Found(change.name, why)


def _rounded(subject: Subject) -> set[str] | None:
    """Names of the ops whose values the quantizer rounds; None where that is not known."""
    try:
        return {edge.source for edge in subject.annotations.edges}
    except UnavailableError:
        return None


_FIX = "compute the new tensor and use that: torch.cat, torch.where or slice_scatter in the place of the assignment"

RULE = Rule(
    id="partial-write",
    severity="error",
    title="writes to a part of a tensor that is read later on",
    why="After y[:, :2].mul_(0.1) the graph goes on to read y from before the write. In one memory that is right; once "
    "y is rounded, the slice is another tensor, the write is lost, and the quantized model computes something else.",
    fix=f"make the graph with pt2qa.capture, which makes such writes functional; or {_FIX}",
    needs=(),
    find=find,
)
