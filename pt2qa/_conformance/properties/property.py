"""A property, and its outcome on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pt2qa._conformance.report import Verdict
from pt2qa._conformance.trial import Annotated, Failure, Trial
from pt2qa.plugins import DoesNotApplyError


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a property on a model.

    Attributes:
        verdict: ``passed``, ``failed``, ``does not apply`` or ``skipped`` (nothing is annotated, or an earlier step
            failed and reports why).
        why: the numbers, or the reason.
    """

    verdict: Verdict
    why: str


def passed(why: str) -> Outcome:
    """The property holds.

    Args:
        why: the numbers or the reason, for the report.

    >>> passed("42 of 42")
    Outcome(verdict='passed', why='42 of 42')
    """
    return Outcome("passed", why)


def failed(why: str) -> Outcome:
    """The property does not hold.

    Args:
        why: the numbers or the reason, for the report.

    >>> failed("42 of 42")
    Outcome(verdict='failed', why='42 of 42')
    """
    return Outcome("failed", why)


def does_not_apply(why: str) -> Outcome:
    """The model has nothing that the property covers.

    Args:
        why: the numbers or the reason, for the report.

    >>> does_not_apply("42 of 42")
    Outcome(verdict='does not apply', why='42 of 42')
    """
    return Outcome("does not apply", why)


def skipped(why: str) -> Outcome:
    """The property was not checked.

    Args:
        why: the numbers or the reason, for the report.

    >>> skipped("42 of 42")
    Outcome(verdict='skipped', why='42 of 42')
    """
    return Outcome("skipped", why)


@dataclass(frozen=True)
class Property:
    """Something that holds for a quantizer that behaves.

    Args:
        name: short, as used in test ids: ``spelling``.
        claim: what holds, in one sentence.
        check: from a quantizer on a model to the outcome; what it needs is computed once for all properties.
    """

    name: str
    claim: str
    check: Callable[[Trial], Outcome]


class SkippedError(Exception):
    """Raised by a property that could not be checked; its message says why."""


def holds(claim: str) -> Callable[[Callable[[Trial], Outcome]], Property]:
    """Makes a property of the function below, which may raise ``SkippedError`` or ``DoesNotApplyError``."""

    def made(check: Callable[[Trial], Outcome]) -> Property:
        def checked(trial: Trial) -> Outcome:
            try:
                return check(trial)
            except SkippedError as reason:
                return skipped(str(reason))
            except DoesNotApplyError as reason:
                return does_not_apply(str(reason))

        return Property(check.__name__, claim, checked)

    return made


def annotated_in(trial: Trial, *, even_nothing: bool = False) -> Annotated:
    """The annotated capture; a SkippedError if ``annotate`` fails or, unless ``even_nothing``, annotates nothing."""
    if isinstance(trial.annotated, Failure):
        raise SkippedError("annotate fails: see prepare")
    if not trial.annotated.annotations.edges and not even_nothing:
        raise SkippedError(NOTHING)
    return trial.annotated


NOTHING = "nothing is annotated"
