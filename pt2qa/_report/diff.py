"""What changed between two reports of one kind: rows are matched by name, numbers compared within a tolerance.

What is compared is a measure: a column of one of the tables, ``isolated_sqnr`` (of ``rows``) or ``outputs.sqnr``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import inf, isnan, nan
from typing import Any, Final, get_type_hints

from pt2qa._report.base import Report, check_name
from pt2qa._report.diff_report import BuildRow, Change, DiffRow, ReportDiff, Status
from pt2qa._report.prose import counted, few, shorten
from pt2qa._report.rows import Column, Environment, cell, column_called, columns_of, fields_of, tables_of
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError

DECIBELS: Final = 0.1
"""Default tolerance in dB: a different calibration batch changes more."""

_LONGEST: Final = 60


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
    """The cell of one row, as number, nan if it has none, and as text.

    ``key`` identifies the row within its table; ``role`` is what does besides its name, such as ``weight``.
    """

    key: tuple[str, ...]
    name: str
    role: str
    number: float
    text: str
    note: str

    @property
    def place(self) -> str:
        return f"{self.name} ({self.role})" if self.role else self.name


def names_in(reports: Sequence[Report], table: str) -> tuple[str, ...]:
    """The columns of a table that each of the reports has, the user's metrics last."""
    names = [[each.name for each in report.columns(table)] for report in reports]
    fixed = {each.name for each in columns_of(reports[0].row_type(table))}
    custom = {name for name in names[0] if name not in fixed}
    return tuple(name for name in names[0] if name in fixed or (name in custom and all(name in own for own in names)))


def find_measure(reports: Sequence[Report], by: str | None) -> Measure:
    """The measure of this name, or by default the usual one of the reports' kind."""
    kind = kind_of(reports[0]).kind
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


def diff(old: Report, new: Report, *, by: str | None = None, tolerance: float | None = None) -> ReportDiff:
    """What changed from one report to another of the same kind, row by row.

    Rows are matched by name and role, and by order if they share both.  With ``a`` and ``b`` the measure of a row in
    the old and the new report, it is worse if ``a - b > tolerance`` when smaller is worse (SQNR, cosine), and if
    ``b - a > tolerance`` when larger is worse (errors).

    Args:
        old: the report to compare with.
        new: the report to look at.
        by: the measure: a column of the rows, or ``table.column``, such as ``outputs.sqnr``; None for the usual one:
            layers, the isolated SQNR (the SQNR if one report lacks it); weights, the SQNR of the worst channel;
            sensitivity and bad cases, ``value``; a reconfiguration, ``stages.quality``.
        tolerance: change up to which a number counts as unchanged, in its own unit; None for 0.1 dB, or 0 if the
            measure is not in dB.

    Returns:
        One row for each row of either report, and what changed in the whole.

    Raises:
        ReportError: the reports are of different kinds or measure different things; there is no such measure; the kind
            has no usual one and ``by`` is not given; or the tolerance is negative or nan.

    >>> from pt2qa.report import Environment, WeightReport
    >>> nothing = WeightReport((), (), notes=(), quantizer="xnnpack", model="Net", environment=Environment.here(""))
    >>> diff(nothing, nothing)
    <ReportDiff of weights, Net, xnnpack: 0 worse, 0 better of 0 rows>
    """
    kinds = [kind_of(report).kind for report in (old, new)]
    if kinds[0] != kinds[1]:
        raise ReportError(
            f"cannot compare a report of {kinds[0]} with one of {kinds[1]}: give two reports of the same kind"
        )
    metrics = [str(getattr(report, "metric", "")) for report in (old, new)]
    if metrics[0] != metrics[1]:
        raise ReportError(
            f"cannot compare a report by {metrics[0]} with one by {metrics[1]}: give two reports with the same metric"
        )
    if tolerance is not None and not 0 <= tolerance < inf:
        raise ReportError(f"tolerance: got {tolerance}, expected 0 or more, in the unit of what is compared")
    measure = find_measure((old, new), by)
    unit = measure.of(new).unit
    allowed = _tolerance(unit) if tolerance is None else tolerance
    return ReportDiff(
        rows=_diff_rows(old, new, measure, allowed),
        figures=tuple(_figures(old, new, unit, allowed)),
        changes=tuple(_changes(old, new)),
        of=kinds[0],
        measure=str(measure),
        worst_is=_worst_is(old, new, measure),
        unit=unit,
        tolerance=allowed,
        notes=tuple(_notes(old, new, measure)),
        quantizer=str(getattr(new, "quantizer", "")),
        model=str(getattr(new, "model", "")),
        environment=new.environment if hasattr(new, "environment") else Environment.here(""),
    )


def history(reports: Mapping[str, Report], *, by: str | None = None, tolerance: float | None = None) -> ReportDiff:
    """What changed over several reports of one kind, oldest first: from build to build, and from the first to the last.

    Args:
        reports: by the name of the build, two or more.
        by: the measure, as for :func:`diff`.
        tolerance: change up to which a number counts as unchanged, as for :func:`diff`.

    Returns:
        The comparison of the first with the last, with a row for each in ``builds``.

    Raises:
        ReportError: as of :func:`diff`, or there are fewer than two reports.
    """
    if len(reports) < 2:
        raise ReportError(f"a history needs two reports or more, got {len(reports)}")
    (first, *_, last), names = reports.values(), list(reports)
    judged = next(((name, column.unit) for name, column in first.numbers().items() if column.judged), ("", ""))
    values = [float(getattr(each, judged[0], nan)) for each in reports.values()]
    builds = [BuildRow(names[0], values[0], nan, 0, 0, "", nan, "", *judged)]
    for name, both, (old, new) in zip(names[1:], pairwise(values), pairwise(reports.values()), strict=True):
        changed = diff(old, new, by=by, tolerance=tolerance)
        worse, better = changed.having("worse"), changed.having("better")
        lost = max(worse, key=lambda row: row.loss, default=None)
        row, loss = ("", nan) if lost is None else (lost.place, lost.loss)
        different = few([f"{each.name} {each.before} → {each.after}" for each in changed.changes])
        moved = _moved(*both)
        builds.append(BuildRow(name, both[1], moved, len(worse), len(better), row, loss, different, *judged))
    return replace(diff(first, last, by=by, tolerance=tolerance), builds=tuple(builds))


def _tolerance(unit: str) -> float:
    return DECIBELS if unit == "dB" else 0.0


def _diff_rows(old: Report, new: Report, measure: Measure, tolerance: float) -> tuple[DiffRow, ...]:
    before, after = ({each.key: each for each in readings(report, measure)} for report in (old, new))
    ordered = measure.of(new).is_ordered
    rows = []
    for key in _in_order(list(before), list(after)):
        a, b = before.get(key), after.get(key)
        if a is None or b is None:
            rows.append(_alone(a, b, ordered))
        elif not ordered:
            same = a.text == b.text
            note = b.text if same else f"{a.text or 'nothing'} → {b.text or 'nothing'}"
            rows.append(DiffRow(b.name, b.role, "unchanged" if same else "changed", note=note))
        else:
            ways = (smaller_is_worse(report, measure, key) for report in (new, old))
            smaller = next((way for way in ways if way is not None), None)
            rows.append(_compared(a, b, smaller, tolerance))
    return tuple(rows)


def _in_order(old: Sequence[tuple[str, ...]], new: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """The new keys in order, each followed by the removed old keys that came after it."""
    kept = set(new)
    gone: dict[tuple[str, ...] | None, list[tuple[str, ...]]] = {}
    last = None
    for key in old:
        if key in kept:
            last = key
        else:
            gone.setdefault(last, []).append(key)
    yield from gone.get(None, ())
    for key in new:
        yield key
        yield from gone.get(key, ())


def _alone(before: Reading | None, after: Reading | None, ordered: bool) -> DiffRow:
    row = before or after
    assert row is not None, "one of the reports has it"
    status: Status = "new" if before is None else "gone"
    if not ordered:
        return DiffRow(row.name, row.role, status, note=row.text)
    a, b = (nan if each is None else each.number for each in (before, after))
    return DiffRow(row.name, row.role, status, a, b, note=row.note)


def _compared(a: Reading, b: Reading, smaller: bool | None, tolerance: float) -> DiffRow:
    """Two numbers, compared; which one is worse follows from the measure's direction, if known."""
    place = b.name, b.role
    numbers = before, after = a.number, b.number
    change = _moved(before, after)
    loss = -change if smaller else change
    if isnan(change):
        lacks = isnan(before), isnan(after)
        when = "before and now" if all(lacks) else "before" if lacks[0] else "now"
        note = f"no number {when}: {(b if lacks[1] else a).note or 'nan'}"
        return DiffRow(*place, "unchanged" if all(lacks) else "changed", *numbers, note=note)
    if smaller is None:
        return DiffRow(*place, "changed" if abs(change) > tolerance else "unchanged", *numbers, change + 0.0)
    status: Status = "worse" if loss > tolerance else "better" if -loss > tolerance else "unchanged"
    return DiffRow(*place, status, *numbers, change + 0.0, loss + 0.0)


def _moved(before: float, after: float) -> float:
    """0 for two equal infinities, whose difference is nan, though nothing changed."""
    return 0.0 if before == after else after - before


def _figures(old: Report, new: Report, unit: str, tolerance: float) -> Iterator[DiffRow]:
    """Numbers of the whole reports; for a number of the outputs, one for each output."""
    outputs = tables_of(type(new)).get("outputs")
    for name, column in new.numbers().items():
        if not column.judged:
            continue
        allowed = tolerance if column.unit == unit else _tolerance(column.unit)
        if outputs is not None and name in {each.name for each in columns_of(outputs)}:
            for row in _diff_rows(old, new, Measure("outputs", name), allowed):
                yield replace(row, role=name, unit=column.unit)
        else:
            a, b = (Reading((), name, "", float(getattr(report, name)), "", "") for report in (old, new))
            yield replace(_compared(a, b, column.worse == "smaller", allowed), unit=column.unit)


def _changes(old: Report, new: Report) -> Iterator[Change]:
    hints, numbers = get_type_hints(type(new)), new.numbers()
    derived = [name for name in numbers if name not in hints]
    for name in (*derived, *(each.name for each in fields_of(type(new)))):
        before, after = getattr(old, name), getattr(new, name)
        judged = name in numbers and numbers[name].judged
        counts = isinstance(after, int) if name in derived else hints[name] in (str, int)
        if counts and not judged and before != after:
            yield Change(name, _shown(before), _shown(after))
        elif hints.get(name) is Environment:
            parts = ((part.name, getattr(before, part.name), getattr(after, part.name)) for part in fields(Environment))
            yield from (Change(part, a or "none", b or "none") for part, a, b in parts if a != b)


def _shown(value: Any) -> str:
    """A short text unchanged; for JSON or code only its size."""
    text = str(value)
    if "\n" in text or text.startswith(("{", "[")):
        return counted(len(text), "character")
    return shorten(text, _LONGEST) or "none"


def _worst_is(old: Report, new: Report, measure: Measure) -> str:
    if not measure.of(new).is_ordered:
        return ""
    pairs = ((report, each.key) for report in (new, old) for each in readings(report, measure))
    ways = {smaller_is_worse(report, measure, key) for report, key in pairs} - {None}
    ways = ways or {smaller_is_worse(new, measure)}
    if ways == {None}:
        return "unknown"
    return "either" if len(ways) > 1 else "smallest" if ways == {True} else "largest"


def _notes(old: Report, new: Report, measure: Measure) -> Iterator[str]:
    every = [each for report in (old, new) for each in readings(report, measure)]
    if shared := list(dict.fromkeys(each.place for each in every if each.key[-1] != "1")):
        yield f"{counted(len(shared), 'name')} shared by several rows, compared in their order: {few(shared)}"
    if measure.table != "rows" and "rows" in tables_of(type(new)):
        first = Measure("rows", columns_of(new.row_type())[0].name)
        before, after = ({each.key: each.place for each in readings(report, first)} for report in (old, new))
        for what, ours, theirs in (("new", after, before), ("gone", before, after)):
            if only := [place for key, place in ours.items() if key not in theirs]:
                yield f"{counted(len(only), 'row')} {what}: {few(only)}"
