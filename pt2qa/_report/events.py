"""A report's TensorBoard events, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pt2qa._report.charts import Drawing
from pt2qa._report.columns import cell


@dataclass(frozen=True, slots=True)
class Scalar:
    tag: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """One histogram: smallest and largest value, how many, their sum and sum of squares; upper edges of buckets."""

    tag: str
    step: int
    min: float
    max: float
    number: int
    total: float
    squares: float
    limits: Sequence[float]
    counts: Sequence[float]


@dataclass(frozen=True, slots=True)
class Picture:
    tag: str
    step: int
    drawing: Drawing


Event = Scalar | Histogram | Picture
Runs = dict[str, list[Event]]
"""Events by the name of a TensorBoard run; runs share a card where their tags are the same."""


def scalars(rows: Sequence[Any], metrics: Sequence[str], step: int) -> list[Event]:
    """Each metric of each row at the step; only finite values."""
    found: list[Event] = []
    for metric in metrics:
        for row, name in zip(rows, _names(rows), strict=True):
            value = float(cell(row, metric))
            if isfinite(value):
                found.append(Scalar(f"{metric}/{name}", step, value))
    return found


def _names(rows: Sequence[Any]) -> list[str]:
    """A value that is quantized in two ways has two rows with the same name."""
    seen: dict[str, int] = {}
    found = []
    for row in rows:
        seen[row.name] = ordinal = seen.get(row.name, 0) + 1
        found.append(row.name if ordinal == 1 else f"{row.name} ({ordinal})")
    return found


def sides(rows: Sequence[Any], numbers: Sequence[str], step: int) -> Runs:
    """Columns such as ``ref_min`` and ``quant_min`` as the runs ``reference`` and ``quantized`` of one tag."""
    runs: Runs = {}
    for run, prefix in (("reference", "ref"), ("quantized", "quant")):
        pairs = [(row, name, number) for row, name in zip(rows, _names(rows), strict=True) for number in numbers]
        values = [(f"{number}/{name}", float(cell(row, f"{prefix}_{number}"))) for row, name, number in pairs]
        runs[run] = [Scalar(tag, step, value) for tag, value in values if isfinite(value)]
    return runs


def pictures(drawn: Sequence[Drawing], step: int) -> list[Event]:
    """Charts of a report as pictures, both sides of a histogram in one."""
    return [Picture(f"charts/{each.title}", step, each) for each in drawn]
