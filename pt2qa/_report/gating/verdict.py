"""Whether a report meets its requirements: numbers against limits, and against an older report."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import getdoc
from math import inf, isnan, nan
from typing import Final

from pt2qa._grouping import grouped
from pt2qa._report.base import Report, check_name
from pt2qa._report.diff import Measure, Reading, diff, find_measure, names_in, readings
from pt2qa._report.diff_report import DiffRow, ReportDiff
from pt2qa._report.gating.result import GateCheck, GateResult, Item, check_of, limit_text
from pt2qa._report.prose import counted, exact, few
from pt2qa._report.rows import tables_of
from pt2qa._report.set_apart import SetApart, apart_entries, failures
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError, SelectionError

_CONDITIONS: Final = {
    "fingerprint": "the baseline was made from another float model",
    "model": "the baseline was made from another class of model",
    "quantizer": "the baseline was made with another quantizer",
    "batches": "the baseline used another amount of data",
    "samples": "the baseline used another amount of data",
    "steps": "the baseline used another amount of data",
    "batches_apart": "the numbers come from other batches than the baseline's",
    "method": "the baseline was made by another method",
    "basis": "the baseline was taken at another stage",
    "group": "the baseline groups its rows differently",
}
"""What should be equal, by name of :class:`Change`, and what to say if it is not."""


def gate(
    report: Report,
    *,
    require: str | Sequence[str] = (),
    baseline: Report | None = None,
    max_drop: float | None = None,
    by: str | None = None,
) -> GateResult:
    """Check a report against requirements, and against an older report of the same kind.

    A missing number (nan) meets no requirement, and no gate passes a report with a batch on which quantization alone
    produces NaN or infinities; other batches excluded from its numbers give a warning.

    Against a baseline the drop is how much worse a number got, for SQNR ``before - after`` in dB.  The gate checks
    the numbers of the whole report, such as the SQNR of each output, and for each row the measure that
    :func:`pt2qa.diff` uses.  A number that the baseline has and the report lacks is a miss; rows that only one of
    them has, and rows without a number in both, are noted.  A report that judges nothing, such as one of annotations,
    is compared place by place: any change is a miss, whatever ``max_drop`` is.  A gate without a check never passes.

    Args:
        report: what to check.
        require: ``sqnr>=20`` for a number of the whole report (each output, if it is the outputs' number),
            ``rows.isolated_sqnr>=10`` for every row, ``layer1.*:sqnr>=15`` for the rows with matching names.
        baseline: an older report of the same kind.
        max_drop: how much worse a number may be than in the baseline, in its own unit.
        by: the measure of the rows that is compared with the baseline; None for the one that :func:`pt2qa.diff` uses.

    Returns:
        Each check with what was measured; ``passed`` is true if none was missed.

    Raises:
        SelectionError: a requirement cannot be read, its pattern matches no row, nothing is required, or baseline and
            ``max_drop`` are not given together, or ``by`` without them.
        ReportError: there is no such number, table or column; it is text; it is not in dB but the requirement is;
            the metric of ``by`` does not say which values are worse; or the baseline is of another kind.

    >>> from pt2qa.report import Environment, Findings
    >>> findings = Findings((), (), (), notes=(), quantizer="xnnpack", model="Net", environment=Environment.here(""))
    >>> print(gate(findings, require="error_count == 0"))
    Passed: 1 check (Net, xnnpack, findings).
    <BLANKLINE>
      passed  error_count == 0: 0
    """
    kind = kind_of(report).kind
    texts = (require,) if isinstance(require, str) else tuple(require)
    wanted = [read_requirement(text) for text in texts]
    if not wanted and baseline is None and max_drop is None:
        raise SelectionError("nothing to check: give requirements such as 'sqnr>=20', or a baseline and max_drop.")
    if by is not None and baseline is None:
        raise SelectionError(f"by: got {by!r} without a baseline; it names the column to compare with one.")
    checks = [required(report, each) for each in dict.fromkeys(wanted)]
    left_out: Sequence[SetApart] = getattr(report, "set_apart", ())
    # A failing candidate has no SQNR, and does not keep the other candidates from passing.
    if failed := apart_entries([each for each in failures(left_out) if not each.candidate]):
        what = "batches on which quantization fails"
        checks.append(GateCheck(what, "== 0", float(len(failed)), "", False, 0, (few(failed),)))
    warnings: tuple[str, ...] = ()
    if left_out:
        warnings = (f"{counted(len(left_out), 'batch', 'batches')} set apart: {few(apart_entries(left_out))}",)
    notes: tuple[str, ...] = ()
    if baseline is not None or max_drop is not None:
        if baseline is None or max_drop is None:
            raise SelectionError("give a baseline and max_drop (--max-drop) together.")
        if not 0 <= max_drop < inf:
            raise SelectionError(f"max_drop: got {max_drop}, expected 0 or more, in the unit of what is compared.")
        found = diff(baseline, report, by=by or str(find_measure((baseline,), None)))
        if by is not None and not found.worst_is and found.figures:
            raise ReportError(f"by: {by!r} is text, which is neither better nor worse; name a column of numbers")
        if found.worst_is == "unknown":
            raise ReportError(
                f"by: the metric {by!r} does not say which of its values are worse, so a drop is not defined. "
                "Set its attribute worse = 'smaller' or 'larger' and analyse again, or require a limit, such as "
                f"'rows.{found.measure.rpartition('.')[2]}>=30'"
            )
        checks += _drops(found, max_drop)
        warnings, notes = (*warnings, *_incomparable(found)), tuple(_left_unchecked(found))
    return GateResult(
        checks=tuple(checks),
        warnings=warnings,
        notes=notes,
        kind=kind,
        quantizer=str(getattr(report, "quantizer", "")),
        model=str(getattr(report, "model", "")),
    )


def _drops(found: ReportDiff, max_drop: float) -> Iterator[GateCheck]:
    """Checks that nothing got worse by more than ``max_drop``: the numbers of the whole report, then the rows."""
    yield from (_figure(row, max_drop) for row in found.figures if not row.role)
    for name, rows in grouped((row.role, row) for row in found.figures if row.role).items():
        yield _table(f"outputs.{name}", rows[0].unit, rows, max_drop)
    if found.worst_is:
        yield _table(found.measure, found.unit, found.rows, max_drop)
    elif not found.figures:
        yield _changes(found)


def _changes(found: ReportDiff) -> GateCheck:
    """That no text of a report that judges nothing has changed: of two specs, say, none is the better one."""
    changed = [row for row in found.rows if row.status != "unchanged"]
    where = [f"{row.place}: {row.status}{row.note and f', {row.note}'}" for row in changed]
    passed, measured = bool(found.rows) and not changed, float(len(changed)) if found.rows else nan
    none = f"{counted(len(found.rows), 'row')} unchanged" if found.rows else "neither report has a row"
    return GateCheck(f"changes of {found.measure}", "== 0", measured, "", passed, len(changed), (*where,) or (none,))


def _incomparable(found: ReportDiff) -> Iterator[str]:
    for change in found.changes:
        if change.name in _CONDITIONS:
            yield f"{_CONDITIONS[change.name]}: {change.name} {change.before}, now {change.after}"
    yield from _alone(found, "gone", " of the baseline")


def _left_unchecked(found: ReportDiff) -> Iterator[str]:
    """What the checks leave out: new rows, rows without a number, and other differences."""
    rows = (*found.figures, *found.rows)
    yield from _alone(found, "new", "")
    silent = [f"{row.place} ({row.note})" for row in rows if row.is_silent and row.note]
    if found.worst_is and silent:
        yield f"{counted(len(silent), 'row')} not compared: {few(silent)}"
    differ = [change for change in found.changes if change.name not in _CONDITIONS]
    yield from (f"{change.name}: {change.before}, now {change.after}" for change in differ)
    yield from found.notes


def _alone(found: ReportDiff, status: str, whose: str) -> Iterator[str]:
    if names := [row.place for row in (*found.figures, *found.rows) if row.status == status]:
        yield f"{counted(len(names), 'row')}{whose} {'is' if len(names) == 1 else 'are'} {status}: {few(names)}"


def _figure(row: DiffRow, max_drop: float) -> GateCheck:
    # Yes or no, such as whether a target is met: any drop counts.
    allowed = 0.0 if row.name in ("met", "passed") else max_drop
    limit, where = f"<= {limit_text(allowed, row.unit)}", row.note or _change(row, row.unit)
    return GateCheck(f"drop of {row.name}", limit, row.loss, row.unit, _is_kept(row, allowed), 0, (where,))


def _table(measure: str, unit_of_rows: str, rows: Sequence[DiffRow], max_drop: float) -> GateCheck:
    def place_of(row: DiffRow) -> str:
        return row.place if row.role != measure.rpartition(".")[2] else row.name

    items = []
    for row in rows:
        if row.status not in {"new", "gone"} and not row.is_silent:
            shown = row.note or f"{exact(row.loss, unit_of_rows)}, {_change(row, unit_of_rows)}"
            items.append(Item(place_of(row), row.loss, _is_kept(row, max_drop), badness=row.loss, shown=shown))
    if measure.startswith("outputs."):
        # A layer may be renamed or fused; an output of the baseline must not go missing.
        gone = [place_of(row) for row in rows if row.status == "gone"]
        items += [Item(place, nan, good=False, badness=inf, shown="is gone") for place in gone]
    limit = f"<= {limit_text(max_drop, unit_of_rows)}"
    return check_of(f"drop of {measure}", limit, unit_of_rows, items, nothing="no row has a number in both reports")


def _change(row: DiffRow, unit_of_row: str) -> str:
    return f"from {exact(row.before)} to {exact(row.after, unit_of_row)}"


def _is_kept(row: DiffRow, max_drop: float) -> bool:
    """A number that appears is good; one that disappears is not."""
    came = isnan(row.before) and not isnan(row.after)
    return came or row.loss <= max_drop


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
    """A limit on a number, in the parts of the grammar of :func:`read_requirement`; those not written are empty."""

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

    Requirements are as users write them: ``sqnr>=20``, ``rows.isolated_sqnr>=10``, ``layer1.*:sqnr>=15``.  The grammar;
    brackets mark optional parts, and spaces are allowed between parts::

        [PATTERN:][TABLE.]METRIC SIGN NUMBER [dB]        SIGN is >=, >, <=, < or ==

    Without pattern and table the metric is a number of the whole report.  A table is a field of the report that holds
    rows (``rows``, ``outputs``); each of its rows must meet the requirement.  A pattern selects rows by name, with
    ``*`` for any text, in the table ``rows`` if none is given.

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
