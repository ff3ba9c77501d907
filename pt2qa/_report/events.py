"""A report's TensorBoard events, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of a curve."""

    tag: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """One histogram.

    Args:
        tag: its name.
        step: its position on the axis.
        min, max, number, total, squares: of the values: the smallest, the largest, how many, their sum, and the sum of
            their squares.
        limits: the upper edge of each bucket.
        counts: of each bucket.
    """

    tag: str
    step: int
    min: float
    max: float
    number: int
    total: float
    squares: float
    limits: Sequence[float]
    counts: Sequence[float]


Event = Scalar | Histogram
