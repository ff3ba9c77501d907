"""Measures of reports of any kind: a column of one of the tables, and the value of each row.

A measure is written ``isolated_sqnr`` (in the table ``rows``) or ``outputs.sqnr``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from pt2qa._report.base import Report, check_name
from pt2qa._report.columns import Column, cell, column_called, columns_of, tables_of
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of one of a report's tables."""

    table: str
    column: str

    def of(self, report: Report) -> Column:
        """The column, as it applies to this report."""
        return report.column(self.column, self.table)

    def __str__(self) -> str:
        return f"{self.table}.{self.column}"


@dataclass(frozen=True, slots=True)
class Reading:
    """The cell of one row, as number and as text.

    Args:
        key: identifies the row within its table.
        role: what identifies it besides its name, such as ``weight``; empty if the name is enough.
        number: nan if the cell is text, or has no number.
    """

    key: tuple[str, ...]
    name: str
    role: str
    number: float
    text: str
    note: str

    @property
    def place(self) -> str:
        """Name and role."""
        return f"{self.name} ({self.role})" if self.role else self.name


def names_in(reports: Sequence[Report], table: str) -> tuple[str, ...]:
    """The columns of a table that each of the reports has, the user's metrics last."""
    names = [[each.name for each in report.columns(table)] for report in reports]
    fixed = {each.name for each in columns_of(reports[0].row_type(table))}
    custom = {name for name in names[0] if name not in fixed}
    return tuple(name for name in names[0] if name in fixed or (name in custom and all(name in own for own in names)))


def find_measure(reports: Sequence[Report], by: str | None) -> Measure:
    """The measure of this name, or by default the usual one of the reports' kind."""
    kind = kind_of(reports[0]).name
    if by is None and not reports[0].usual_measures:
        every = [
            column if table == "rows" else f"{table}.{column}"
            for table in tables_of(type(reports[0]))
            for column in names_in(reports, table)
        ]
        raise ReportError(
            f"reports of the kind {kind!r} have no default measure"
            f"{' (pt2qa.diff_profiles compares their histograms)' if kind == 'profile' else ''}; "
            f"name one with by= or --by: {', '.join(every) or 'but they hold no rows'}"
        )
    usual = [_written(reports, name) for name in ((by,) if by is not None else reports[0].usual_measures)]
    measured = (each for each in usual if all(_is_measured(report, each) for report in reports))
    measure = next(measured, usual[-1])
    if not _keys(reports[0], measure.table):
        where = f"{type(reports[0]).__name__}.{measure.table}"
        raise ReportError(f"the rows of {where} have no name to match them by")
    return measure


def readings(report: Report, measure: Measure) -> tuple[Reading, ...]:
    """The value of each row of a table, in order.  Later rows with the same key get an ordinal."""
    keys, column = _keys(report, measure.table), measure.of(report)
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for row in getattr(report, measure.table):
        key = tuple(str(cell(row, name)) for name in keys)
        seen[key] = ordinal = seen.get(key, 0) + 1
        name, role = (key[0], ", ".join(key[1:])) if "name" in keys else ("/".join(key), "")
        value = cell(row, measure.column)
        number = float(value) if isinstance(value, (int, float)) else nan
        text = column.show(value) if isinstance(value, tuple) else str(value)
        found.append(Reading((*key, str(ordinal)), name, role, number, text, str(getattr(row, "note", ""))))
    return tuple(found)


def smaller_is_worse(report: Report, measure: Measure, key: Sequence[str] = ()) -> bool | None:
    """Whether smaller values of a measure are worse; None if a user's metric does not say."""
    worse = report.meant(measure.of(report), key).worse
    return worse == "smaller" if worse else None


def _written(reports: Sequence[Report], by: str) -> Measure:
    first = type(reports[0])
    # The name of a user's metric may contain dots.
    if by in names_in(reports, "rows"):
        return Measure("rows", by)
    table, column = by.split(".", 1) if "." in by else ("rows", by)
    check_name(f"{first.__name__} has no table", table, tables_of(first))
    measure = Measure(table, column_called(column, reports[0].columns(table)))
    check_name(f"{first.__name__}.{table} has no column", measure.column, names_in(reports, table))
    return measure


def _is_measured(report: Report, measure: Measure) -> bool:
    return any(not isnan(reading.number) for reading in readings(report, measure))


def _keys(report: Report, table: str) -> tuple[str, ...]:
    """The columns that identify rows, the name first."""
    names = [each.name for each in columns_of(report.row_type(table)) if each.key]
    return tuple(sorted(names, key=lambda name: name != "name"))
