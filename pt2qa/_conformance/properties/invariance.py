"""One model has one annotation, however its graph was made."""

from __future__ import annotations

from collections.abc import Callable

from pt2qa._conformance.layout import Layout, differences, some
from pt2qa._conformance.model import MODULE
from pt2qa._conformance.programs import Plain
from pt2qa._conformance.properties.property import Outcome, Property, does_not_apply, failed, passed, skipped
from pt2qa._conformance.trial import Annotated, Failure, Trial


def _spelling(trial: Trial) -> Outcome:
    model = trial.model
    if not model.spellings:
        return does_not_apply("the model has one spelling")
    base = _base(trial)
    if isinstance(base, Outcome):
        return base
    strict, layout = base
    faults, annotated = [], len(layout)
    for spelling in model.spellings:
        after = trial.annotate(trial.programs.exported(strict=strict, spelling=spelling))
        annotated += len(after.layout) if isinstance(after, Annotated) else 0
        if found := _difference(layout, after):
            faults.append(f"{spelling}: {found}")
    if faults:
        return failed(f"against the spelling with modules, {'. '.join(faults)}")
    if not annotated:
        return skipped("nothing is annotated in any spelling")
    return passed(f"the same in {len(model.spellings) + 1} spellings: {MODULE}, {', '.join(model.spellings)}")


def _strict(trial: Trial) -> Outcome:
    if trial.model.decompose:
        return _taken_apart()
    before, after = trial.exported(strict=False), trial.exported(strict=True)
    if isinstance(before, Failure) and isinstance(after, Failure):
        if isinstance(trial.annotated, Failure):
            return skipped("annotate fails: see prepare")
        return failed(f"annotate fails on what torch.export gives, in both modes: {before.why}")
    if isinstance(before, Failure):
        return failed(f"annotate fails with strict=False, and not with strict=True: {before.why}")
    if found := _difference(before.layout, after):
        return failed(f"with strict=True, {found}")
    return passed(f"{len(before.layout)} places are the same") if before.layout else skipped("nothing is annotated")


def _re_export(trial: Trial) -> Outcome:
    return _same(trial, lambda strict: trial.programs.re_exported(strict=strict), "after another export")


def _saved(trial: Trial) -> Outcome:
    return _same(trial, lambda strict: trial.programs.saved(strict=strict), "after save and load")


def _base(trial: Trial) -> tuple[bool, Layout] | Outcome:
    """The annotation of the model's module spelling, and whether its export had to be ``strict=True``."""
    if trial.model.decompose:
        return _taken_apart()
    found = {strict: trial.exported(strict=strict) for strict in (False, True)}
    working = {strict: each.layout for strict, each in found.items() if isinstance(each, Annotated)}
    if not working:
        return skipped("annotate fails on what torch.export gives: see strict")
    strict = max(working, key=lambda mode: (bool(working[mode]), not mode))
    return strict, working[strict]


def _same(trial: Trial, remade: Callable[[bool], Plain], when: str) -> Outcome:
    base = _base(trial)
    if isinstance(base, Outcome):
        return base
    strict, layout = base
    if found := _difference(layout, trial.annotate(remade(strict))):
        return failed(f"{when}, {found}")
    return passed(f"{len(layout)} places are the same") if layout else skipped("nothing is annotated")


def _difference(before: Layout, after: Annotated | Failure) -> str:
    """How another graph's annotation differs, as the end of a sentence; empty if it does not."""
    if isinstance(after, Failure):
        return f"annotate fails: {after.why}"
    if bool(before) != bool(after.layout):
        return f"{_places(after.layout)} annotated; before, {_places(before)}"
    return some(differences(before, after.layout))


def _places(layout: Layout) -> str:
    return f"{len(layout)} places are" if layout else "nothing is"


def _taken_apart() -> Outcome:
    return does_not_apply("a model that is taken apart at capture has no other form")


SPELLING = Property("spelling", "modules, functions, in-place ops and methods are annotated alike", _spelling)
STRICT = Property("strict", "torch.export's two modes give one annotation", _strict)
RE_EXPORT = Property("re_export", "an exported graph that is exported again is annotated alike", _re_export)
SAVED = Property("saved", "a program that was saved and loaded is annotated alike", _saved)
