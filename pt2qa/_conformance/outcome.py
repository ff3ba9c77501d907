"""What a property comes to on a model."""

from __future__ import annotations

from dataclasses import dataclass

from pt2qa._conformance.rows import Verdict


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
