"""What the values of a profile show, and what moved from one profile to another, in sentences with their thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan, log2
from typing import Final

from pt2qa._profile.histogram import RELATIVE_ERROR
from pt2qa._profile.rows import ProfileRow, ProfileShift
from pt2qa._report.formats import number, share
from pt2qa._report.prose import counted, few
from pt2qa._report.table import ranked

OUTLIERS: Final = 4.0
"""Outlier ratio above which a value is said to have outliers: two bits of an integer grid serve 0.1 % of the values."""

CLAMPED: Final = 0.01
"""Share of values that the clamp moved, above which a tensor is counted."""

LITTLE_USED: Final = 0.5
"""Share of the integer range below which it is said to be little used: one bit is lost."""

MOVED: Final = 0.1
"""Standard deviations that values move on average, above which they are said to have moved."""

SHIFTED: Final = 0.1
"""Share of a range by which its ends, mean or standard deviation move, above which a tensor is said to have moved."""

WIDER: Final = 1.5
"""Ratio of ranges above which one is said to be wider."""


def summary_of(rows: Sequence[ProfileRow], *, histograms: bool, deployed: bool) -> list[str]:
    """What to look at in a profile, given each value once, whether it has histograms, and if it is of a program."""
    said = list(_about_values(rows, deployed))
    if not said:
        said = ["Nothing stands out: no NaN, no infinity, no tensor that is all zero, no outliers."]
    if histograms:
        said.append(f"Quantiles are read from histograms: within {100 * RELATIVE_ERROR:.1f} % of the value.")
    return said


def _about_values(rows: Sequence[ProfileRow], deployed: bool) -> Iterator[str]:
    def among(found: Sequence[ProfileRow]) -> str:
        return f"{len(found)} of {counted(len(rows), 'tensor')}"

    if nonfinite := [row for row in rows if row.nans]:
        first = nonfinite[0]
        yield (
            f"NaN in {among(nonfinite)}; first in the graph: {_named(first)}, {first.nans} of {first.count}. "
            "Look there first: what follows inherits them."
        )
    if infinite := [row for row in rows if row.infs]:
        first = infinite[0]
        yield (
            f"Infinite in {among(infinite)}; first in the graph: {_named(first)}, {first.infs} of {first.count}. A "
            "mask is expected to be; otherwise it is an overflow, or in the data."
        )
    if absent := [row for row in rows if not row.count]:
        yield f"Without a value: {few([_named(row) for row in absent])}."
    if dead := [row for row in rows if row.zeros == 1.0]:
        yield f"All zero: {few([_named(row) for row in dead])}."
    if clamped := [row for row in ranked(ProfileRow, rows, "saturation", ties="name") if row.saturation > CLAMPED]:
        which = f"{among(clamped)} (most: {_named(clamped[0])}, {share(clamped[0].saturation)} %)"
        yield (
            f"At an end of the integer range, clamped or not: more than {100 * CLAMPED:g} % of the values in {which}."
            if deployed
            else f"The clamp moved more than {100 * CLAMPED:g} % of the values in {which}; pt2qa.compare_layers shows "
            "how far, and at what cost."
        )
    if wide := [row for row in ranked(ProfileRow, rows, "outlier_ratio", ties="name") if row.outlier_ratio > OUTLIERS]:
        ratio = wide[0].outlier_ratio
        bits = "" if ratio == inf else f": {log2(ratio):.1f} bits of an integer for 0.1 % of the values"
        yield (
            f"Outliers: {among(wide)} reach {OUTLIERS:g} × the magnitude of 99.9 % of their values (most: "
            f"{_named(wide[0])}, {number(ratio)} ×{bits})."
        )
    known = [row for row in rows if not isnan(row.range_use)]
    if unused := [row for row in ranked(ProfileRow, known, "range_use", ties="name") if row.range_use < LITTLE_USED]:
        yield (
            f"Less than {100 * LITTLE_USED:g} % of the integer range used by {len(unused)} of "
            f"{counted(len(known), 'quantized tensor')} (least: {_named(unused[0])}, {share(unused[0].range_use)} %): "
            "this data does not reach the other integers."
        )


def difference_of(rows: Sequence[ProfileShift]) -> list[str]:
    """What to look at in the difference of two profiles, given each pair of values once."""
    if not rows:
        return ["The two profiles have no rows in common."]
    by = worst_by(rows)
    limit, unit = (MOVED, "σ") if by == "distance" else (SHIFTED, "of its range")
    return list(_about_shifts(rows, by, limit, unit)) or [
        f"Nothing stands out: no tensor moved by more than {limit:g} {unit}, and no range is {WIDER:g} × as wide."
    ]


def worst_by(rows: Sequence[ProfileShift]) -> str:
    """The column that says what moved most: the distance or, if none was measured, the shift of the range."""
    return "distance" if any(not isnan(row.distance) for row in rows) else "largest_shift"


def _about_shifts(rows: Sequence[ProfileShift], by: str, limit: float, unit: str) -> Iterator[str]:
    if more := [row for row in rows if row.b_nonfinite > row.a_nonfinite]:
        first = more[0]
        yield (
            f"More NaN or infinities in b: {counted(len(more), 'tensor')}; first in the graph: {_named(first)}, "
            f"{first.b_nonfinite} against {first.a_nonfinite}."
        )
    elif left_out := [row for row in rows if row.a_nonfinite or row.b_nonfinite]:
        first = left_out[0]
        yield (
            f"NaN or infinities, which are left out: {counted(len(left_out), 'tensor')}; first in the graph: "
            f"{_named(first)}, {first.b_nonfinite} in b against {first.a_nonfinite}."
        )
    if absent := [row for row in rows if isnan(row.a_mean) or isnan(row.b_mean)]:
        yield f"Not compared, no finite value in one of the two: {few([_named(row) for row in absent])}."
    if moved := [row for row in ranked(ProfileShift, rows, by, ties="largest_shift") if getattr(row, by) > limit]:
        most = moved[0]
        # Start with the first one in the graph: what follows is computed from it.
        first = next(row for row in rows if getattr(row, by) > limit)
        begins = "" if first is most else f"; first in the graph: {_named(first)}"
        yield (
            f"Moved by more than {limit:g} {unit}: {len(moved)} of {counted(len(rows), 'tensor')} (most: "
            f"{_named(most)}, {number(getattr(most, by))}{begins})."
        )
    if wider := [row for row in ranked(ProfileShift, rows, "range_ratio", ties="name") if row.range_ratio > WIDER]:
        most = wider[0]
        beyond = "" if isnan(most.outside) else f", {share(most.outside)} % of b outside"
        yield (
            f"Ranges more than {WIDER:g} × as wide in b: {counted(len(wider), 'tensor')} (most: {_named(most)}, "
            f"{number(most.range_ratio)} ×{beyond}): scales from a would clamp them."
        )
    if narrower := [row for row in rows if 0 < row.range_ratio < 1 / WIDER]:
        most = min(narrower, key=lambda row: row.range_ratio)
        yield (
            f"Ranges more than {WIDER:g} × as wide in a: {counted(len(narrower), 'tensor')} (most: {_named(most)}, "
            f"{number(1 / most.range_ratio)} ×): clamped in b, or not reached by its data."
        )
    if dead := [row for row in rows if row.a_std > 0 and row.b_std == 0]:
        yield f"Constant in b and not in a: {', '.join(map(_named, dead[:3]))}{' …' if len(dead) > 3 else ''}."


def _named(row: ProfileRow | ProfileShift) -> str:
    return row.name if row.role == "output" else f"{row.name}, {row.place}"
