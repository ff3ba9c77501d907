"""A report's tables as stored in the page: every column with its values in full precision, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from pt2qa._decibels import LOW_SQNR
from pt2qa._report.base import Report
from pt2qa._report.columns import Column, cell, descriptions
from pt2qa._report.formats import shape


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


def plain(value: Any) -> Any:
    """A cell as JSON: a non-finite number becomes the text ``nan``, ``inf`` or ``-inf``, a shape its text."""
    if isinstance(value, tuple):
        return shape(value)
    return value if not isinstance(value, float) or isfinite(value) else str(value)


def _column(column: Column, rows: Sequence[Any], shown: bool) -> dict[str, Any]:
    cells = [cell(row, column.name) for row in rows]
    values = [plain(value) for value in cells]
    texts = [column.show(value) for value in cells]
    return {
        "key": column.name,
        "title": column.title,
        "number": bool(cells) and all(isinstance(value, (int, float)) for value in cells),
        "shown": shown and set(texts) != {"nan"},
        "worse": column.worse,
        "low": LOW_SQNR if column.unit == "dB" else None,
        "values": values,
        "texts": None if texts == values else texts,
    }
