"""One section of the page for each report: its grade, charts, tables and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pt2qa._report.base import Grade, Group, Report, Step
from pt2qa._report.columns import tables_of
from pt2qa._report.html.graph import graph_data
from pt2qa._report.html.tables import table_data
from pt2qa._report.prose import unpaired_entries
from pt2qa._report.storage import kind_of

SEVERITY: Final[tuple[Grade, ...]] = ("bad", "warning", "good", "plain")
"""Grades in the order of a page's sections."""


@dataclass(frozen=True, slots=True)
class Section:
    """What the page shows for one report.

    Args:
        id: of the element, to link to.
        lines: what to look at, in sentences; the first is the verdict in words.
        advice: what to do; None if the report gives no advice.
        charts, graph, tables: data for the scripts.
    """

    id: str
    report: Report
    verdict: Grade
    lines: tuple[str, ...]
    advice: tuple[Step, ...] | None
    charts: tuple[dict[str, Any], ...]
    graph: dict[str, Any] | None
    tables: tuple[dict[str, Any], ...]
    rules: tuple[Group, ...]
    unpaired: tuple[str, ...]


def sections_of(reports: Sequence[Report]) -> list[Section]:
    """One for each report: those that say what to do, then by grade, the worst first; ties in the order given."""
    for report in reports:
        kind_of(report)  # anything that is not a report is rejected before drawing starts
    found = [_section(f"report-{index}", report, reports) for index, report in enumerate(reports, 1)]
    return sorted(found, key=lambda section: (section.advice is None, SEVERITY.index(section.verdict)))


def _section(ident: str, report: Report, others: Sequence[Report]) -> Section:
    groups = report.groups()
    parts = dict.fromkeys((*report.titles, *tables_of(type(report))))
    shown = [name for name in parts if name not in report.served and getattr(report, name)]
    shown = [] if groups is not None else shown
    return Section(
        id=ident,
        report=report,
        verdict=report.grade(),
        lines=tuple(report.lines()),
        advice=report.advice(),
        charts=tuple(report.charts(others)),
        graph=graph_data(report, others) if "rows" in shown else None,
        tables=tuple(table_data(report, name, report.titles.get(name) or _title(name, len(shown))) for name in shown),
        rules=groups or (),
        unpaired=tuple(unpaired_entries(getattr(report, "unpaired", ()))),
    )


def _title(field: str, fields: int) -> str:
    if field == "rows":
        return "All rows" if fields > 1 else ""
    return field.replace("_", " ").capitalize()
