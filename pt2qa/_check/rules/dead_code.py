"""Ops whose results nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._capture.normalise.dead_code import remove_dead_code
from pt2qa._check.context import CheckContext
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """What capture removed; of a plain program, what it would remove, an error where the quantizer fails on it."""
    dead = [change.name for change in context.changes if change.rule == "dead code"]
    if context.given not in ("program", "graph"):
        yield from (Found(name, "capture removed it") for name in dead)
        return
    if dead and remove_dead_code in context.fixing_passes:
        error = context.failures["annotations"]
        yield from (Found(name, f"nothing reads it, and the quantizer fails: {error}", "error", _FIX) for name in dead)
        return
    yield from (Found(name, "nothing reads it", "warning", _FIX) for name in dead)


_FIX = "take it out of forward, or make the graph with pt2qa.capture, which removes it"

RULE = Rule(
    id="dead-code",
    severity="note",
    title="ops whose results nothing reads",
    why="Some quantizers fail on an unused convolution with a bare IndexError, and others put observers behind "
    "what nobody reads. pt2qa.capture removes such ops.",
    fix="nothing where that is meant; else use the result in forward",
    find=find,
)
