"""Requirements as users write them: ``sqnr>=20``, ``rows.isolated_sqnr>=10``, ``layer1.*:sqnr>=15``.

The grammar; brackets mark optional parts, and spaces are allowed between parts::

    [PATTERN:][TABLE.]METRIC SIGN NUMBER [dB]        SIGN is >=, >, <=, < or ==

Without pattern and table the metric is a number of the whole report.  A table is a field of the report that holds rows
(``rows``, ``outputs``); each of its rows must meet the requirement.  A pattern selects rows by name, with ``*`` for
any text, in the table ``rows`` if none is given.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import getdoc
from math import isnan
from typing import Final

from pt2qa._report.base import Report, check_name
from pt2qa._report.columns import tables_of
from pt2qa._report.diff import Measure, Reading, names_in, readings
from pt2qa._report.gating.result import GateCheck, Item, check_of, limit_text
from pt2qa._report.prose import exact, few
from pt2qa.errors import ReportError, SelectionError

_SIGNS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_TEXT: Final = re.compile(
    r"\s*((?P<pattern>\S|\S.*\S)\s*:\s*)?"
    r"((?P<table>[^\W\d]\w*)\.)?(?P<metric>[^\W\d][\w-]*(\.[\w-]+)*)"
    rf"\s*(?P<sign>{'|'.join(_SIGNS)})"
    r"\s*(?P<value>[-+]?(inf|\d+(\.\d+)?([eE][-+]?\d+)?))\s*(?P<unit>dB)?\s*"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A limit on a number, in the parts of the grammar above; those that were not written are empty."""

    metric: str
    sign: str
    value: float
    unit: str = ""
    table: str = ""
    pattern: str = ""

    @property
    def subject(self) -> str:
        """The part left of the sign, as written.

        >>> read_requirement("layer1.*: sqnr >= 15").subject
        'layer1.*:sqnr'
        """
        table = f"{self.table}." if self.table else ""
        return f"{self.pattern}:{table}{self.metric}" if self.pattern else f"{table}{self.metric}"

    def holds(self, number: float) -> bool:
        """Whether a number meets the requirement; nan never does."""
        return _SIGNS[self.sign](number, self.value)

    def matches(self, name: str) -> bool:
        """Whether the requirement applies to the row of this name.

        >>> read_requirement("layer1.*:sqnr>=15").matches("layer1.0.conv1/conv2d")
        True
        """
        pattern = ".*".join(map(re.escape, self.pattern.split("*")))
        return not self.pattern or re.fullmatch(pattern, name, re.DOTALL) is not None


def parsed(text: str) -> Requirement | None:
    """The requirement in a text; None if it is not one.

    >>> parsed("sqnr >= 30 dB")
    Requirement(metric='sqnr', sign='>=', value=30.0, unit='dB', table='', pattern='')
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    optional = {name: found[name] or "" for name in ("unit", "table", "pattern")}
    return Requirement(found["metric"], found["sign"], float(found["value"]), **optional)


def read_requirement(text: str) -> Requirement:
    """The requirement in a text.

    >>> read_requirement("sqnr=>30")
    Traceback (most recent call last):
    pt2qa.errors.SelectionError: requirement: got 'sqnr=>30', expected a metric, one of >= <= == > <, and a number, ...
    """
    requirement = parsed(text)
    if requirement is None:
        raise SelectionError(
            f"requirement: got {text!r}, expected a metric, one of {' '.join(_SIGNS)}, and a number, "
            "such as 'sqnr>=20', 'rows.isolated_sqnr>=10' or 'layer1.*:sqnr>=15'."
        )
    return requirement


def required(report: Report, requirement: Requirement) -> GateCheck:
    """Whether a report meets a requirement."""
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
    if measure.of(report).type not in ("int", "float", "bool"):
        raise ReportError(f"{requirement.subject}: the column {metric!r} holds text, expected numbers")
    rows, pattern = readings(report, measure), requirement.pattern
    items = [_item(each, requirement, unit) for each in rows if requirement.matches(each.name)]
    if rows and not items:
        names = few(list(dict.fromkeys(each.name for each in rows)))
        raise SelectionError(f"{requirement.subject}: the pattern {pattern!r} matches no row; the rows are {names}")
    return check_of(requirement.subject, limit, unit, items, nothing=f"the report has no {table}")


def _item(reading: Reading, requirement: Requirement, unit: str) -> Item:
    number = reading.number
    good = requirement.holds(number)
    if requirement.sign == "==":
        badness = 0.0 if good else abs(number - requirement.value)
    else:
        badness = number if requirement.sign.startswith("<") else -number
    shown = f"no number ({reading.note or 'nan'})" if isnan(number) else exact(number, unit)
    return Item(reading.place, number, good, badness, shown)
