"""The difference of two profiles as text: what moved most, what one of the two has alone, and what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING, Final

from pt2qa._profile.rows import ProfileOnly, ProfileShift, place_of
from pt2qa._report.formats import number, share, whole
from pt2qa._report.prose import counted, few, listed, sections, wrap
from pt2qa._report.ranking import check_column, ranked
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._profile.diff import ProfileDiff

MOVED: Final = 0.1
"""Standard deviations that values move on average, above which they are said to have moved."""

SHIFTED: Final = 0.1
"""Share of a range by which its ends, mean or standard deviation move, above which a tensor is said to have moved."""

WIDER: Final = 1.5
"""Ratio of ranges above which one is said to be wider."""

VIEWS: Final = (
    View("name", "name", str, 0, shrinks_to=24),
    View("place", "value", str, 0, shrinks_to=6),
    View("op", "op", str, 1, shrinks_to=12),
    View("b_dtype", "dtype\nb", str, 2),
    View("b_broken", "NaN, inf\nb", whole, 9),
    View("distance", "moved\nσ", number, 9),
    View("outside", "outside\n%", share, 8),
    View("a_min", "min\na", number, 6),
    View("b_min", "min\nb", number, 6),
    View("a_max", "max\na", number, 7),
    View("b_max", "max\nb", number, 7),
    View("a_mean", "mean\na", number, 4),
    View("b_mean", "mean\nb", number, 4),
    View("a_std", "std\na", number, 5),
    View("b_std", "std\nb", number, 5),
    View("range_ratio", "range\nb/a", number, 8),
)
"""What a table shows, in this order; the least important goes first when the screen is narrow."""


def diff_text(report: ProfileDiff, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            "\n".join(wrap(line, width, indent="   ") for line in _title(report, sort)),
            diff_table(report, sort, limit, width),
            *(listed(f"Only in {side} ({len(found)})", found, width) for side, found in _alone(report.only).items()),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in diff_summary(report)),
        ]
    )


def diff_table(report: ProfileDiff, sort: str, limit: int | None, width: int) -> str:
    """Each pair of values once as a table, and below it what it leaves out."""
    views = tuple(view for view in VIEWS if view.column != "b_broken" or any(row.b_broken for row in report.rows))
    by = worst_by(report) if sort == "worst" else None if sort == "graph" else sort
    rows = report.values
    if by is not None:
        rows = ranked(ProfileShift, rows, by, ties="largest_shift")
    if sort == "worst":
        # What broke has no distance, and is worse than any.
        rows = tuple(sorted(rows, key=lambda row: row.b_broken <= row.a_broken))
    elif by is not None and sort != "name":
        check_column(ProfileShift, rows, sort)
        views = with_column(ProfileShift, views, sort)
    return table(views, rows, by, limit, width)


def diff_summary(report: ProfileDiff) -> list[str]:
    """What to look at, in sentences that state their thresholds."""
    if not report.rows:
        return ["The two profiles have no row in common."]
    rows = report.values
    found = [
        _about_broken(rows),
        _about_absent(rows),
        _about_moved(rows, worst_by(report)),
        _about_wider(rows),
        _about_narrower(rows),
        _about_dead(rows),
    ]
    said = [sentence for sentence in found if sentence]
    if said:
        return said
    limit, unit = _limit(worst_by(report))
    return [f"Nothing stands out: no tensor moved by more than {limit:g} {unit}, and no range is {WIDER:g} × as wide."]


def worst_by(report: ProfileDiff) -> str:
    """The column that says what moved most: the distance, or where none was measured the shift of the range."""
    return "distance" if any(not isnan(row.distance) for row in report.rows) else "largest_shift"


def _limit(by: str) -> tuple[float, str]:
    return (MOVED, "σ") if by == "distance" else (SHIFTED, "of its range")


def _title(report: ProfileDiff, sort: str) -> list[str]:
    worst = "moved most first" if worst_by(report) == "distance" else "largest shift first"
    how = {"worst": worst, "graph": "in graph order"}.get(sort, f"by {sort}")
    return [
        f"Difference of two profiles: {counted(len(report.values), 'tensor')}, each once, {how}",
        f"a: {report.a}, {_data(report.a_batches, report.a_samples)}",
        f"b: {report.b}, {_data(report.b_batches, report.b_samples)}",
    ]


def _data(batches: int, samples: int) -> str:
    return f"{counted(batches, 'batch', 'batches')} ({counted(samples, 'sample')})"


def _alone(only: Sequence[ProfileOnly]) -> dict[str, list[str]]:
    return {
        side: [f"{row.name}, {place_of(row.role, row.argument)}" for row in only if row.side == side] for side in "ab"
    }


def _named(row: ProfileShift) -> str:
    return row.name if row.role == "output" else f"{row.name}, {row.place}"


def _about_broken(rows: Sequence[ProfileShift]) -> str:
    broken = [row for row in rows if row.b_broken > row.a_broken]
    if not broken:
        return _about_left_out(rows)
    first = broken[0]
    return (
        f"More NaN or infinities in b: {counted(len(broken), 'tensor')}; first in the graph: {_named(first)}, "
        f"{first.b_broken} against {first.a_broken}."
    )


def _about_left_out(rows: Sequence[ProfileShift]) -> str:
    broken = [row for row in rows if row.a_broken or row.b_broken]
    if not broken:
        return ""
    first = broken[0]
    return (
        f"NaN or infinities, which are left out: {counted(len(broken), 'tensor')}; first in the graph: "
        f"{_named(first)}, {first.b_broken} in b against {first.a_broken}."
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
