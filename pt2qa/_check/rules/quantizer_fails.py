"""A quantizer that is refused, or stumbles over the model."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._check.rules import decomposed_first
from pt2qa._check.rules.foreign_quantizer import is_foreign
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """What resolving the quantizer, or annotating with it, failed with."""
    if context.quantizer is None and context.given != "pair":
        raise DoesNotApplyError("without a quantizer: give quantizer=")
    if is_foreign(context.quantizer):
        raise DoesNotApplyError("to quantizers of another package")
    try:
        context.annotations  # noqa: B018  annotating is what may fail
    except UnavailableError:
        if context.given in ("program", "graph") and (context.fixing_passes or any(decomposed_first.find(context))):
            raise DoesNotApplyError("where another rule names what the quantizer stumbles over") from None
        for what in ("quantizer", "annotations"):
            if what in context.failures:
                yield Found("", context.failures[what])
                return
        raise


RULE = Rule(
    id="quantizer-fails",
    severity="error",
    title="the quantizer cannot annotate the model",
    why="prepare_pt2e would stop here. Quantizers stumble over modules that are called more than once, dead code, sums "
    "that begin with 0, and settings that name what the model does not have.",
    fix="where the message names a setting, correct the setting; else take the graph that pt2qa.capture makes, which "
    "writes such models so that quantizers can read them",
    find=find,
)
