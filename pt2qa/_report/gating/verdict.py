"""Whether a report meets its requirements: numbers against limits, and against an older report."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pt2qa._report.base import Report
from pt2qa._report.diff import diff
from pt2qa._report.gating.baseline import drops, incomparable, left_unchecked
from pt2qa._report.gating.checks import GateCheck
from pt2qa._report.gating.required import required
from pt2qa._report.gating.requirement import read_requirement
from pt2qa._report.gating.result import GateResult
from pt2qa._report.measures import usual_measure
from pt2qa._report.prose import counted, few
from pt2qa._report.set_apart import SetApart, apart_entries, failures
from pt2qa._report.storage import kind_of
from pt2qa.errors import ReportError, SelectionError


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
    kind = kind_of(report).name
    texts = (require,) if isinstance(require, str) else tuple(require)
    wanted = [read_requirement(text) for text in texts]
    if not wanted and baseline is None and max_drop is None:
        raise SelectionError("nothing is required: give requirements such as 'sqnr>=20', or a baseline and a drop.")
    if by is not None and baseline is None:
        raise SelectionError(f"by: got {by!r}, which says what to compare with a baseline: give that, too.")
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
            raise SelectionError("a baseline and the largest drop (max_drop, --max-drop) belong together: give both.")
        if not 0 <= max_drop < inf:
            raise SelectionError(f"max_drop: got {max_drop}, expected 0 or more, in the unit of what is compared.")
        found = diff(baseline, report, by=by or usual_measure(baseline))
        if by is not None and not found.worst_is and found.figures:
            raise ReportError(f"by: {by!r} is a text, which has no better and worse; name a column of numbers")
        if found.worst_is == "unknown":
            raise ReportError(
                f"by: the metric {by!r} does not say which of its values are worse, so nothing can be said of a drop. "
                "Give it the attribute worse = 'smaller' or 'larger' and analyse again, or require a limit, such as "
                f"'rows.{found.measure.rpartition('.')[2]}>=30'"
            )
        checks += drops(found, max_drop)
        warnings, notes = (*warnings, *incomparable(found)), tuple(left_unchecked(found))
    return GateResult(
        checks=tuple(checks),
        warnings=warnings,
        notes=notes,
        kind=kind,
        quantizer=str(getattr(report, "quantizer", "")),
        model=str(getattr(report, "model", "")),
    )
