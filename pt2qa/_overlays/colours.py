"""Colours for numbers: red for bad, green for good; black text is readable on each."""

from __future__ import annotations

from math import isfinite
from typing import Final

from pt2qa._overlays.marks import Marks

COLOURS: Final = ("#f4796b", "#fdae61", "#fee08b", "#d9ef8b", "#a6d96a")
"""From bad to good."""

TEXT: Final = "#000000"

LIMITS: Final = (10.0, 20.0, 30.0, 40.0, 1000.0)
"""Upper limits in dB of :data:`COLOURS`; no finite SQNR is above the last."""


def colour_of(marks: Marks, number: float) -> str:
    """By :data:`LIMITS` if the unit is dB, else by position between the smallest and the largest number."""
    if marks.unit == "dB":
        return next((colour for limit, colour in zip(LIMITS, COLOURS, strict=True) if number <= limit), COLOURS[-1])
    finite = [value for value in marks.numbers.values() if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if not isfinite(number):
        return from_low(marks)[-1 if number > 0 else 0]
    place = (number - low) / (high - low) if high > low else 0.5
    return from_low(marks)[min(int(place * len(COLOURS)), len(COLOURS) - 1)]


def from_low(marks: Marks) -> tuple[str, ...]:
    """The colours from that of the smallest number to that of the largest."""
    return COLOURS if marks.small_is_bad else COLOURS[::-1]
