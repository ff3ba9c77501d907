"""The worst samples so far, batch by batch; what a report says of them, and reports merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from pt2qa._bad_cases.case_metrics import FLIPS, OutputPair, Scores
from pt2qa._bad_cases.predictions import NOTHING, Prediction
from pt2qa._bad_cases.report import CaseRow, LabelCounts, Ranking, StoredCase, key_of
from pt2qa._report.merging import numbered_on
from pt2qa._report.notes import Note, joined_notes, notes_without
from pt2qa._report.rows import Count
from pt2qa._report.set_apart import InputRange, SetApart, added
from pt2qa._report.sums import FIRST, Array, Mergeable, merged_each, pack, settings_of, unpack
from pt2qa.errors import ReportError

CaseKey = tuple[int, int]
"""Number of the batch, number of the sample in it; -1 for a batch as a whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sample with its number; its row has no rank yet.

    Attributes:
        tier: 0 if the quantized model returns NaN or infinities where the reference is finite, 1 for a number, 2 for
            none.  The first is worse than any finite error; the last says nothing, so it is ranked last.
    """

    tier: int
    row: CaseRow

    @property
    def key(self) -> CaseKey:
        return self.row.batch, self.row.sample

    def badness(self, worst: str) -> float:
        """The number, with its sign chosen so that large is bad."""
        return 0.0 if self.tier != 1 else -self.row.value if worst == "smallest" else self.row.value


@dataclass(frozen=True, slots=True)
class Standing(Mergeable):
    """The worst k entries by one metric of one output, worst first, and the sums over all samples.

    ``total`` is the sum of the finite numbers, which ``finite`` counts; the others are as in ``Ranking``.
    """

    metric: str = field(default="", metadata=FIRST)
    output: str = field(default="", metadata=FIRST)
    worst: Literal["smallest", "largest"] = field(default="largest", metadata=FIRST)
    k: int = field(default=1, metadata=FIRST)
    entries: tuple[Entry, ...] = ()
    values: Count = 0
    total: float = 0.0
    finite: Count = 0
    nonfinite: Count = 0
    without_number: Count = 0
    reason: str = field(default="", metadata=FIRST)

    def of_batch(self, scores: Scores, output: OutputPair, seen: Sequence[Prediction] = ()) -> Standing:
        """That of one batch, number 0; ``seen`` is what both models predict for each place of the output."""
        if scores.problem:
            return replace(self, without_number=1, reason=scores.problem)
        new = []
        for place, value, note in zip(scores.places, scores.numbers, scores.notes, strict=True):
            tier = 1 if not math.isnan(value) else 0 if output.nonfinite(place) else 2
            first, lowest = (-1, -1) if place < 0 or output.layout is None else output.positions[place]
            own = seen[place] if seen and place >= 0 else NOTHING
            told = "NaN or infinite in the quantized model only" if tier == 0 else note
            row = CaseRow(self.metric, self.output, 0, value, 0, place, max(place, 0), told, first, lowest, *own)
            new.append(Entry(tier, row))
        numbers = [entry.row.value for entry in new if entry.tier == 1]
        finite = [number for number in numbers if math.isfinite(number)]
        without = [entry.row.note for entry in new if entry.tier == 2]
        found = replace(
            self,
            # A sample that keeps all its labels is no bad case.
            entries=tuple(entry for entry in new if self.metric != FLIPS or entry.row.value > 0),
            values=len(numbers),
            total=math.fsum(finite),
            finite=len(finite),
            nonfinite=sum(entry.tier == 0 for entry in new),
            without_number=len(without),
            reason=next(iter(without), ""),
        )
        return found.merge(self)

    def merge(self, later: Standing, batches: int = 0, samples: int = 0) -> Standing:
        """The standing after the batches of both; the later ones are numbered on from these batches and samples."""
        rows = (
            replace(each.row, batch=batches + each.row.batch, index=samples + each.row.index) for each in later.entries
        )
        moved = map(Entry, (each.tier for each in later.entries), rows)
        both = Mergeable.merge(self, replace(later, entries=tuple(moved)))
        # Sorting is stable and earlier entries come first, so ties go to the earlier sample.
        entries = sorted(both.entries, key=lambda entry: (entry.tier, -entry.badness(self.worst)))
        return replace(both, entries=tuple(entries[: self.k]))

    def ranking(self) -> Ranking:
        mean = self.total / self.finite if self.finite else math.nan
        return Ranking(
            self.metric, self.output, self.worst, self.values, mean, self.nonfinite, self.without_number, self.reason
        )

    def rows(self) -> Iterator[CaseRow]:
        for rank, entry in enumerate(self.entries, 1):
            yield replace(entry.row, rank=rank)

    def notes(self) -> Iterator[Note]:
        if self.nonfinite:
            what = f"{self.nonfinite} without {self.metric}, NaN or infinite in the quantized model only"
            yield Note(f"{self.output}: {what}; ranked worst", "of sums")
        if self.without_number:
            what = f"{self.without_number} without {self.metric} ({self.reason or 'nan'})"
            yield Note(f"{self.output}: {what}; ranked last", "of sums")


Cases = Mapping[CaseKey, tuple[StoredCase, Mapping[str, Array]]]
"""Inputs that are kept, by batch and sample, -1 for a whole batch."""


_LISTED: Final = {"standing": 0, "entry": {"tier": 0}}
"""What the row of an entry does not say of it, as sums are unpacked."""


@dataclass(frozen=True)
class Found:
    """What was found on some batches, numbered from 0; ``steps`` and ``samples`` are how many were run."""

    standings: Mapping[tuple[str, str], Standing] = field(default_factory=dict)
    labels: Mapping[str, LabelCounts] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    set_apart: tuple[SetApart, ...] = ()
    input_ranges: tuple[InputRange, ...] = ()

    def merge(self, later: Found) -> Found:
        """What was found on the batches of both."""
        standings = dict(self.standings)
        for key, own in later.standings.items():
            before = standings.get(key, Standing(own.metric, own.output, own.worst, own.k))
            standings[key] = before.merge(own, self.steps, self.samples)
        return Found(
            standings,
            merged_each(self.labels, later.labels),
            self.steps + later.steps,
            self.samples + later.samples,
            numbered_on([self.set_apart, later.set_apart], [self.steps, later.steps]),
            added([self.input_ranges, later.input_ranges]),
        )

    @property
    def keys(self) -> dict[CaseKey, int]:
        """The cases in any standing, each with its running number."""
        return {entry.key: entry.row.index for each in self.standings.values() for entry in each.entries}

    def fields(
        self, standings: Sequence[Standing], cases: Cases, notes: Sequence[str], settings: Mapping[str, str]
    ) -> dict[str, Any]:
        """The fields of a report that follow from it; the standings are in the order of the rankings."""
        ranked = (entry.key for each in standings for entry in each.entries)
        kept = dict.fromkeys(key if key in cases else (key[0], -1) for key in ranked)
        numbered = [(number, entry) for number, each in enumerate(standings) for entry in each.entries]
        listed = [{"standing": number, "entry": {"tier": entry.tier}} for number, entry in numbered]
        return {
            "rows": tuple(row for each in standings for row in each.rows()),
            "rankings": tuple(each.ranking() for each in standings),
            "labels": tuple(self.labels.values()),
            "cases": tuple(cases[key][0] for key in kept),
            "inputs": {name: array for key in kept for name, array in cases[key][1].items()},
            "steps": self.steps,
            "samples": self.samples,
            "set_apart": self.set_apart,
            "input_ranges": self.input_ranges,
            "notes": tuple(dict.fromkeys([*notes, *(note for each in standings for note in each.notes())])),
            "sums": pack(settings, standings=[replace(each, entries=()) for each in standings], entries=listed),
        }


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first, settings = reports[0], settings_of(reports[0].sums)
    if settings.get("feedback"):
        raise ReportError(
            f"cannot merge: with feedback ({settings['feedback']}) each batch continues from the state of the "
            "previous one, so searches of parts of the data cannot be merged. Search all batches in one run."
        )
    found = Found()
    cases: dict[CaseKey, tuple[StoredCase, Mapping[str, Array]]] = {}
    for report in reports:
        for case in report.cases:
            moved = replace(case, batch=found.steps + case.batch, index=found.samples + case.index)
            old, new = (key_of(each.batch, each.sample, 0)[:-1] for each in (case, moved))
            own = {new + name.removeprefix(old): array for name, array in report.inputs.items() if name.startswith(old)}
            cases[moved.batch, moved.sample] = moved, own
        standings = {(each.metric, each.output): each for each in _standings(report)}
        labels = {counts.output: counts for counts in report.labels}
        found = found.merge(
            Found(standings, labels, report.steps, report.samples, report.set_apart, report.input_ranges)
        )
    notes = joined_notes([notes_without("of sums", report.notes) for report in reports])
    return replace(first, **found.fields(list(found.standings.values()), cases, notes, settings))


def _standings(report: Any) -> list[Standing]:
    found = unpack(report.sums, "standings", Standing())
    entries: list[list[Entry]] = [[] for _ in found]
    listed: list[dict[str, Any]] = unpack(report.sums, "entries", _LISTED)
    if len(listed) != len(report.rows):
        found_in = f"{len(listed)} cases for {len(report.rows)} rows"
        raise ReportError(f"the sums of a report do not fit its kind: {found_in}. Make the report again.")
    for each, row in zip(listed, report.rows, strict=True):
        number = each["standing"]
        if not 0 <= number < len(found):
            raise ReportError(f"the sums of a report do not fit its kind: there is no ranking number {number}")
        entries[number].append(Entry(each["entry"]["tier"], row))
    return [replace(each, entries=tuple(own)) for each, own in zip(found, entries, strict=True)]
