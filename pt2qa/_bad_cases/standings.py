"""The worst samples so far: frozen standings that are updated batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pt2qa._bad_cases.case_metrics import FLIPS, Scores
from pt2qa._bad_cases.output_pairs import OutputPair
from pt2qa._bad_cases.rows import CaseRow, Ranking
from pt2qa._report.columns import Count
from pt2qa._report.notes import Note

CaseKey = tuple[int, int]
"""Number of the batch, number of the sample in it; -1 for a batch as a whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its number.

    Attributes:
        tier: 0 if the quantized model returns NaN or infinities where the reference is finite, 1 for a number, 2 for
            none.  The first is worse than any finite error; the last says nothing, so it is ranked last.
        badness: the number, with its sign chosen so that large is bad.
    """

    tier: int = 0
    badness: float = 0.0
    key: CaseKey = (0, 0)
    index: int = 0
    value: float = 0.0
    note: str = ""
    first_wrong: int = -1
    worst_position: int = -1


@dataclass(frozen=True, slots=True)
class Standing:
    """The worst k entries by one metric of one output, worst first, and the sums over all samples.

    ``total`` is the sum of the finite numbers, which ``finite`` counts; the others are as in ``Ranking``.
    """

    metric: str = ""
    output: str = ""
    worst: Literal["smallest", "largest"] = "largest"
    k: int = 1
    entries: tuple[Entry, ...] = ()
    values: Count = 0
    total: float = 0.0
    finite: Count = 0
    nonfinite: Count = 0
    without_number: Count = 0
    reason: str = ""

    def update(self, scores: Scores, output: OutputPair, batch: int, first: int) -> Standing:
        """The standing after one more batch, whose first sample has the running number ``first``."""
        if scores.problem:
            return replace(self, without_number=self.without_number + 1, reason=self.reason or scores.problem)
        sign = -1.0 if self.worst == "smallest" else 1.0
        new = []
        for place, value, note in zip(scores.places, scores.numbers, scores.notes, strict=True):
            tier = 1 if not math.isnan(value) else 0 if output.nonfinite(place) else 2
            badness = sign * value if tier == 1 else 0.0
            where = (-1, -1) if place < 0 or output.layout is None else output.positions[place]
            new.append(Entry(tier, badness, (batch, place), first + max(place, 0), value, note, *where))
        numbers = [entry.value for entry in new if entry.tier == 1]
        finite = [number for number in numbers if math.isfinite(number)]
        without = [entry.note for entry in new if entry.tier == 2]
        found = Standing(
            # A sample that keeps all its labels is no bad case.
            entries=tuple(entry for entry in new if self.metric != FLIPS or entry.value > 0),
            values=len(numbers),
            total=math.fsum(finite),
            finite=len(finite),
            nonfinite=sum(entry.tier == 0 for entry in new),
            without_number=len(without),
            reason=next(iter(without), ""),
        )
        return self.merge(found)

    def merge(self, later: Standing, batches: int = 0, samples: int = 0) -> Standing:
        """The standing after the batches of both; the later ones are numbered on from these batches and samples."""
        moved = [
            replace(entry, key=(batches + entry.key[0], entry.key[1]), index=samples + entry.index)
            for entry in later.entries
        ]
        # Sorting is stable and earlier entries come first, so ties go to the earlier sample.
        entries = sorted((*self.entries, *moved), key=lambda entry: (entry.tier, -entry.badness))
        added = ("values", "total", "finite", "nonfinite", "without_number")
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(later, name) for name in added}
        return replace(self, entries=tuple(entries[: self.k]), reason=self.reason or later.reason, **sums)

    def ranking(self) -> Ranking:
        mean = self.total / self.finite if self.finite else math.nan
        return Ranking(
            self.metric, self.output, self.worst, self.values, mean, self.nonfinite, self.without_number, self.reason
        )

    def rows(self) -> Iterator[CaseRow]:
        for rank, entry in enumerate(self.entries, 1):
            note = "NaN or infinite in the quantized model only" if entry.tier == 0 else entry.note
            where = entry.first_wrong, entry.worst_position
            yield CaseRow(self.metric, self.output, rank, entry.value, *entry.key, entry.index, note, *where)

    def notes(self) -> Iterator[Note]:
        if self.nonfinite:
            what = f"{self.nonfinite} without {self.metric}, NaN or infinite in the quantized model only"
            yield Note(f"{self.output}: {what}; ranked worst", "of sums")
        if self.without_number:
            what = f"{self.without_number} without {self.metric} ({self.reason or 'nan'})"
            yield Note(f"{self.output}: {what}; ranked last", "of sums")
