"""A report compared with an older one: what got worse than allowed, and what makes the two hard to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isnan, nan
from typing import Final

from pt2qa._report.diff_report import DiffRow, ReportDiff
from pt2qa._report.formats import exact
from pt2qa._report.gating.checks import GateCheck, Item, check_of, limit_text
from pt2qa._report.prose import counted, few

_CONDITIONS: Final = {
    "fingerprint": "the baseline is of another float model",
    "model": "the baseline is of another class of model",
    "quantizer": "the baseline is of another quantizer",
    "batches": "the baseline is of another amount of data",
    "samples": "the baseline is of another amount of data",
    "steps": "the baseline is of another amount of data",
    "batches_apart": "the numbers are of other batches than the baseline's",
    "method": "the baseline was made by another method",
    "basis": "the baseline was read from another stage",
    "group": "the rows of the baseline stand for something else",
}
"""What should be equal, by name of :class:`Change`, and what to say if it is not."""


def drops(found: ReportDiff, max_drop: float) -> Iterator[GateCheck]:
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
    what, limit = f"changes of {found.measure}", "== 0"
    changed = [row for row in found.rows if row.status != "unchanged"]
    if found.rows and not changed:
        return GateCheck(what, limit, 0.0, "", True, 0, (f"{counted(len(found.rows), 'row')} unchanged",))
    items = [
        Item(row.place, 1.0, good=False, badness=1.0, shown=f"{row.status}, {row.note}" if row.note else row.status)
        for row in changed
    ]
    check = check_of(what, limit, "", items, nothing="neither report has a row")
    return replace(check, measured=float(len(changed))) if changed else check


def incomparable(found: ReportDiff) -> Iterator[str]:
    """Why the two reports may not be comparable."""
    for change in found.changes:
        if change.name in _CONDITIONS:
            yield f"{_CONDITIONS[change.name]}: {change.name} {change.before}, now {change.after}"
    yield from _alone(found, "gone", " of the baseline")


def left_unchecked(found: ReportDiff) -> Iterator[str]:
    """What the checks leave out: new rows, rows without a number, and other differences."""
    rows = (*found.figures, *found.rows)
    yield from _alone(found, "new", "")
    silent = [f"{row.place} ({row.note})" for row in rows if _is_silent(row) and row.note]
    if found.worst_is and silent:
        yield f"{counted(len(silent), 'row')} not compared: {few(silent)}"
    differ = [change for change in found.changes if change.name not in _CONDITIONS]
    yield from (f"{change.name}: {change.before}, now {change.after}" for change in differ)
    yield from found.notes


def _alone(found: ReportDiff, status: str, whose: str) -> Iterator[str]:
    """The rows that only one of the two reports has."""
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
        if row.status not in {"new", "gone"} and not _is_silent(row)
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


def _is_silent(row: DiffRow) -> bool:
    return isnan(row.before) and isnan(row.after)
