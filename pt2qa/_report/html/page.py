"""The page: sections, their data as JSON, styles and scripts in one file."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from math import isfinite
from typing import Any, Final

from pt2qa._decibels import LOW_SQNR
from pt2qa._printable import clean_lines
from pt2qa._report.atomic import write_atomic
from pt2qa._report.base import Grade, Report, Step
from pt2qa._report.columns import Column, cell, descriptions, tables_of
from pt2qa._report.html.graph import graph_data
from pt2qa._report.prose import unpaired_entries
from pt2qa._report.rows import Environment
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError

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


def sections_of(reports: Sequence[Report]) -> list[Section]:
    """One for each report: those that say what to do, then by grade, the worst first; ties in the order given."""
    for report in reports:
        kind_of(report)  # anything that is not a report is rejected before drawing starts
    found = [_section(f"report-{index}", report, reports) for index, report in enumerate(reports, 1)]
    return sorted(found, key=lambda section: (section.advice is None, SEVERITY.index(section.verdict)))


def _section(ident: str, report: Report, others: Sequence[Report]) -> Section:
    parts = dict.fromkeys((*report.titles, *tables_of(type(report))))
    shown = [name for name in parts if name not in report.served and getattr(report, name)]
    shown = [] if report.groups() is not None else shown
    return Section(
        id=ident,
        report=report,
        verdict=report.grade(),
        lines=tuple(report.lines()),
        advice=report.advice(),
        charts=tuple(report.charts(others)),
        graph=graph_data(report, others) if "rows" in shown else None,
        tables=tuple(table_data(report, name, report.titles.get(name) or _title(name, len(shown))) for name in shown),
    )


def _title(field: str, fields: int) -> str:
    if field == "rows":
        return "All rows" if fields > 1 else ""
    return field.replace("_", " ").capitalize()


def table_data(report: Report, part: str, title: str) -> dict[str, Any]:
    """One table of a report by column: the columns of printed tables come first, the others on request.

    Returns:
        ``name`` (the field), ``title``, ``size`` (number of rows), ``worst`` (the rows' numbers, worst first; null if
        rows are not ranked), ``by`` (the column that ranks them, or null) and ``columns``: ``key`` as in pandas and
        CSV, ``title``, ``about`` (what it means), ``number`` (whether it sorts by value), ``shown`` (by default, or on
        request), ``worse`` (which values are), ``low`` (values below it are marked, or null), ``values``, and
        ``texts``, null if they equal the values.
    """
    rows = report.on_page(part)
    shown = {each.name: each for each in report.shown(part)}
    others = [each for each in report.columns(part) if each.name not in shown]
    about = descriptions(report.row_type(part))
    columns = [
        {**_column(each, rows, each.name in shown), "about": about.get(each.name, "")}
        for each in (*shown.values(), *others)
    ]
    ordered, by = report.worst_first(part)
    number = {id(row): index for index, row in enumerate(rows)}
    first = [number.pop(id(row)) for row in ordered if id(row) in number]
    worst = [*first, *number.values()]
    found = {"name": part, "title": title, "size": len(rows), "by": by, "columns": columns}
    return {**found, "worst": None if worst == sorted(worst) else worst}


def _column(column: Column, rows: Sequence[Any], shown: bool) -> dict[str, Any]:
    cells = [cell(row, column.name) for row in rows]
    texts = [column.show(value) for value in cells]
    # JSON lacks numbers that are not finite: they are the texts nan, inf and -inf.
    plain = [str(value) if isinstance(value, float) and not isfinite(value) else value for value in cells]
    values = texts if column.type in ("shape", "names") else plain
    return {
        "key": column.name,
        "title": column.title,
        "number": bool(cells) and all(isinstance(value, (int, float)) for value in cells),
        "shown": shown and set(texts) != {"nan"},
        "worse": column.worse,
        "low": LOW_SQNR if column.unit == "dB" and column.worse == "smaller" else None,
        "values": values,
        "texts": None if texts == values else texts,
    }


def write_html(reports: Report | Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Write reports as one HTML file that opens offline, to attach to a build or to send.

    What to do comes first, then the verdicts, then a section for each report, the worst first: charts, tables to sort
    and filter, and notes.  A layer report shows histograms of its worst layers if profiles of the same model are among
    the reports.

    Args:
        reports: any reports of :mod:`pt2qa`, of one model or of several.
        path: the file, written atomically.

    Raises:
        ReportError: there is no report, one is of an unregistered kind, or the file cannot be written.

    >>> from pt2qa.report import Environment, WeightReport
    >>> report = WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=Environment.here(""))
    >>> write_html(report, "/nowhere/report.html")
    Traceback (most recent call last):
    pt2qa.errors.ReportError: cannot write /nowhere/report.html: the folder /nowhere does not exist; create it first
    """
    write_atomic(path, html_page(reports))


def html_page(reports: Report | Sequence[Report]) -> str:
    """The text of the page that :func:`write_html` writes."""
    # Imported here: reading and printing reports need no template engine.
    from jinja2 import Environment as Templates
    from jinja2 import StrictUndefined

    given = [reports] if isinstance(reports, Report) else list(reports)
    if not given:
        raise ReportError("a page needs at least one report, got none")
    sections = sections_of(given)
    models = [getattr(each.report, "model", "") for each in sections]
    templates = Templates(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = templates.from_string(_packaged("page.html.jinja"))
    page = template.render(
        title=", ".join(dict.fromkeys(filter(None, models))) or "Reports",
        sections=sections,
        environments=_environments(sections),
        facts=[f.name for f in fields(Environment)],
        unpaired_entries=unpaired_entries,
        data=_packed(
            {
                section.id: _cleaned({"tables": section.tables, "charts": section.charts, "graph": section.graph})
                for section in sections
            }
        ),
        style=_packaged("page.css"),
        scripts=[_packaged(name) for name in ("tables.js", "charts.js", "graph.js", "page.js")],
    )
    return clean_lines(page)


def _packaged(name: str) -> str:
    return files("pt2qa._report.html").joinpath(name).read_text(encoding="utf-8")


def _packed(data: Any) -> str:
    """Compressed JSON as base64: two profiles of 2,000 ops would be 12 MB, and base64 cannot close an HTML element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")


def _cleaned(data: Any) -> Any:
    """The same data with every text cleaned."""
    if isinstance(data, str):
        return clean_lines(data)
    if isinstance(data, dict):
        return {key: _cleaned(value) for key, value in data.items()}
    return [_cleaned(item) for item in data] if isinstance(data, list | tuple) else data


def _environments(sections: Sequence[Section]) -> list[tuple[Environment, list[Section]]]:
    """Each environment once, with the reports that were made in it."""
    found: dict[Environment, list[Section]] = {}
    for section in sections:
        if made_in := getattr(section.report, "environment", None):
            found.setdefault(made_in, []).append(section)
    return list(found.items())
