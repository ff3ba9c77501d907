"""A diff as text: the verdict, numbers of the whole report, what else differs, and the rows that changed."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import TYPE_CHECKING, Final

from pt2qa._report.formats import decibel, exact, number, unit
from pt2qa._report.prose import counted, few, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._report.diffs.report import DiffRow, ReportDiff

_ORDER: Final = ("worse", "changed", "gone", "new", "better")
"""The statuses that ``worst`` shows, in this order."""


def diff_text(report: ReportDiff, sort: str, limit: int | None, width: int) -> str:
    """The whole diff, every line at most ``width`` wide."""
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            wrap(_verdict(report), width, indent="  "),
            _lines("Whole report", [_figure_line(row) for row in report.figures], width),
            _lines("Also different", [f"{c.name}: {c.before} → {c.after}" for c in report.changes], width),
            diff_table(report, sort, limit, width) if _shown(report, sort) or sort != "worst" else "",
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in diff_summary(report)),
        ]
    )


def diff_table(report: ReportDiff, sort: str, limit: int | None, width: int) -> str:
    """The rows as a table, and below it what it leaves out."""
    # Imported here: the module of the rows imports this one.
    from pt2qa._report.diffs.report import DiffRow

    if sort in {"worst", "graph"}:
        return table(_views(report), _shown(report, sort), None, limit, width)
    rows = ranked(DiffRow, report.rows, sort, ties="loss")
    views = _views(report) if sort == "name" else with_column(DiffRow, _views(report), sort)
    return table(views, rows, sort, limit, width)


def diff_summary(report: ReportDiff) -> list[str]:
    """Which rows to look at, by status."""
    found = []
    for status, what in (("worse", "Worse"), ("gone", "Gone"), ("new", "New")):
        names = [row.place for row in _shown(report, "worst") if row.status == status]
        if names:
            found.append(f"{what}: {few(names)}.")
    if silent := _silent(report):
        found.append(f"Without a number before and now: {few(silent)}.")
    lost = [row.place for row in report.rows if row.status == "changed" and isnan(row.after) and not isnan(row.before)]
    return [*found, f"Without a number now: {few(lost)}."] if lost else found


def _silent(report: ReportDiff) -> list[str]:
    """The rows that have no number in either report; of texts none has one."""
    return [
        row.place for row in report.having("unchanged") if report.worst_is and isnan(row.before) and isnan(row.after)
    ]


def _views(report: ReportDiff) -> tuple[View, ...]:
    in_decibels = report.unit == "dB"
    show = decibel if in_decibels else number
    below = "\ndB" if in_decibels else ""
    views = (
        View("name", "name", str, 0, shrinks_to=20),
        View("role", "role", str, 3),
        View("status", "status", str, 0),
        View("before", f"before{below}", show, 2),
        View("after", f"after{below}", show, 4),
        View("change", f"change{below}", _signed(show), 5),
        View("note", "note", str, 1, shrinks_to=16),
    )
    idle = {column for column in ("role", "note") if not any(getattr(row, column) for row in report.rows)}
    return tuple(view for view in views if view.column not in idle)


def _signed(show: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: f"+{show(value)}" if value > 0 else show(value)


def _shown(report: ReportDiff, sort: str) -> tuple[DiffRow, ...]:
    """The rows of a table in the report's own order or by status; then rows that did not change are left out."""
    if sort == "graph":
        return report.rows
    rows = [row for row in report.rows if row.status in _ORDER]
    return tuple(sorted(rows, key=lambda row: (_ORDER.index(row.status), 0.0 if isnan(row.loss) else -abs(row.loss))))


def _title(report: ReportDiff, sort: str) -> str:
    measure = report.measure.removeprefix("rows.")
    ways = {
        "smallest": ", smaller is worse",
        "largest": ", larger is worse",
        "unknown": ", which does not say what is worse",
    }
    which = ways.get(report.worst_is, "")
    allowed = f", tolerance {exact(report.tolerance, report.unit)}" if report.worst_is else ""
    how = {"worst": "what changed, greatest loss first", "graph": "in graph order"}.get(sort, f"by {sort}")
    subject = f"{report.model}, quantized by {report.quantizer}" if report.quantizer else report.model
    return f"{subject}: {report.kind}, old → new: {measure}{which}{allowed}; {how}"


def _verdict(report: ReportDiff) -> str:
    if not report.rows:
        return "Neither report has a row."
    counts = {status: len(report.having(status)) for status in (*_ORDER, "unchanged")}
    total, silent = counted(len(report.rows), "row"), len(_silent(report))
    if silent == len(report.rows):
        return "No row has a number in either report."
    if counts["unchanged"] == len(report.rows) and not silent:
        return f"Nothing changed in {total}."
    counts["unchanged"] -= silent
    counts["without a number before and now"] = silent
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    return f"Of {total}: {', '.join(parts)}."


def _figure_line(row: DiffRow) -> str:
    measured = unit(row.role or row.name)
    show = decibel if measured else number
    name = f"{row.role} of {row.name}" if row.role else row.name
    change = f"{show(row.before)} → {show(row.after)} {measured}".rstrip()
    return f"{name}: {change}, {row.status}{f', {row.note}' if row.note else ''}"


def _lines(title: str, entries: list[str], width: int) -> str:
    """All of a short list."""
    return "\n".join([f"{title}:", *(wrap(f"  {entry}", width, indent="    ") for entry in entries)]) if entries else ""
