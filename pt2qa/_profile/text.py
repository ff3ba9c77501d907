"""A profile as text: each tensor once, those with outliers first, and last what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, log2
from typing import TYPE_CHECKING, Final

from pt2qa._profile.histogram import RELATIVE_ERROR
from pt2qa._profile.rows import ProfileRow
from pt2qa._report.formats import number, share, whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import check_column, ranked
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._profile.report import Profile

OUTLIERS: Final = 4.0
"""Peak above which a value is said to have outliers: two bits of an integer grid serve 0.1 % of the values."""

CLAMPED: Final = 0.01
"""Share of values that the clamp moved, above which a tensor is counted."""

LITTLE_USED: Final = 0.5
"""Share of the integer range below which it is said to be little used: one bit is lost."""

VIEWS: Final = (
    View("name", "name", str, 0, shrinks_to=24),
    View("place", "value", str, 0, shrinks_to=6),
    View("op", "op", str, 1, shrinks_to=12),
    View("dtype", "dtype", str, 4),
    View("broken", "NaN\ninf", whole, 9),
    View("min", "min", number, 7),
    View("max", "max", number, 8),
    View("mean", "mean", number, 5),
    View("std", "std", number, 6),
    View("q50", "50 %", number, 2),
    View("q99_9", "99.9 %", number, 4),
    View("peak", "peak\n×", number, 9),
    View("zeros", "zero\n%", share, 3),
    View("saturation", "clamped\n%", share, 8),
    View("range_use", "range\nused %", share, 7),
)
"""What a table shows, in this order; the least important goes first when the screen is narrow."""


def profile_text(report: Profile, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            profile_table(report, sort, limit, width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in profile_summary(report)),
        ]
    )


def profile_table(report: Profile, sort: str, limit: int | None, width: int) -> str:
    """Each value once as a table, and below it what it leaves out."""
    views = tuple(view for view in VIEWS if view.column != "broken" or any(row.broken for row in report.rows))
    if sort not in {"worst", "graph", "name"}:
        check_column(ProfileRow, report.values, sort)
        views = with_column(ProfileRow, views, sort)
    return table(views, in_order(report, sort), _sorted_by(report, sort), limit, width)


def in_order(report: Profile, sort: str) -> tuple[ProfileRow, ...]:
    """Each value once, in the order that a user named; ``worst``: NaN or infinities first, then the highest peak."""
    by = _sorted_by(report, sort)
    if by is None:
        return report.values
    rows = ranked(ProfileRow, report.values, by, ties="name")
    return tuple(sorted(rows, key=lambda row: row.broken == 0)) if sort == "worst" else rows


def profile_summary(report: Profile) -> list[str]:
    """What to look at, in sentences that state their thresholds."""
    found = [
        _about_nan(report.values),
        _about_infinite(report.values),
        _about_absent(report.values),
        _about_dead(report.values),
        _about_clamped(report.values),
        _about_outliers(report.values),
        _about_range(report.values),
    ]
    said = [sentence for sentence in found if sentence]
    if not said:
        said = ["Nothing stands out: no NaN, no infinity, no tensor that is all zero, no outliers."]
    if report.histograms:
        said.append(f"Quantiles are read from histograms: within {100 * RELATIVE_ERROR:.1f} % of the value.")
    return said


def _sorted_by(report: Profile, sort: str) -> str | None:
    """The column that rows are sorted by; None for the order of the graph."""
    if sort != "worst":
        return None if sort == "graph" else sort
    return "peak" if report.histograms else None


def _title(report: Profile, sort: str) -> str:
    worst = "highest peak first" if report.histograms else "in graph order"
    how = {"worst": worst, "graph": "in graph order"}.get(sort, f"by {sort}")
    data = f"{counted(report.batches, 'batch', 'batches')} ({counted(report.samples, 'sample')})"
    return f"Profile of {report.title}: {counted(len(report.values), 'tensor')}, {data}, each once, {how}"


def _named(row: ProfileRow) -> str:
    return row.name if row.role == "output" else f"{row.name}, {row.place}"


def _among(rows: Sequence[ProfileRow], total: int) -> str:
    return f"{len(rows)} of {counted(total, 'tensor')}"


def _about_nan(rows: Sequence[ProfileRow]) -> str:
    broken = [row for row in rows if row.nans]
    if not broken:
        return ""
    first = broken[0]
    return (
        f"NaN in {_among(broken, len(rows))}; first in the graph: {_named(first)}, {first.nans} of {first.count}. "
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
    return f"Without a value: {_few(absent)}." if absent else ""


def _about_dead(rows: Sequence[ProfileRow]) -> str:
    dead = [row for row in rows if row.zeros == 1.0]
    return f"All zero: {_few(dead)}." if dead else ""


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
    wide = [row for row in ranked(ProfileRow, rows, "peak", ties="name") if row.peak > OUTLIERS]
    if not wide:
        return ""
    most = wide[0]
    bits = "" if most.peak == inf else f": {log2(most.peak):.1f} bits of an integer for 0.1 % of the values"
    return (
        f"Outliers: {_among(wide, len(rows))} with a peak over {OUTLIERS:g} × what 99.9 % of its values stay within "
        f"(most: "
        f"{_named(most)}, {number(most.peak)} ×{bits})."
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


def _few(rows: Sequence[ProfileRow], most: int = 3) -> str:
    names = ", ".join(_named(row) for row in rows[:most])
    return f"{names} and {len(rows) - most} more" if len(rows) > most else names
