"""Checking a report against a requirement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import getdoc
from math import isnan

from pt2qa._report.base import Report, check_name
from pt2qa._report.columns import tables_of
from pt2qa._report.formats import exact
from pt2qa._report.gating.checks import GateCheck, Item, check_of, limit_text
from pt2qa._report.gating.requirement import Requirement
from pt2qa._report.measures import Measure, Reading, is_number, names_in, readings
from pt2qa._report.prose import few
from pt2qa.errors import ReportError, SelectionError


def required(report: Report, requirement: Requirement) -> GateCheck:
    """Whether a report meets a requirement.

    Raises:
        ReportError: there is no such number, table or column; it is text; or it is not in dB but the requirement is.
        SelectionError: the pattern matches no row.
    """
    dotted = f"{requirement.table}.{requirement.metric}"
    if requirement.table not in tables_of(type(report)) and dotted in names_in([report], "rows"):
        requirement = replace(requirement, table="", metric=dotted)
    table = requirement.table or ("rows" if requirement.pattern else _table_of(report, requirement.metric))
    known = (
        {each.name: each for each in report.columns(table)} if table in tables_of(type(report)) else report.numbers()
    )
    unit = known[requirement.metric].unit if requirement.metric in known else ""
    if requirement.unit not in ("", unit):
        raise ReportError(f"{requirement.subject} is not in {requirement.unit}: leave the unit out")
    limit = f"{requirement.sign} {limit_text(requirement.value, unit)}"
    return _of_rows(report, requirement, table, limit, unit) if table else _of_report(report, requirement, limit, unit)


def _table_of(report: Report, metric: str) -> str:
    """The outputs, if the number of the whole report is its worst output's; else empty.

    An output without a number must not hide behind the others.
    """
    of_outputs = "outputs" in tables_of(type(report)) and metric in names_in([report], "outputs")
    return "outputs" if of_outputs and metric in report.numbers() else ""


def _of_report(report: Report, requirement: Requirement, limit: str, unit: str) -> GateCheck:
    kind, metric = type(report), requirement.metric
    in_rows = metric in names_in([report], "rows")
    hint = f"for each row write 'rows.{metric}'; " if in_rows else ""
    check_name(f"a {kind.__name__} has no number", metric, report.numbers(), hint)
    value = float(getattr(report, metric))
    why = (" ".join((getdoc(getattr(kind, metric)) or "").split()),) if isnan(value) else ()
    return GateCheck(requirement.subject, limit, value, unit, requirement.holds(value), 0, why)


def _of_rows(report: Report, requirement: Requirement, table: str, limit: str, unit: str) -> GateCheck:
    kind, metric = type(report), requirement.metric
    check_name(f"a {kind.__name__} has no table", table, tables_of(kind))
    check_name(f"{kind.__name__}.{table} has no column", metric, names_in([report], table))
    measure = Measure(table, metric)
    if not is_number(report, measure):
        raise ReportError(f"{requirement.subject}: the column {metric!r} holds text, expected one of numbers")
    items = [_item(each, requirement, unit) for each in _chosen(readings(report, measure), requirement)]
    return check_of(requirement.subject, limit, unit, items, nothing=f"the report has no {table}")


def _chosen(rows: Sequence[Reading], requirement: Requirement) -> list[Reading]:
    chosen = [each for each in rows if requirement.matches(each.name)]
    if rows and not chosen:
        names = few(list(dict.fromkeys(each.name for each in rows)))
        pattern = requirement.pattern
        raise SelectionError(
            f"{requirement.subject}: the pattern {pattern!r} matches none of the rows, which are {names}"
        )
    return chosen


def _item(reading: Reading, requirement: Requirement, unit: str) -> Item:
    number = reading.number
    good = requirement.holds(number)
    if requirement.sign == "==":
        badness = 0.0 if good else abs(number - requirement.value)
    else:
        badness = number if requirement.sign.startswith("<") else -number
    shown = f"no number ({reading.note or 'nan'})" if isnan(number) else exact(number, unit)
    return Item(reading.place, number, good, badness, shown)
