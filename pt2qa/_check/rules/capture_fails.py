"""A model that cannot be captured."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._check.rules import aliased_inputs, train_mode
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """What capture says, where no rule of its own says it already."""
    if context.given != "model":
        raise DoesNotApplyError("to what is captured already")
    if any(train_mode.find(context)):
        raise DoesNotApplyError("to models in training mode")
    if context.args is None and context.kwargs is None:
        raise DoesNotApplyError("for a model with example inputs: pt2qa.check(model, args)")
    if any(aliased_inputs.find(context)):
        raise DoesNotApplyError("to example inputs that share memory")
    try:
        context.capture  # noqa: B018  capturing is what may fail
    except UnavailableError:
        why, fix = _parted(context.failures["capture"])
        yield Found("", why, fix=fix)


def _parted(text: str) -> tuple[str, str]:
    """An error of capture as what is wrong, on one line, and what it says to do: its last line, or last sentence."""
    what, mark, advice = text.rpartition("\n")
    if mark:
        # torch's own text, of which the advice is capture's; a check has no whole message above it to point to.
        return " ".join(
            what.split()
        ), f"{advice.partition('. ')[0]}: pt2qa.check(pt2qa.capture(model, args, strict=...))"
    what, _, advice = text.rstrip(".").rpartition(". ")
    return what, advice


RULE = Rule(
    id="capture-fails",
    severity="error",
    title="the model cannot be captured",
    why="torch.export, or pt2qa's check of what it made, stops here; nothing else can be said about the model.",
    fix="pt2qa.capture(model, args) raises the error with torch's whole message",
    find=find,
)
