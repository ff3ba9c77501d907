"""Whether a report meets its requirements: numbers against limits, and against an older report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan, nan
from typing import Final

from pt2qa._report.base import Report
from pt2qa._report.diff import diff, find_measure
from pt2qa._report.diff_report import DiffRow, ReportDiff
from pt2qa._report.gating.requirement import read_requirement, required
from pt2qa._report.gating.result import GateCheck, GateResult, Item, check_of, limit_text
from pt2qa._report.prose import counted, exact, few
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
    outputs: dict[str, list[DiffRow]] = {}
    for row in found.figures:
        if row.role:
            outputs.setdefault(row.role, []).append(row)
        else:
            yield _figure(row, max_drop)
    for name, rows in outputs.items():
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
    """Why the two reports may not be comparable."""
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
    return GateCheck(
        what=f"drop of {row.name}",
        limit=f"<= {limit_text(allowed, row.unit)}",
        measured=row.loss,
        unit=row.unit,
        passed=_is_kept(row, allowed),
        rows=0,
        where=(row.note or _change(row, row.unit),),
    )


def _table(measure: str, unit_of_rows: str, rows: Sequence[DiffRow], max_drop: float) -> GateCheck:
    def place_of(row: DiffRow) -> str:
        return row.place if row.role != measure.rpartition(".")[2] else row.name

    items = [
        Item(
            place=place_of(row),
            number=row.loss,
            good=_is_kept(row, max_drop),
            badness=row.loss,
            shown=row.note or f"{exact(row.loss, unit_of_rows)}, {_change(row, unit_of_rows)}",
        )
        for row in rows
        if row.status not in {"new", "gone"} and not row.is_silent
    ]
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
