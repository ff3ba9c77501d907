"""Infinities, NaN and mask values where a range is measured or a value is rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.integer_products import limits
from pt2qa._check.masks import Mask, masks_in
from pt2qa._check.observers import Observed, observed
from pt2qa._check.site_rows import given_rows, is_nonfinite
from pt2qa._graph.handles import handle_of
from pt2qa._simulator.program import QuantParams
from pt2qa.plugins import DoesNotApplyError, Found, Rule

LARGEST_ACTIVATION = 1e9
"""No activation of a network is so large, and every mask that is given as an input is."""


def find(context: CheckContext) -> Iterator[Found]:
    """Observers, or sites of a pair, that such a value reaches: from constants, from ops, or with the data."""
    if context.given == "prepared":
        return _in_prepared(context)
    if context.given == "pair":
        return _in_pair(context)
    raise DoesNotApplyError("before calibration: give a graph with observers, or a pair")


def _in_prepared(context: CheckContext) -> Iterator[Found]:
    masks = masks_in(context.prepared)
    for observer in observed(context.prepared):
        mask = masks.get(observer.source)
        why = _observed(context, observer, mask) if observer.saw else ""
        if why:
            yield Found(context.name_of(observer.source), why, value=math.inf if mask is None else mask.severity)


def _observed(context: CheckContext, observer: Observed, mask: Mask | None) -> str:
    low, high = float(observer.low.min()), float(observer.high.max())
    reach = max(abs(low), abs(high))
    if mask is not None and not math.isfinite(mask.value):
        return _nonfinite(context, mask)
    if not math.isfinite(reach):
        return f"its observer saw values from {low:.3g} to {high:.3g}"
    if reach >= LARGEST_ACTIVATION or (mask is not None and reach >= abs(mask.value) / 2):
        return _immense((high - low) / (observer.integers - 1), _from(context, mask))
    return ""


def _in_pair(context: CheckContext) -> Iterator[Found]:
    masks = {handle_of(node): mask for node, mask in masks_in(context.pair.reference).items() if node.op != "get_attr"}
    rows = {row.name: row for row in given_rows(context)}
    constants = {constant.slot: constant for constant in context.pair.program.constants}
    for site in context.pair.sites:
        if site.kind != "activation" or not isinstance(site.params.scale, float):
            continue
        constant, row = constants.get(site.source), rows.get(site.name)
        if constant is not None:
            nonfinite = not bool(constant.reference.isfinite().all())
            yield from _at_site(context, constant.attribute or site.name, site.params, None, nonfinite)
        else:
            nonfinite = row is not None and is_nonfinite(row)
            yield from _at_site(context, site.name, site.params, masks.get(site.handle), nonfinite)


def _at_site(
    context: CheckContext, name: str, params: QuantParams, mask: Mask | None, nonfinite: bool
) -> Iterator[Found]:
    low, high = limits(params)
    reach, scale = max(abs(low), abs(high)), params.largest_scale
    if mask is not None and not math.isfinite(mask.value):
        becomes = "" if math.isnan(mask.value) else f": it becomes {low if mask.value < 0 else high:.3g}"
        yield Found(name, _nonfinite(context, mask) + becomes, value=math.inf)
    elif nonfinite:
        why = "infinite or NaN values reach it, which no integer can hold"
        yield Found(name, why, fix="look for NaN and infinity in the weights and in the data", value=math.inf)
    elif reach >= LARGEST_ACTIVATION or (mask is not None and reach >= abs(mask.value) / 2):
        yield Found(name, _immense(scale, _from(context, mask)), value=reach)
    elif mask is not None:
        why = f"{mask.value:.3g} from {context.name_of(mask.origin)} is clamped to {low:.3g}"
        yield Found(name, why, "warning", value=0.0)


def _nonfinite(context: CheckContext, mask: Mask) -> str:
    return f"{mask.value} from {context.name_of(mask.origin)} reaches it, which no integer can hold"


def _immense(scale: float, cause: str) -> str:
    return f"one step is {scale:.3g}{cause}: every other value becomes 0"


def _from(context: CheckContext, mask: Mask | None) -> str:
    return "" if mask is None else f", for {mask.value:.3g} from {context.name_of(mask.origin)}"


RULE = Rule(
    id="nonfinite-observed",
    severity="error",
    title="infinity, NaN or a mask value where values are rounded",
    why="A mask of -3.4e38 takes the whole range, so that the values beside it round to nothing; an infinite one is "
    "dropped by the observer and clamped to the smallest value it saw, so that what was masked takes part again.",
    fix="keep the op that adds the mask in float: "
    'pt2qa.quantize(..., overrides=pt2qa.OverridePlan((pt2qa.Edit("float", (name,)),))); '
    "or mask with a number a little below the smallest score, -30 say, instead",
    find=find,
)
