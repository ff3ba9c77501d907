"""Candidates as text: the whole models first, then layer by layer with a column for each."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Final

from pt2qa._report.columns import custom_names
from pt2qa._report.formats import decibel, number, whole
from pt2qa._report.prose import counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.set_apart import about_set_apart, apart_entries
from pt2qa._report.table import View, table

if TYPE_CHECKING:
    from pt2qa._candidates.report import Candidate, CandidateReport, CandidateRow

CLOSE: Final = 0.5
"""Up to this difference, in dB, two candidates count as equally good: another calibration set changes as much."""


def candidates_text(report: CandidateReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    # Best first; candidates that failed have no number and come last.
    able = sorted(report.candidates, key=lambda candidate: (isnan(candidate.sqnr), -candidate.sqnr))
    data = f"{counted(report.batches, 'batch', 'batches')} ({counted(report.samples, 'sample')})"
    return sections(
        [
            wrap(f"{report.model}: {counted(len(able), 'candidate')} on {data}, the best first", width, indent="  "),
            table(_WHOLE, able, None, None, width),
            wrap("SQNR in dB at each layer, cumulative, the worst first" if sort == "worst" else "", width),
            candidates_table(report, sort, limit, width),
            listed(f"Set apart ({len(report.set_apart)})", apart_entries(report.set_apart), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in candidates_summary(report)),
        ]
    )


def candidates_table(report: CandidateReport, sort: str, limit: int | None, width: int) -> str:
    """The rows with a column for each candidate, and below it what it leaves out."""
    from pt2qa._candidates.report import CandidateRow

    rows: tuple[CandidateRow, ...] = tuple(report.rows)
    if sort == "worst":
        rows = tuple(sorted(rows, key=report.worst_of))
    elif sort in custom_names(rows):
        # The user named the column, so the name does not say that small is bad.
        rows = tuple(sorted(rows, key=lambda row: (isnan(row.custom[sort]), row.custom[sort])))
    elif sort != "graph":
        rows = ranked(CandidateRow, rows, sort, ties="handle")
    views = [View("name", "name", str, 0, shrinks_to=20), View("op", "op", str, 1, shrinks_to=10)]
    views += [View(name, name, decibel, 5) for name in custom_names(rows)]
    return table(views, rows, None, limit, width)


def candidates_summary(report: CandidateReport) -> list[str]:
    """Which candidate to choose, in sentences that state their thresholds."""
    best = report.best
    failed = {candidate.name: candidate.note for candidate in report.candidates if candidate.note}
    # Candidates that fail on a batch come first, those that never ran come last.
    ran = dict.fromkeys(each.candidate for each in report.set_apart if each.candidate)
    loud = [f"{name} fails {failed[name]}." for name in ran if name in failed]
    quiet = [f"{name} failed: {note}" for name, note in failed.items() if name not in ran]
    shared = about_set_apart([each for each in report.set_apart if not each.candidate], report.batches)
    if best is None:
        nothing = "No candidate has an SQNR at the output." if report.rows else "No candidate could be run."
        return [*loud, *shared, nothing, *quiet]
    lines = [*loud, *shared, f"Most accurate: {best.name}, {decibel(best.sqnr)} dB at the output, {_size(best)}."]
    near = [other for other in report.candidates if other is not best and best.sqnr - other.sqnr <= CLOSE]
    for other in near:
        lines.append(f"{other.name} is within {CLOSE:g} dB of it ({decibel(other.sqnr)} dB), {_size(other)}.")
    return [*lines, *quiet]


def _size(candidate: Candidate) -> str:
    return f"{candidate.quantized_ops} of {candidate.ops} convs, linears and the like quantized"


def _megabytes(size: int) -> str:
    return number(size / 1e6)


_WHOLE: Final = (
    View("name", "candidate", str, 0, shrinks_to=16),
    View("quantizer", "quantizer", str, 1, shrinks_to=16),
    View("sqnr", "SQNR\ndB", decibel, 0),
    View("quantized_ops", "int8\nops", whole, 6),
    View("ops", "of", whole, 5),
    View("activations", "activation\nsites", whole, 3),
    View("weights", "weight\nsites", whole, 4),
    View("bytes", "weights\nMB", _megabytes, 7),
)
