"""One model has one annotation: however its graph was made, and whatever the quantizer did before."""

from __future__ import annotations

import copy

from pt2qa._check.context import require
from pt2qa._conformance.nets import MODULE
from pt2qa._conformance.properties.property import NOTHING, Outcome, SkippedError, annotated_in, failed, holds, passed
from pt2qa._conformance.trial import Annotated, Failure, Layout, Trial, differences, exported, loaded, re_exported, some
from pt2qa.plugins import resolve

LISTS = ("quantizers", "annotators", "SUPPORTED_PATTERNS")
"""Attributes that hold the annotators a quantizer runs in sequence."""


@holds("modules, functions, in-place ops and methods are annotated alike")
def spelling(trial: Trial) -> Outcome:
    model = trial.model
    require(model.spellings, "the model has one spelling")
    mode, layout = _exported(trial)
    faults, annotated = [], len(layout)
    for name in model.spellings:
        after = trial.annotate(exported(model, mode, name))
        annotated += len(after.layout) if isinstance(after, Annotated) else 0
        if found := _difference(layout, after):
            faults.append(f"{name}: {found}")
    if faults:
        return failed(f"against the spelling with modules, {'. '.join(faults)}")
    if not annotated:
        raise SkippedError("nothing is annotated in any spelling")
    return passed(f"the same in {len(model.spellings) + 1} spellings: {MODULE}, {', '.join(model.spellings)}")


@holds("torch.export's two modes give one annotation")
def strict(trial: Trial) -> Outcome:
    require(not trial.model.decompose, _DECOMPOSED)
    before, after = trial.exported(strict=False), trial.exported(strict=True)
    if isinstance(before, Annotated):
        return _same(before.layout, after, "with strict=True, ")
    if isinstance(after, Annotated):
        return failed(f"annotate fails with strict=False, and not with strict=True: {before.why}")
    annotated_in(trial, even_nothing=True)
    return failed(f"annotate fails on what torch.export gives, in both modes: {before.why}")


@holds("an exported graph that is exported again is annotated alike")
def re_export(trial: Trial) -> Outcome:
    mode, layout = _exported(trial)
    return _same(layout, trial.annotate(re_exported(trial.model, mode)), "after another export, ")


@holds("a program that was saved and loaded is annotated alike")
def saved(trial: Trial) -> Outcome:
    mode, layout = _exported(trial)
    return _same(layout, trial.annotate(loaded(trial.model, mode)), "after save and load, ")


@holds("the order of a quantizer's annotators does not matter")
def order(trial: Trial) -> Outcome:
    before = annotated_in(trial, even_nothing=True)
    quantizer = trial.quantizer.build(trial.capture.module())
    lists = {attribute: getattr(quantizer, attribute, None) for attribute in LISTS}
    attribute = next((name for name, found in lists.items() if isinstance(found, list) and len(found) > 1), "")
    require(attribute, f"the quantizer has no list of annotators: none of {', '.join(LISTS)}")
    backwards = copy.copy(quantizer)
    setattr(backwards, attribute, list(reversed(getattr(quantizer, attribute))))
    return _same(before.layout, trial.annotate(plugin=resolve(backwards)), f"with {attribute} reversed, ")


@holds("one object annotates a model alike, whatever it annotated before")
def reuse(trial: Trial) -> Outcome:
    expected = annotated_in(trial, even_nothing=True).layout
    one = resolve(trial.quantizer.build(trial.capture.module()))
    other = next((each for each in trial.others if isinstance(each.annotated, Annotated)), None)
    if fault := _difference(expected, trial.annotate(plugin=one)):
        return failed(f"the first time that one object is used, {fault}")
    if other is not None and isinstance(found := other.annotate(plugin=one), Failure):
        return failed(f"one object, annotate fails on {other.model.name} after {trial.model.name}: {found.why}")
    between = f"after {other.model.name}" if other is not None else "the second time"
    return _same(expected, trial.annotate(plugin=one), f"one object, {between}: ")


def _exported(trial: Trial) -> tuple[bool, Layout]:
    """Whether the model's export had to be ``strict=True``, and the annotation of what it returned."""
    require(not trial.model.decompose, _DECOMPOSED)
    found = {mode: trial.exported(strict=mode) for mode in (False, True)}
    working = {mode: each.layout for mode, each in found.items() if isinstance(each, Annotated)}
    if not working:
        raise SkippedError("annotate fails on what torch.export gives: see strict")
    mode = max(working, key=lambda mode: (bool(working[mode]), not mode))
    return mode, working[mode]


def _same(before: Layout, after: Annotated | Failure, when: str) -> Outcome:
    if found := _difference(before, after):
        return failed(f"{when}{found}")
    if not before:
        raise SkippedError(NOTHING)
    return passed(f"{len(before)} places are the same")


def _difference(before: Layout, after: Annotated | Failure) -> str:
    """How another graph's annotation differs, as the end of a sentence; empty if it does not."""
    if isinstance(after, Failure):
        return f"annotate fails: {after.why}"
    if bool(before) != bool(after.layout):
        return f"{_places(after.layout)} annotated; before, {_places(before)}"
    return some(differences(before, after.layout))


def _places(layout: Layout) -> str:
    return f"{len(layout)} places are" if layout else "nothing is"


_DECOMPOSED = "a model that is decomposed at capture has no other form"
