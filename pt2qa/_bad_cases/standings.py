"""The worst samples so far, batch by batch; what a report says of them, and reports merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pt2qa._bad_cases.case_metrics import FLIPS, Scores, added_counts
from pt2qa._bad_cases.inputs import Array, key_of
from pt2qa._bad_cases.output_pairs import OutputPair
from pt2qa._bad_cases.rows import CaseRow, LabelCounts, Ranking, StoredCase
from pt2qa._report.columns import Count
from pt2qa._report.merging import numbered_on
from pt2qa._report.notes import Note, joined_notes, notes_without
from pt2qa._report.set_apart import added
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa.errors import ReportError

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


Cases = Mapping[CaseKey, tuple[StoredCase, Mapping[str, Array]]]
"""Inputs that are kept, by batch and sample, -1 for a whole batch."""


@dataclass(frozen=True, slots=True)
class _Listed:
    standing: int = 0
    entry: Entry = field(default_factory=Entry)


def ranked(
    standings: Sequence[Standing], cases: Cases, notes: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of a report that follow from the standings, which are in the order of its rankings."""
    kept = list(dict.fromkeys(_case_of(entry.key, cases) for each in standings for entry in each.entries))
    listed = [_Listed(number, entry) for number, each in enumerate(standings) for entry in each.entries]
    return {
        "rows": tuple(row for each in standings for row in each.rows()),
        "rankings": tuple(each.ranking() for each in standings),
        "cases": tuple(cases[key][0] for key in kept),
        "inputs": {name: array for key in kept for name, array in cases[key][1].items()},
        "notes": tuple(dict.fromkeys([*notes, *(note for each in standings for note in each.notes())])),
        "sums": pack(settings, standings=[replace(each, entries=()) for each in standings], entries=listed),
    }


def _case_of(key: CaseKey, cases: Cases) -> CaseKey:
    return key if key in cases else (key[0], -1)


def merged(reports: Sequence[Any]) -> Any:
    first, settings = reports[0], settings_of(reports[0].sums)
    if settings.get("feedback"):
        raise ReportError(
            f"cannot merge: with feedback ({settings['feedback']}) each batch continues from the state of the "
            "previous one, so searches of parts of the data cannot be merged. Search all batches in one run."
        )
    steps = samples = 0
    standings: dict[tuple[str, str], Standing] = {}
    counts: dict[str, LabelCounts] = {}
    cases: dict[CaseKey, tuple[StoredCase, Mapping[str, Array]]] = {}
    said = []
    for report in reports:
        own = _standings(report)
        for each in own:
            key = each.metric, each.output
            before = standings.get(key, Standing(each.metric, each.output, each.worst, each.k))
            standings[key] = before.merge(each, steps, samples)
        for counted in report.labels:
            name = counted.output
            counts[name] = added_counts(counts[name], counted) if name in counts else counted
        for case in report.cases:
            moved = replace(case, batch=steps + case.batch, index=samples + case.index)
            cases[moved.batch, moved.sample] = moved, _moved(report.inputs, case, moved)
        said.append(notes_without("of sums", report.notes))
        steps, samples = steps + report.steps, samples + report.samples
    return replace(
        first,
        **ranked(list(standings.values()), cases, joined_notes(said), settings),
        labels=tuple(counts.values()),
        steps=steps,
        samples=samples,
        input_ranges=added(report.input_ranges for report in reports),
        set_apart=numbered_on([report.set_apart for report in reports], [report.steps for report in reports]),
    )


def _standings(report: Any) -> list[Standing]:
    found = unpack(report.sums, "standings", Standing())
    entries: list[list[Entry]] = [[] for _ in found]
    for each in unpack(report.sums, "entries", _Listed()):
        if not 0 <= each.standing < len(found):
            raise ReportError(f"the sums of a report do not fit its kind: there is no ranking number {each.standing}")
        entries[each.standing].append(each.entry)
    return [replace(each, entries=tuple(own)) for each, own in zip(found, entries, strict=True)]


def _moved(inputs: Mapping[str, Array], case: StoredCase, moved: StoredCase) -> dict[str, Array]:
    old, new = key_of(case.batch, case.sample, 0)[:-1], key_of(moved.batch, moved.sample, 0)[:-1]
    return {new + name.removeprefix(old): array for name, array in inputs.items() if name.startswith(old)}
