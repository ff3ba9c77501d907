"""What moved from one profile to another, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Final

from pt2qa._profile.rows import ProfileShift
from pt2qa._report.formats import number, share
from pt2qa._report.prose import counted, few
from pt2qa._report.ranking import ranked

MOVED: Final = 0.1
"""Standard deviations that values move on average, above which they are said to have moved."""

SHIFTED: Final = 0.1
"""Share of a range by which its ends, mean or standard deviation move, above which a tensor is said to have moved."""

WIDER: Final = 1.5
"""Ratio of ranges above which one is said to be wider."""


def summary_of(rows: Sequence[ProfileShift]) -> list[str]:
    """What to look at, in sentences that state their thresholds.

    Args:
        rows: each pair of values once.
    """
    if not rows:
        return ["The two profiles have no row in common."]
    by = worst_by(rows)
    found = [
        _about_nonfinite(rows),
        _about_absent(rows),
        _about_moved(rows, by),
        _about_wider(rows),
        _about_narrower(rows),
        _about_dead(rows),
    ]
    said = [sentence for sentence in found if sentence]
    if said:
        return said
    limit, unit = _limit(by)
    return [f"Nothing stands out: no tensor moved by more than {limit:g} {unit}, and no range is {WIDER:g} × as wide."]


def worst_by(rows: Sequence[ProfileShift]) -> str:
    """The column that says what moved most: the distance, or where none was measured the shift of the range."""
    return "distance" if any(not isnan(row.distance) for row in rows) else "largest_shift"


def _limit(by: str) -> tuple[float, str]:
    return (MOVED, "σ") if by == "distance" else (SHIFTED, "of its range")


def _named(row: ProfileShift) -> str:
    return row.name if row.role == "output" else f"{row.name}, {row.place}"


def _about_nonfinite(rows: Sequence[ProfileShift]) -> str:
    nonfinite = [row for row in rows if row.b_nonfinite > row.a_nonfinite]
    if not nonfinite:
        return _about_left_out(rows)
    first = nonfinite[0]
    return (
        f"More NaN or infinities in b: {counted(len(nonfinite), 'tensor')}; first in the graph: {_named(first)}, "
        f"{first.b_nonfinite} against {first.a_nonfinite}."
    )


def _about_left_out(rows: Sequence[ProfileShift]) -> str:
    nonfinite = [row for row in rows if row.a_nonfinite or row.b_nonfinite]
    if not nonfinite:
        return ""
    first = nonfinite[0]
    return (
        f"NaN or infinities, which are left out: {counted(len(nonfinite), 'tensor')}; first in the graph: "
        f"{_named(first)}, {first.b_nonfinite} in b against {first.a_nonfinite}."
    )


def _about_absent(rows: Sequence[ProfileShift]) -> str:
    absent = [row for row in rows if isnan(row.a_mean) or isnan(row.b_mean)]
    names = few([_named(row) for row in absent])
    return f"Not compared, no finite value in one of the two: {names}." if absent else ""


def _about_moved(rows: Sequence[ProfileShift], by: str) -> str:
    limit, unit = _limit(by)
    moved = [row for row in ranked(ProfileShift, rows, by, ties="largest_shift") if getattr(row, by) > limit]
    if not moved:
        return ""
    most = moved[0]
    # The first one in the graph is where to begin: what follows is computed from it.
    first = next(row for row in rows if getattr(row, by) > limit)
    begins = "" if first is most else f"; first in the graph: {_named(first)}"
    return (
        f"Moved by more than {limit:g} {unit}: {len(moved)} of {counted(len(rows), 'tensor')} (most: {_named(most)}, "
        f"{number(getattr(most, by))}{begins})."
    )


def _about_wider(rows: Sequence[ProfileShift]) -> str:
    wider = [row for row in ranked(ProfileShift, rows, "range_ratio", ties="name") if row.range_ratio > WIDER]
    if not wider:
        return ""
    most = wider[0]
    beyond = "" if isnan(most.outside) else f", {share(most.outside)} % of b outside"
    return (
        f"Ranges more than {WIDER:g} × as wide in b: {counted(len(wider), 'tensor')} (most: {_named(most)}, "
        f"{number(most.range_ratio)} ×{beyond}): scales from a would clamp them."
    )


def _about_narrower(rows: Sequence[ProfileShift]) -> str:
    narrower = [row for row in rows if 0 < row.range_ratio < 1 / WIDER]
    if not narrower:
        return ""
    most = min(narrower, key=lambda row: row.range_ratio)
    return (
        f"Ranges more than {WIDER:g} × as wide in a: {counted(len(narrower), 'tensor')} (most: {_named(most)}, "
        f"{number(1 / most.range_ratio)} ×): clamped in b, or not reached by its data."
    )


def _about_dead(rows: Sequence[ProfileShift]) -> str:
    dead = [row for row in rows if row.a_std > 0 and row.b_std == 0]
    return (
        f"Constant in b and not in a: {', '.join(map(_named, dead[:3]))}{' …' if len(dead) > 3 else ''}."
        if dead
        else ""
    )
