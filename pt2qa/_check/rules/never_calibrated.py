"""Observers that never saw a value, and the scales that they leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.observers import observed
from pt2qa._check.site_rows import given_rows
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Observers of a prepared graph without a value; in a pair made elsewhere, scales as such observers give them."""
    if context.given == "prepared":
        return _in_prepared(context)
    if context.given == "pair":
        return _in_pair(context)
    raise DoesNotApplyError("before prepare: give a graph with observers, or a pair")


def _in_prepared(context: CheckContext) -> Iterator[Found]:
    observers = observed(context.prepared)
    if not observers:
        raise DoesNotApplyError("to graphs whose observers keep no range")
    missed = [observer for observer in observers if not observer.saw]
    if len(missed) == len(observers):
        yield Found("", f"none of the {len(observers)} observers saw a value: no batch was run through this graph")
        return
    for observer in missed:
        yield Found(context.name_of(observer.source), "its observer saw no value, and gets the scale 1.0")


def _in_pair(context: CheckContext) -> Iterator[Found]:
    if context.pair.recipe is not None:
        return  # pt2qa.quantize raises where an observer saw nothing
    static = [site for site in context.pair.sites if site.kind == "activation" and isinstance(site.params.scale, float)]
    if not static:
        raise DoesNotApplyError("to models whose scales are chosen from each batch")
    # What torchao's observers give where they never saw a value.
    suspects = [site for site in static if (site.params.scale, site.params.zero_point) == (1.0, 0)]
    if suspects and len(suspects) == len(static):
        yield Found(
            "", f"all {len(static)} activations have the scale 1.0 and the zero point 0: nothing was calibrated"
        )
        return
    used = {row.name for row in given_rows(context) if row.range_use > 0.5}
    for site in suspects:
        if site.name not in used:
            why = "its scale is 1.0 and its zero point 0, as of an observer that saw no value"
            unless = "; right for whole numbers alone" if site.op == "input" else ""
            yield Found(site.name, why + unless, "warning")


RULE = Rule(
    id="never-calibrated",
    severity="error",
    title="observers that never saw a value",
    why="Such an observer gives the scale 1.0 and the zero point 0 with no more than a warning: values below 0.5 "
    "become 0, and values beyond the integers are clamped.",
    fix="run batches through the prepared graph that reach these ops, all branches included, before convert_pt2e; "
    "pt2qa.quantize does it and raises where one is missed",
    find=find,
)
