"""Batches that are in no number of a report: a miss where quantization is at fault, else a warning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pt2qa._report.base import Report
from pt2qa._report.gating.checks import GateCheck
from pt2qa._report.prose import counted, few
from pt2qa._report.set_apart import SetApart, apart_entries, failures


def finite(report: Report) -> Iterator[GateCheck]:
    """A missed check where quantization alone makes NaN or infinities; none where it does not.

    Of several candidates one that fails has no SQNR, and does not keep the others from passing.
    """
    failed = [each for each in failures(_set_apart(report)) if not each.candidate]
    if failed:
        entries = few(apart_entries(failed))
        yield GateCheck("batches on which quantization fails", "== 0", float(len(failed)), "", False, 0, (entries,))


def left_out(report: Report) -> Iterator[str]:
    """What the numbers do not cover."""
    if found := _set_apart(report):
        yield f"{counted(len(found), 'batch', 'batches')} set apart: {few(apart_entries(found))}"


def _set_apart(report: Report) -> Sequence[SetApart]:
    found: Sequence[SetApart] = getattr(report, "set_apart", ())
    return found
