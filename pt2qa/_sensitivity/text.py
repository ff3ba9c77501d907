"""A sensitivity report as text: the sites that cost most, and whether their errors add up to the whole."""

from __future__ import annotations

from math import inf, isnan
from typing import TYPE_CHECKING, Any, Final

from pt2qa._report.formats import decibel, number, share, whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import ranked, without_number
from pt2qa._report.set_apart import about_set_apart, apart_entries
from pt2qa._report.table import View, table, with_column
from pt2qa._sensitivity.rows import SensitivityRow

if TYPE_CHECKING:
    from pt2qa._sensitivity.report import SensitivityReport

ADDS_UP: Final = 1.0
"""dB between predicted and measured SQNR up to which errors are said to add up."""

ROUGHLY: Final = 3.0
"""dB up to which they are said to add up roughly."""

HALF: Final = 0.5
"""Share of the noise that the summary counts sites for."""


def sensitivity_text(report: SensitivityReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            wrap(_verdict(report), width, indent="  "),
            sensitivity_table(report, sort, limit, width),
            listed(f"Set apart ({len(report.set_apart)})", apart_entries(report.set_apart), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in sensitivity_summary(report)),
        ]
    )


def sensitivity_table(report: SensitivityReport, sort: str, limit: int | None, width: int) -> str:
    """The rows as a table, and below it what it leaves out."""
    # The rank knows which values of this metric are the worst.
    by = "rank" if sort in {"worst", "value"} else sort
    rows = tuple(report.rows) if sort == "graph" else ranked(SensitivityRow, report.rows, by, ties="rank")
    views = _views(report)
    if sort not in {"worst", "graph", "value"}:
        views = with_column(SensitivityRow, views, sort)
    return table(views, rows, {"worst": "value", "graph": None}.get(sort, sort), limit, width)


def sensitivity_summary(report: SensitivityReport) -> list[str]:
    """What to look at, in sentences that state their thresholds."""
    found = [_about_missing(report), _about_worst(report), _about_share(report), _about_ties(report), _counts(report)]
    apart = about_set_apart(report.set_apart, report.batches + len(report.set_apart))
    return [*apart, *(sentence for sentence in found if sentence)]


def _views(report: SensitivityReport) -> tuple[View, ...]:
    in_decibels = report.metric == "sqnr"
    show = decibel if in_decibels else number
    return (
        View("rank", "rank", whole, 5),
        View("near_tie", "", _tie, 4),
        View("name", "name", str, 0, shrinks_to=24),
        View("kind", "kind", str, 6),
        View("op", "op", str, 1, shrinks_to=12),
        View("dtype", "dtype", str, 2),
        View("value", "SQNR\ndB" if in_decibels else report.metric[:20], show, 0),
        View("error", "± dB" if in_decibels else "±", _error if report.projections else _absent, 3),
        View("noise_share", "noise\n%", share, 7),
        View("flops_share", "flops\n%", share, 3),
    )


def _tie(near: bool) -> str:
    return "≈" if near else ""


def _error(sigma: float) -> str:
    return number(sigma) if sigma in (0.0, inf) or isnan(sigma) else f"{sigma:.1g}"


def _absent(sigma: Any) -> str:
    """What the table leaves out: nothing was sampled."""
    return "nan"


def _title(report: SensitivityReport, sort: str) -> str:
    how = {"worst": f"{report.worst_is} {report.metric} first", "graph": "in graph order"}.get(sort, f"by {sort}")
    data = f"{counted(report.batches, 'batch', 'batches')} ({counted(report.samples, 'sample')})"
    by = f"{report.method} method"
    if report.projections:
        by += f", {counted(report.projections, 'projection')}"
    rows = counted(len(report.rows), report.group)
    return f"{report.model}, quantized by {report.quantizer}: {rows}, each quantized alone; {by}, {data}, {how}"


def _verdict(report: SensitivityReport) -> str:
    measured, predicted = report.measured_sqnr, report.predicted_sqnr
    whole_model = f"The quantized model has an output SQNR of {decibel(measured)} dB"
    if len(report.rows) < report.planned:
        return f"{whole_model}; {report.planned - len(report.rows)} of {report.planned} rows are missing."
    if isnan(measured) or isnan(predicted):
        return f"{whole_model}; the noise of the rows adds up to {decibel(predicted)} dB."
    adds = f"{whole_model}; the noise of the rows adds up to {decibel(predicted)} dB"
    # Of two infinities the difference is nan: nothing to tell.
    gap = 0.0 if measured == predicted else abs(predicted - measured)
    if gap <= ADDS_UP:
        return f"{adds}: errors add up, within {ADDS_UP:g} dB."
    if gap <= ROUGHLY:
        return f"{adds}: errors add up roughly, within {ROUGHLY:g} dB."
    if predicted < measured:
        return f"{adds}: errors do not add up, they cancel or saturate together; take the rows as a ranking."
    return f"{adds}: errors do not add up, they are worse together; take the rows as a ranking."


def _about_missing(report: SensitivityReport) -> str:
    missing = without_number(report.rows, "value")
    if not missing:
        return ""
    names = ", ".join(row.name for row in missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return f"Not ranked, as with them alone quantized the output gives no number: {names}."


def _about_worst(report: SensitivityReport) -> str:
    worst = next(iter(report.worst(1)), None)
    if worst is None:
        return "No row was measured."
    shown = f"{decibel(worst.value)} dB" if report.metric == "sqnr" else f"{report.metric} {number(worst.value)}"
    return f"Worst: {worst.name} ({worst.kind}), {shown} when it alone is quantized."


def _about_share(report: SensitivityReport) -> str:
    rows = sorted(report.rows, key=lambda row: -row.noise_share)
    total, count = 0.0, 0
    for row in rows:
        if total >= HALF or isnan(row.noise_share):
            break
        total, count = total + row.noise_share, count + 1
    if not count:
        return ""
    flops = sum(row.flops_share for row in rows[:count] if row.kind == "weight" or report.group != "site")
    kept = f", with {share(flops)} % of the flops" if flops else ""
    return f"{counted(count, report.group)} of {len(rows)} {_make(count)} {share(total)} % of the noise{kept}."


def _make(count: int) -> str:
    return "makes" if count == 1 else "make"


def _about_ties(report: SensitivityReport) -> str:
    near = sum(row.near_tie for row in report.rows)
    if not near or not report.projections:
        return ""
    return f"{counted(near, 'row')} marked ≈: a neighbour's rank is within the sampling error; more projections tell."


def _counts(report: SensitivityReport) -> str:
    missing = len(without_number(report.rows, "value"))
    silent = sum(row.noise == 0.0 for row in report.rows)
    return (
        f"Counts: {silent} without effect on the output, {counted(missing, 'row')} without a number, "
        f"{counted(len(report.notes), 'note')}."
    )
