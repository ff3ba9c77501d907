"""What the values of a profile show, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, log2
from typing import Final

from pt2qa._profile.histogram import RELATIVE_ERROR
from pt2qa._profile.rows import ProfileRow
from pt2qa._report.formats import number, share
from pt2qa._report.prose import counted, few
from pt2qa._report.ranking import ranked

OUTLIERS: Final = 4.0
"""Outlier ratio above which a value is said to have outliers: two bits of an integer grid serve 0.1 % of the values."""

CLAMPED: Final = 0.01
"""Share of values that the clamp moved, above which a tensor is counted."""

LITTLE_USED: Final = 0.5
"""Share of the integer range below which it is said to be little used: one bit is lost."""


def summary_of(rows: Sequence[ProfileRow], *, histograms: bool) -> list[str]:
    """What to look at, in sentences that state their thresholds.

    Args:
        rows: each value once.
        histograms: whether quantiles were read from histograms.
    """
    found = [
        _about_nan(rows),
        _about_infinite(rows),
        _about_absent(rows),
        _about_dead(rows),
        _about_clamped(rows),
        _about_outliers(rows),
        _about_range(rows),
    ]
    said = [sentence for sentence in found if sentence]
    if not said:
        said = ["Nothing stands out: no NaN, no infinity, no tensor that is all zero, no outliers."]
    if histograms:
        said.append(f"Quantiles are read from histograms: within {100 * RELATIVE_ERROR:.1f} % of the value.")
    return said


def _named(row: ProfileRow) -> str:
    return row.name if row.role == "output" else f"{row.name}, {row.place}"


def _among(rows: Sequence[ProfileRow], total: int) -> str:
    return f"{len(rows)} of {counted(total, 'tensor')}"


def _about_nan(rows: Sequence[ProfileRow]) -> str:
    nonfinite = [row for row in rows if row.nans]
    if not nonfinite:
        return ""
    first = nonfinite[0]
    return (
        f"NaN in {_among(nonfinite, len(rows))}; first in the graph: {_named(first)}, {first.nans} of {first.count}. "
        "Look there first: what follows inherits them."
    )


def _about_infinite(rows: Sequence[ProfileRow]) -> str:
    infinite = [row for row in rows if row.infs]
    if not infinite:
        return ""
    first = infinite[0]
    return (
        f"Infinite in {_among(infinite, len(rows))}; first in the graph: {_named(first)}, {first.infs} of "
        f"{first.count}. A mask is meant to be; all else is an overflow, or in the data."
    )


def _about_absent(rows: Sequence[ProfileRow]) -> str:
    absent = [row for row in rows if not row.count]
    return f"Without a value: {few([_named(row) for row in absent])}." if absent else ""


def _about_dead(rows: Sequence[ProfileRow]) -> str:
    dead = [row for row in rows if row.zeros == 1.0]
    return f"All zero: {few([_named(row) for row in dead])}." if dead else ""


def _about_clamped(rows: Sequence[ProfileRow]) -> str:
    clamped = [row for row in ranked(ProfileRow, rows, "saturation", ties="name") if row.saturation > CLAMPED]
    if not clamped:
        return ""
    return (
        f"The clamp moved more than {100 * CLAMPED:g} % of the values in {_among(clamped, len(rows))} (most: "
        f"{_named(clamped[0])}, {share(clamped[0].saturation)} %); how far, and at what cost, "
        "pt2qa.compare_layers tells."
    )


def _about_outliers(rows: Sequence[ProfileRow]) -> str:
    wide = [row for row in ranked(ProfileRow, rows, "outlier_ratio", ties="name") if row.outlier_ratio > OUTLIERS]
    if not wide:
        return ""
    most = wide[0]
    bits = (
        ""
        if most.outlier_ratio == inf
        else f": {log2(most.outlier_ratio):.1f} bits of an integer for 0.1 % of the values"
    )
    return (
        f"Outliers: {_among(wide, len(rows))} with a peak over {OUTLIERS:g} × what 99.9 % of its values stay within "
        f"(most: "
        f"{_named(most)}, {number(most.outlier_ratio)} ×{bits})."
    )


def _about_range(rows: Sequence[ProfileRow]) -> str:
    known = [row for row in rows if not isnan(row.range_use)]
    unused = [row for row in ranked(ProfileRow, known, "range_use", ties="name") if row.range_use < LITTLE_USED]
    if not unused:
        return ""
    return (
        f"Less than {100 * LITTLE_USED:g} % of the integer range used by {len(unused)} of "
        f"{counted(len(known), 'quantized tensor')} (least: {_named(unused[0])}, {share(unused[0].range_use)} %): "
        "this data has nothing for the other integers."
    )
