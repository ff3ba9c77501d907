"""Rows of a conformance report: one property on one model, and what was annotated in each model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pt2qa._report.columns import column

Verdict = Literal["passed", "failed", "does not apply", "skipped"]


@dataclass(frozen=True, slots=True)
class ConformanceRow:
    """The outcome of one property on one model.

    Args:
        quantizer: what was checked, so that tables of several quantizers can be joined.
        property: the property's name, such as ``spelling``.
        model: the model's name, such as ``conv_bn_relu``.
        outcome: ``passed``; ``failed``; ``does not apply``: the model has nothing that the property covers;
            ``skipped``: nothing is annotated, or an earlier step failed, and its row says why.
        why: the numbers, or the reason.
        seconds: how long it took; work that properties share counts for the first of them.
    """

    shown: ClassVar[tuple[str, ...]] = ("property", "model", "outcome", "why")

    quantizer: str
    property: Annotated[str, column(key=True, importance=0)]
    model: Annotated[str, column(key=True, importance=0, shrinks_to=16)]
    outcome: Annotated[Verdict, column(importance=5)]
    why: Annotated[str, column(importance=0, shrinks_to=16)]
    seconds: Annotated[float, column(extended=True)]


@dataclass(frozen=True, slots=True)
class ModelCoverage:
    """How much of one model is annotated.

    Args:
        model: its name.
        pattern: what it shows.
        ops: how many ops it has.
        annotated: how many of them are annotated to round a value.
    """

    model: Annotated[str, column(key=True)]
    pattern: str
    ops: int
    annotated: int
