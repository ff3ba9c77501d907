"""Ops that a quantizer misses in a program because of how ``torch.export`` wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from pt2qa._capture.normalise.dead_code import remove_dead_code
from pt2qa._capture.normalise.regions import inline_regions
from pt2qa._capture.normalise.scalars import keep_scalars
from pt2qa._capture.normalise.zeros import remove_added_zeros
from pt2qa._check.context import CheckContext
from pt2qa._check.missed_ops import Reasons
from pt2qa._check.rules import decomposed_first
from pt2qa._report.prose import counted
from pt2qa.plugins import DoesNotApplyError, Found, Rule

_REPORTED_ELSEWHERE = (inline_regions, remove_dead_code, remove_added_zeros, keep_scalars)
"""Passes of capture whose findings other rules show."""


def find(context: CheckContext) -> Iterator[Found]:
    """What makes the quantizer fail; or each op that it would annotate after ``pt2qa.capture``, with the reason."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    if any(decomposed_first.find(context)):
        raise DoesNotApplyError("to programs that were decomposed first")
    context.plugin  # noqa: B018  raises where there is none
    fixing = context.fixing_passes
    error = context.failures.get("annotations", "")
    for run, changes in fixing.items():
        if run in _REPORTED_ELSEWHERE:
            continue
        shared = [change for change in changes if change.rule == "shared module"]
        for change in shared or changes:
            what = f"{change.rule}: capture would have it {change.what}" if not shared else _called(change.what)
            yield Found(change.name, f"{what}, and the quantizer fails: {error}")
        if not changes:
            yield Found("", f"the quantizer fails on the sources that torch.export wrote: {error}")
    if error:
        if not fixing:
            raise DoesNotApplyError("where the quantizer fails on pt2qa.capture's spelling, too")
        return
    lost = [name for name in context.normalised.ops if name not in context.annotations.ops]
    if not lost:
        return
    here, there = len(context.annotations.ops), len(context.normalised.ops)
    why = f"{context.plugin.name} annotates {counted(here, 'op')} of this program, {there} after pt2qa.capture"
    yield Found("", why, value=inf)
    reasons = Reasons(context, frozenset(lost))
    for name in lost:
        node = context.nodes.get(name)
        if node is not None:  # else it stands in a nested graph, which has a rule of its own
            yield Found(name, reasons.of(name, node))


def _called(what: str) -> str:
    return what.replace("are matched one by one", "make one partition with several outputs")


RULE = Rule(
    id="plain-program",
    severity="error",
    title="ops that the quantizer misses because of how torch.export wrote the program",
    why="Quantizers find ops by the module that called them. torch.export writes a subclass of Conv2d, a function such "
    "as F.conv2d, or two calls of one module so that they find less than there is, or fail; what they do not find "
    "stays in float without a word.",
    fix="quantize the graph of pt2qa.capture(model, args), which computes the same and says of every op what it "
    "stands for",
    find=find,
)
