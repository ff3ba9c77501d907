"""What a property is, and what it comes to on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pt2qa._conformance.rows import Verdict
from pt2qa._conformance.trial import Annotated, Failure, Trial


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a property comes to on a model.

    Attributes:
        verdict: ``passed``, ``failed``, ``does not apply`` or ``skipped`` (nothing is annotated, or an earlier step
            failed, which is said there).
        why: the numbers, or the reason.
    """

    verdict: Verdict
    why: str


def passed(why: str) -> Outcome:
    """The property holds."""
    return Outcome("passed", why)


def failed(why: str) -> Outcome:
    """The property does not hold."""
    return Outcome("failed", why)


def does_not_apply(why: str) -> Outcome:
    """There is nothing that the property could be about."""
    return Outcome("does not apply", why)


def skipped(why: str) -> Outcome:
    """It was not looked at."""
    return Outcome("skipped", why)


@dataclass(frozen=True)
class Property:
    """Something that holds for a quantizer that behaves.

    Args:
        name: short, as it stands in test ids: ``spelling``.
        claim: what holds, in one sentence.
        check: from a quantizer on a model to the outcome; what it needs is made once for all properties.
    """

    name: str
    claim: str
    check: Callable[[Trial], Outcome]


def annotated_or_skip(trial: Trial) -> Annotated | Outcome:
    """The annotated capture, or the outcome of a property that needs one."""
    annotated = trial.annotated
    if isinstance(annotated, Failure):
        return skipped("annotate fails: see prepare")
    if not annotated.annotations.edges:
        return skipped("nothing is annotated")
    return annotated
