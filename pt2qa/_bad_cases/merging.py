"""What a report of bad cases says of its standings: of one search, and of several merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pt2qa._bad_cases import labels
from pt2qa._bad_cases.inputs import Array, key_of
from pt2qa._bad_cases.rows import LabelCounts, StoredCase
from pt2qa._bad_cases.standings import CaseKey, Entry, Standing
from pt2qa._report.merging import numbered_on
from pt2qa._report.notes import joined_notes, notes_without
from pt2qa._report.set_apart import added
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa.errors import ReportError

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
            counts[name] = labels.merged(counts[name], counted) if name in counts else counted
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
