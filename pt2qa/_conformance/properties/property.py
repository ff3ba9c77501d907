"""What a property is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pt2qa._conformance.outcome import Outcome, skipped
from pt2qa._conformance.trial import Annotated, Failure, Trial


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
