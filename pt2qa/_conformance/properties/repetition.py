"""An annotation depends on the model alone: not on the order of annotators, nor on earlier models."""

from __future__ import annotations

import copy
from typing import Any

from pt2qa._conformance.layout import differences, some
from pt2qa._conformance.properties.property import Outcome, Property, does_not_apply, failed, passed, skipped
from pt2qa._conformance.quantizer_under_test import ChangedPlugin
from pt2qa._conformance.trial import Annotated, Failure, Trial
from pt2qa.plugins import QuantizerPlugin

LISTS = ("quantizers", "annotators", "SUPPORTED_PATTERNS")
"""Attributes that hold the annotators a quantizer runs in sequence."""


def _order(trial: Trial) -> Outcome:
    before = trial.annotated
    if isinstance(before, Failure):
        return skipped("annotate fails: see prepare")
    plugin = trial.quantizer.plugin()
    attribute = _list_of(plugin.build(trial.capture.module(), qat=trial.quantizer.qat))
    if not attribute:
        return does_not_apply(f"the quantizer has no list of annotators: none of {', '.join(LISTS)}")

    def reverse(quantizer: Any) -> Any:
        reversed_one = copy.copy(quantizer)
        setattr(reversed_one, attribute, list(reversed(getattr(quantizer, attribute))))
        return reversed_one

    after = trial.annotate(plugin=ChangedPlugin(plugin, reverse))
    if isinstance(after, Failure):
        return failed(f"with {attribute} reversed, annotate fails: {after.why}")
    if found := differences(before.layout, after.layout):
        return failed(f"with {attribute} reversed, {some(found)}")
    return passed(f"the same with {attribute} reversed") if before.layout else skipped("nothing is annotated")


def _list_of(quantizer: Any) -> str:
    lists = {attribute: getattr(quantizer, attribute, None) for attribute in LISTS}
    return next((attribute for attribute, found in lists.items() if isinstance(found, list) and len(found) > 1), "")


def _reuse(trial: Trial) -> Outcome:
    expected = trial.annotated
    if isinstance(expected, Failure):
        return skipped("annotate fails: see prepare")
    plugin = trial.quantizer.plugin()
    quantizer = plugin.build(trial.capture.module(), qat=trial.quantizer.qat)
    one = ChangedPlugin(plugin, lambda _: quantizer)
    other = next((each for each in trial.others if isinstance(each.annotated, Annotated)), None)
    between = f"after {other.model.name}" if other is not None else "the second time"
    if fault := _change(trial, expected, one, "used once more"):
        return failed(fault)
    if other is not None and isinstance(found := other.annotate(plugin=one), Failure):
        return failed(f"one object, annotate fails on {other.model.name} after {trial.model.name}: {found.why}")
    if fault := _change(trial, expected, one, between):
        return failed(fault)
    return passed(f"one object gives the same {between}") if expected.layout else skipped("nothing is annotated")


def _change(trial: Trial, expected: Annotated, plugin: QuantizerPlugin, when: str) -> str:
    found = trial.annotate(plugin=plugin)
    if isinstance(found, Failure):
        return f"one object, {when}: annotate fails: {found.why}"
    changed = differences(expected.layout, found.layout)
    return f"one object, {when}: {some(changed)}" if changed else ""


ORDER = Property("order", "the order of a quantizer's annotators does not matter", _order)
REUSE = Property("reuse", "one object annotates a model alike, whatever it annotated before", _reuse)
