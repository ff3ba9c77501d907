"""What can be measured in a report of any kind: its numbers, its tables, and in a table the numbers and who has them.

A number of the whole report is a field or property that is declared as a number.  A table is a field of rows.  A
measure is a column of a table, written ``isolated_sqnr`` (of ``rows``) or ``outputs.sqnr``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from math import isnan, nan
from typing import Any, Final, get_args, get_origin, get_type_hints

from pt2qa._bad_cases.report import BadCases
from pt2qa._candidates.report import CandidateReport
from pt2qa._layers.report import LayerReport
from pt2qa._report.base import Report
from pt2qa._report.columns import cell, columns_of, custom_names, row_type_of
from pt2qa._report.formats import shape, unit
from pt2qa._report.ranking import SMALLEST_FIRST
from pt2qa._report.storage import kind_of
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa.errors import ReportError

_KEYS: Final = (
    *("name", "attr", "kind", "role", "argument", "rule"),
    *("property", "model", "metric", "output", "index"),
)
"""The columns that tell rows apart, in the order in which people read them; a row has one or more of them."""

_USUAL: Final[dict[str, tuple[str, ...]]] = {
    "layers": ("isolated_sqnr", "sqnr"),
    "weights": ("worst_channel_sqnr",),
    "sensitivity": ("value",),
    "bad-cases": ("value",),
    "reconfiguration": ("stages.quality",),
    "candidates": ("candidates.sqnr",),
    "findings": ("severity",),
    "annotations": ("dtype",),
    "conformance": ("outcome",),
}
"""By kind of report, the measures that say how good a row is, the one to take where it was measured first."""

_NUMBERS: Final = frozenset({"int", "float", "bool"})
_OF_METRIC: Final = frozenset({"value", "mean"})
_QUALITIES: Final = frozenset({"quality", "measured", "predicted"})

FLAGS: Final = frozenset({"met", "passed"})
"""Numbers of a whole report that are 1 for yes, which is good, and 0 for no."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A column of one of a report's tables."""

    table: str
    column: str

    def __str__(self) -> str:
        return f"{self.table}.{self.column}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What one row says.

    Args:
        key: tells the row from the others of its table.
        name: what people read: its ``name``, or what it has instead.
        role: what else tells it apart, such as ``weight``; empty where the name is enough.
        number: the cell; nan where it is a text, or the row has no number.
        text: the cell as text.
        note: the row's note.
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


def numbers_of(report_type: type[Report]) -> tuple[str, ...]:
    """The names of the numbers that a whole report has: its fields first, then its properties.

    >>> from pt2qa.report import LayerReport
    >>> numbers_of(LayerReport)
    ('batches', 'samples', 'sqnr', 'batches_apart')
    """
    hints = get_type_hints(report_type)
    declared = [f.name for f in fields(report_type) if hints[f.name] in (int, float)]  # type: ignore[arg-type]
    members = dict.fromkeys(name for each in reversed(report_type.__mro__) for name in vars(each))
    return (*declared, *(name for name in members if _is_number(getattr(report_type, name, None))))


def judged_numbers_of(report_type: type[Report]) -> tuple[str, ...]:
    """Those of :func:`numbers_of` that say how good the whole is: SQNR, counts of findings, :data:`FLAGS`.

    >>> from pt2qa.report import Findings
    >>> judged_numbers_of(Findings)
    ('error_count', 'warning_count', 'note_count')
    """
    return tuple(name for name in numbers_of(report_type) if name in FLAGS or name.endswith(("sqnr", "_count")))


def tables_of(report_type: type[Report]) -> tuple[str, ...]:
    """The fields of a report class that hold rows."""
    hints = get_type_hints(report_type)
    return tuple(f.name for f in fields(report_type) if _holds_rows(hints[f.name]))  # type: ignore[arg-type]


def columns_in(reports: Sequence[Report], table: str) -> tuple[str, ...]:
    """The columns of a table, with the user's metrics that each of the reports has."""
    row_type = row_type_of(type(reports[0]), table)
    custom = [custom_names(getattr(report, table)) for report in reports]
    shared = [name for name in custom[0] if all(name in names for names in custom)]
    return (*(column.name for column in columns_of(row_type)), *shared)


def find_measure(reports: Sequence[Report], by: str | None) -> Measure:
    """The measure of this name, or where none is given the usual one of reports of this kind.

    Raises:
        ReportError: there is no such table or column, the kind has no usual measure, or its rows have no name.
    """
    first = type(reports[0])
    kind = kind_of(reports[0]).name
    if by is not None:
        measure = _written(first, reports, by)
    elif kind in _USUAL:
        usual = [_written(first, reports, name) for name in _USUAL[kind]]
        measured = [each for each in usual if all(_is_measured(report, each) for report in reports)]
        measure = next(iter(measured), usual[-1])
    else:
        raise ReportError(
            f"reports of the kind {kind!r} have no measure of their own"
            f"{' (pt2qa.diff_profiles compares their histograms)' if kind == 'profile' else ''}; "
            "name one with by= or --by: "
            f"{', '.join(_all_measures(first, reports)) or 'but they hold no rows'}"
        )
    if not _keys(row_type_of(first, measure.table)):
        raise ReportError(f"the rows of {first.__name__}.{measure.table} have no name, so they cannot be told apart")
    return measure


def usual_measure(report: Report) -> str:
    """The measure that a report has for rows of its kind, as :func:`find_measure` takes it.

    Raises:
        ReportError: its kind has none.
    """
    return str(find_measure((report,), None))


def is_number(report: Report, measure: Measure) -> bool:
    """Whether the cells of a measure are numbers; yes and no are 1 and 0."""
    return _type_of(report, measure) in _NUMBERS


def is_ordered(report: Report, measure: Measure) -> bool:
    """Whether its cells can be better or worse; texts, shapes, yes and no are equal or not, and no more."""
    return is_number(report, measure) and _type_of(report, measure) != "bool"


def readings(report: Report, measure: Measure) -> tuple[Reading, ...]:
    """What each row of a table says, in its order.  Of rows that share their key, the second gets an ordinal."""
    keys = _keys(row_type_of(type(report), measure.table))
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for row in getattr(report, measure.table):
        key = tuple(str(cell(row, column)) for column in keys)
        seen[key] = ordinal = seen.get(key, 0) + 1
        if "name" in keys:
            name, role = key[0], ", ".join(key[1:])
        else:
            name, role = "/".join(key), ""
        value = cell(row, measure.column)
        number = float(value) if isinstance(value, (int, float)) else nan
        text = shape(value) if isinstance(value, tuple) else str(value)
        found.append(Reading((*key, str(ordinal)), name, role, number, text, str(getattr(row, "note", ""))))
    return tuple(found)


def smaller_is_worse(report: Report, column: str, key: tuple[str, ...] = ()) -> bool | None:
    """Whether small values of a column, or of a number of the whole report, are the bad ones.

    They are for SQNR, cosine, range use and the quality of a reconfiguration; large ones for errors and all else.
    Sensitivity reports and bad cases say it of their metrics themselves, as layer reports do of the user's.  None where
    a user's metric does not say.

    Args:
        report: it.
        column: the column or number.
        key: of the row, since each ranking of bad cases has a metric of its own.
    """
    if isinstance(report, SensitivityReport) and column in _OF_METRIC:
        return report.worst_is == "smallest"
    if isinstance(report, BadCases) and column in _OF_METRIC:
        return any(ranking.worst == "smallest" for ranking in report.rankings if (ranking.metric,) == key[:1])
    if isinstance(report, LayerReport) and column in custom_names(report.rows + report.outputs + report.modules):
        return True if column in report.smaller_is_worse else False if column in report.larger_is_worse else None
    return column in SMALLEST_FIRST | _QUALITIES | FLAGS or unit_of(report, column) == "dB"


def unit_of(report: Report, column: str) -> str:
    """``dB``, or empty."""
    if isinstance(report, SensitivityReport) and column in _OF_METRIC:
        return "dB" if report.metric == "sqnr" else ""
    if isinstance(report, BadCases) and column in _OF_METRIC:
        return "dB" if {ranking.metric for ranking in report.rankings} == {"sqnr"} else ""
    if isinstance(report, CandidateReport) and column in custom_names(report.rows):
        return "dB"
    return unit(column)


def check_name(what: str, name: str, names: Iterable[str], hint: str = "") -> None:
    """Refuse a name that is not among those known.

    Raises:
        ReportError: says what has no such name, the nearest one, and all.
    """
    known = tuple(names)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ReportError(f"{what} {name!r}: {meant}{hint}expected {', '.join(known) or 'nothing: there is none'}")


def _written(first: type[Report], reports: Sequence[Report], by: str) -> Measure:
    table, _, column = by.rpartition(".")
    measure = Measure(table or "rows", column)
    check_name(f"{first.__name__} has no table", measure.table, tables_of(first))
    names = columns_in(reports, measure.table)
    check_name(f"{first.__name__}.{measure.table} has no column", measure.column, names)
    return measure


def _all_measures(first: type[Report], reports: Sequence[Report]) -> list[str]:
    return [
        column if table == "rows" else f"{table}.{column}"
        for table in tables_of(first)
        for column in columns_in(reports, table)
    ]


def _is_measured(report: Report, measure: Measure) -> bool:
    return any(not isnan(reading.number) for reading in readings(report, measure))


def _type_of(report: Report, measure: Measure) -> str:
    types = {column.name: column.type for column in columns_of(row_type_of(type(report), measure.table))}
    return types.get(measure.column, "float")


def _keys(row_type: type[Any]) -> tuple[str, ...]:
    names = {column.name for column in columns_of(row_type)}
    return tuple(name for name in _KEYS if name in names)


def _is_number(member: object) -> bool:
    if not isinstance(member, property) or member.fget is None:
        return False
    # Read as written: resolving the types of all properties would import what only some of them return.
    returned = member.fget.__annotations__.get("return")
    return getattr(returned, "__name__", returned) in _NUMBERS


def _holds_rows(hint: Any) -> bool:
    return get_origin(hint) is tuple and is_dataclass(get_args(hint)[0])
