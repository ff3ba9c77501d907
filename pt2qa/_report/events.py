"""A report's TensorBoard events, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pt2qa._report.columns import cell


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


def scalars(rows: Sequence[Any], outputs: Sequence[Any], metrics: Sequence[str], step: int) -> list[Event]:
    """Each metric of each row and output at the step, and of the rows along the graph; only finite values.

    Args:
        rows: in graph order.
        outputs: rows of the model's outputs.
        metrics: columns, or custom metrics.
        step: the position on the axis.
    """
    found: list[Scalar] = []
    for metric in metrics:
        seen: dict[str, int] = {}
        for row in (*rows, *outputs):
            # A value that is quantized in two ways has two rows with the same name.
            seen[row.name] = ordinal = seen.get(row.name, 0) + 1
            name = row.name if ordinal == 1 else f"{row.name} ({ordinal})"
            found.append(Scalar(f"{metric}/{name}", step, float(cell(row, metric))))
        found += [Scalar(f"along_graph/{metric}", n, float(cell(row, metric))) for n, row in enumerate(rows)]
    return [each for each in found if isfinite(each.value)]
