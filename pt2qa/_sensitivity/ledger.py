"""Measurements of an analysis so far: sums by place and batch, used to make rows and to resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from pt2qa._decibels import summed
from pt2qa._report.notes import Note, joined_notes, notes_without
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import SetApart, added
from pt2qa._report.sums import Sums, pack, settings_of, unpack
from pt2qa._sensitivity.metrics import OutputMetric
from pt2qa._sensitivity.precision import ALIKE, FEWEST, error_of, reached_by_most
from pt2qa._sensitivity.report import ALL_SITES, SensitivityBatch, SensitivityPart, SensitivityRow
from pt2qa.errors import SelectionError

PROJECTIONS = "projections that were asked for"


@dataclass(frozen=True, slots=True)
class Place:
    """What a row is about; the names are those of :class:`pt2qa.SensitivityRow`, ``flops`` not yet rounded."""

    name: str = ""
    kind: Literal["activation", "weight"] = "activation"
    op: str = ""
    dtype: str = ""
    flops: float = 0.0
    flops_share: float = 0.0
    site: int = -1
    handle: int = -1
    module: str = ""
    region: int = -1


@dataclass
class Ledger:
    """Sums by batch and place, ``noise`` and ``variance`` by place; ``data`` has all batches that were begun."""

    data: list[SensitivityBatch] = field(default_factory=list)
    parts: dict[int, dict[int, SensitivityPart]] = field(default_factory=lambda: defaultdict(dict))
    set_apart: dict[int, SetApart] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    variance: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    by_content: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list), init=False)

    def __post_init__(self) -> None:
        for number, batch in enumerate(self.data):
            self.by_content[batch.fingerprint].append(number)

    def begin(self, batch: SensitivityBatch) -> None:
        self.by_content[batch.fingerprint].append(len(self.data))
        self.data.append(batch)

    def add(self, part: SensitivityPart) -> None:
        """Stores the sums of one place on one batch, which must be new."""
        self.parts[part.batch][part.place] = part
        self.noise[part.place] += part.noise
        self.variance[part.place] += self.variance_of(part)

    def variance_of(self, part: SensitivityPart) -> float:
        """What a part adds: equal batches have the same random vectors, so n of them have n² times the variance."""
        return part.variance * (2 * self.by_content[self.data[part.batch].fingerprint].index(part.batch) + 1)

    def has(self, place: int, batch: int) -> bool:
        return place in self.parts.get(batch, ())

    def append(self, other: Ledger, number: int) -> None:
        own = len(self.data)
        self.begin(other.data[number])
        if number in other.set_apart:
            self.set_apart[own] = replace(other.set_apart[number], batch=own)
        for part in other.parts.get(number, {}).values():
            self.add(replace(part, batch=own))

    @property
    def counted(self) -> list[int]:
        return [number for number in range(len(self.data)) if number not in self.set_apart]

    def finished(self, places: int) -> list[int]:
        """The batches measured for all places."""
        return [batch for batch in self.counted if self.parts.get(batch, {}).keys() >= {ALL_SITES, *range(places)}]


def resumed(report: Any, expected: Mapping[str, object]) -> Ledger:
    """The ledger of an interrupted analysis, whose report must match the ``expected`` fields; empty without one."""
    if report is None:
        return Ledger()
    found = {name: getattr(report, name) for name in expected if name != "fingerprint"}
    found["fingerprint"] = report.environment.fingerprint
    for name, value in expected.items():
        if found[name] != value:
            raise SelectionError(
                f"cannot resume: the report has {name} {found[name]!r}, this call {value!r}. "
                "Pass the same pair and arguments, or start again without resume."
            )
    return ledger_of(report)


def ledger_of(report: Any) -> Ledger:
    ledger = Ledger(list(report.data), set_apart={apart.batch: apart for apart in report.set_apart})
    for part in report.parts:
        ledger.add(part)
    return ledger


def packed(places: Sequence[Place], metric: OutputMetric, settings: Mapping[str, str]) -> Sums:
    """What a report keeps besides the sums, which are its tables ``data`` and ``parts``."""
    return pack({**settings, "weighted": str(metric.weighted)}, places=places)


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first = reports[0]
    settings = settings_of(first.sums)
    metric = OutputMetric(first.metric, None, first.worst_is == "smallest", settings.get("weighted") == str(True))
    places = unpack(first.sums, "places", Place())
    ledger = Ledger()
    for own in map(ledger_of, reports):
        for number in range(len(own.data)):
            ledger.append(own, number)
    notes = joined_notes([notes_without("of sums", report.notes) for report in reports])
    if first.method != "exact":
        given = settings.get(PROJECTIONS) != str(None)
        notes = (*notes, *precision_notes(ledger, len(places), given=given))
    ranges = added(report.input_ranges for report in reports)
    return replace(first, **results(places, ledger, metric), notes=notes, input_ranges=ranges)


def results(places: Sequence[Place], ledger: Ledger, metric: OutputMetric) -> dict[str, Any]:
    batches = covered(ledger, len(places))
    data = [ledger.data[batch] for batch in batches]
    whole = [ledger.parts[batch][ALL_SITES] for batch in batches]
    return {
        "rows": _rows(places, ledger, metric, batches),
        "projections": max(batch.projections for batch in data),
        "planned": len(places),
        "signal": sum(batch.signal for batch in data),
        "noise": sum(part.noise for part in whole),
        "value": metric.value(whole, data),
        "batches": len(batches),
        "samples": sum(batch.samples for batch in data),
        "data": tuple(ledger.data),
        "parts": tuple(own[place] for _, own in sorted(ledger.parts.items()) for place in sorted(own)),
        "set_apart": tuple(apart for _, apart in sorted(ledger.set_apart.items())),
    }


def _rows(
    places: Sequence[Place], ledger: Ledger, metric: OutputMetric, batches: Sequence[int]
) -> tuple[SensitivityRow, ...]:
    data = [ledger.data[batch] for batch in batches]
    rows = []
    for number, place in enumerate(places):
        if not all(ledger.has(number, batch) for batch in batches):
            continue
        parts = [ledger.parts[batch][number] for batch in batches]
        noise = summed(part.noise for part in parts)
        known = {**asdict(place), "flops": round(place.flops), "noise": noise, "noise_share": 0.0}
        # Only sqnr is ever estimated.
        error = error_of(noise, summed(map(ledger.variance_of, parts)))
        rows.append(SensitivityRow(**known, value=metric.value(parts, data), error=error, rank=0, near_tie=False))
    return _ranked(rows, metric.smallest_is_worst)


def precision_notes(ledger: Ledger, places: int, *, given: bool) -> list[Note]:
    """How many projections the ranking took, and whether they suffice; ``given``: the user set their number."""
    notes = []
    data = [ledger.data[batch] for batch in ledger.counted]
    total = counted(len(data), "batch", "batches")
    raised = [batch.projections for batch in data if batch.projections > FEWEST]
    if raised and not given:
        notes.append(f"projections: up to {max(raised)} on {len(raised)} of {total}, for a reliable ranking")
    exact = sum(batch.projections == 0 for batch in data)
    if exact:
        notes.append(
            f"{exact} of {total}: each row measured alone, cheaper than the projections that its ranking needs"
        )
    noise, variance = ([sums[place] for place in range(places)] for sums in (ledger.noise, ledger.variance))
    alike = reached_by_most(noise, variance)
    if alike < ALIKE:
        notes.append(
            f"the ranking is uncertain: with other random vectors, one in ten rankings would agree with it at a "
            f"Spearman correlation below {alike:.2f}; pass more batches or projections"
        )
    return [Note(note, "of sums") for note in notes]


def covered(ledger: Ledger, places: int) -> list[int]:
    """The batches that the rows cover: the finished ones, or else the first one that counts."""
    return ledger.finished(places) or ledger.counted[:1]


def _ranked(rows: list[SensitivityRow], smallest_is_worst: bool) -> tuple[SensitivityRow, ...]:
    """Rows with shares and ranks; rows without a value come last, ties are ordered by noise."""

    def badness(row: SensitivityRow) -> tuple[bool, float, float]:
        missing = math.isnan(row.value)
        value = 0.0 if missing else row.value
        return missing, value if smallest_is_worst else -value, -row.noise

    total = summed(row.noise for row in rows)
    order = sorted(range(len(rows)), key=lambda index: badness(rows[index]))
    near = {index for pair in pairwise(order) if _near(*(rows[index] for index in pair)) for index in pair}
    result = list(rows)
    for rank, index in enumerate(order, start=1):
        share = rows[index].noise / total if total > 0 else 0.0 if total == 0 else math.nan
        result[index] = replace(rows[index], rank=rank, near_tie=index in near, noise_share=share)
    return tuple(result)


def _near(left: SensitivityRow, right: SensitivityRow) -> bool:
    return left.value == right.value or abs(left.value - right.value) <= math.hypot(left.error, right.error)
