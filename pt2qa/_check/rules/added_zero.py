"""Additions of zero, which ``sum([...])`` makes."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._capture.normalise.zeros import remove_added_zeros
from pt2qa._check.context import CheckContext
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Additions that capture would remove; an error where the quantizer fails on them."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    added = [change.name for change in context.changes if change.rule == "add of zero"]
    if added and remove_added_zeros in context.fixing_passes:
        error = context.failures["annotations"]
        yield from (Found(name, f"adds 0, and the quantizer fails: {error}", "error") for name in added)
        return
    yield from (Found(name, "adds 0; a quantizer that takes every add rounds its result once more") for name in added)


RULE = Rule(
    id="added-zero",
    severity="warning",
    title="additions of zero",
    why="Python's sum([a, b]) begins with 0 + a. Quantizers take that for an addition of two tensors: one fails with "
    "a bare AssertionError, another rounds the result once more.",
    fix="write a + b in the place of sum([a, b]), or make the graph with pt2qa.capture, which removes the addition",
    find=find,
)
