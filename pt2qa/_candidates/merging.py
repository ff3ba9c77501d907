"""From the sums of each value and candidate to a report: of one run, and of several merged."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pt2qa._candidates.rows import Candidate, CandidateRow
from pt2qa._metrics import NoiseSums
from pt2qa._report.merging import merged_data
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import SetApart
from pt2qa._report.sums import EACH, FIRST, Mergeable, pack, settings_of, unpack
from pt2qa.errors import ReportError


@dataclass(frozen=True, slots=True)
class ValueSums(Mergeable):
    """The sums of one value by candidate, over the batches that count and those set apart; see ``CandidateRow``."""

    handle: int = field(default=-1, metadata=FIRST)
    name: str = field(default="", metadata=FIRST)
    module: str = field(default="", metadata=FIRST)
    op: str = field(default="", metadata=FIRST)
    counted: dict[str, NoiseSums] = field(default_factory=dict, metadata=EACH)
    apart: dict[str, NoiseSums] = field(default_factory=dict, metadata=EACH)

    @property
    def seen(self) -> bool:
        return bool(self.counted or self.apart)

    def add(self, sums: Mapping[str, NoiseSums], left_out: Collection[str]) -> None:
        """Adds those of a batch; ``left_out`` are the candidates for which it is set apart."""
        for name, new in sums.items():
            into = self.apart if name in left_out else self.counted
            into[name] = into.get(name, NoiseSums()).merge(new)

    def of(self, names: Collection[str]) -> ValueSums:
        """Those of some candidates, empty ones included."""
        counted, apart = ({name: own.get(name, NoiseSums()) for name in names} for own in (self.counted, self.apart))
        return replace(self, counted=counted, apart=apart)

    def row(self) -> CandidateRow:
        """The row; if no batch counts for a candidate, it has the SQNR of those set apart rather than nothing."""
        nothing = NoiseSums()
        shown = {name: self.apart[name] if sums == nothing else sums for name, sums in self.counted.items()}
        sqnr = {name: sums.sqnr for name, sums in shown.items()}
        return CandidateRow(self.handle, self.name, self.module, self.op, sqnr)


def compared(
    values: Sequence[ValueSums],
    candidates: Sequence[Candidate],
    set_apart: Sequence[SetApart],
    batches: int,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of a report that follow from the sums of the outputs and, after them, the ops.

    ``candidates`` are all of them; those that did not run have a note.
    """
    rows = tuple(value.row() for value in values)
    ran = values[0].counted.keys()
    failed = _failures(set_apart, batches)
    return {
        "rows": rows,
        "candidates": tuple(
            replace(each, sqnr=_sqnr(each.name, rows, failed), note=failed.get(each.name, ""))
            if each.name in ran
            else each
            for each in candidates
        ),
        "set_apart": tuple(set_apart),
        "batches": batches,
        "sums": pack(settings, values=values),
    }


def _sqnr(name: str, rows: Sequence[CandidateRow], failed: Mapping[str, str]) -> float:
    """The smallest of the outputs; an output or a batch without a number must not hide behind the others."""
    outputs = [row.custom[name] for row in rows if row.op == "output"]
    return math.nan if name in failed or any(map(math.isnan, outputs)) else min(outputs, default=math.nan)


def _failures(set_apart: Sequence[SetApart], batches: int) -> dict[str, str]:
    """For each candidate whose quantization causes NaN or infinities: on how many batches, and where first."""
    found: dict[str, list[SetApart]] = {}
    for apart in set_apart:
        if apart.candidate:
            found.setdefault(apart.candidate, []).append(apart)
    total = counted(batches, "batch", "batches")
    return {name: f"on {len(own)} of {total}: {own[0].fault} ({own[0].place})" for name, own in found.items()}


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    """One report of candidates of several; see :func:`pt2qa.merge`."""
    first = reports[0]
    values = _values(first)
    for number, report in enumerate(reports[1:], 2):
        others = _values(report)
        if [(each.handle, each.name) for each in others] != [(each.handle, each.name) for each in values]:
            raise ReportError(
                f"cannot merge: report {number} compares other values than the first one. Shards of one run are made "
                "with the same candidates and the same arguments."
            )
        values = list(map(ValueSums.merge, values, others))
    data = merged_data(reports)
    found = compared(values, first.candidates, data["set_apart"], data["batches"], settings_of(first.sums))
    return replace(first, **{**data, **found})


def _values(report: Any) -> list[ValueSums]:
    names = report.rows[0].custom if report.rows else ()
    none = {name: NoiseSums() for name in names}
    return unpack(report.sums, "values", ValueSums(counted=none, apart=none))
