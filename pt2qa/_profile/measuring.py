from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pt2qa._profile.plan import Plan
from pt2qa._profile.report import Profile
from pt2qa._profile.rows import ProfileRow
from pt2qa._profile.sums import described_by, numbers_of, packed_values
from pt2qa._profile.target import ProfileTarget, health_of
from pt2qa._profile.watch import ValueStatistics, Wanted
from pt2qa._report.prose import counted, few
from pt2qa._report.set_apart import DataHealth
from pt2qa._report.sums import EACH, MERGED, Mergeable
from pt2qa._simulator.accumulate import count_empty, empty_batch, refuse_empty
from pt2qa._simulator.batches import Batch, count_samples, has_no_element
from pt2qa._simulator.lifetimes import UNWRITTEN
from pt2qa._simulator.nonfinite import is_empty
from pt2qa._simulator.positions import Axes, Inside, Mask, without_axes


@dataclass(frozen=True, slots=True)
class _Done(Mergeable):
    """By value number what was seen; ``with_nan`` and ``changed`` are numbers of batches, from 0."""

    seen: Mapping[int, ValueStatistics] = field(default_factory=dict, metadata=EACH)
    health: DataHealth = field(default_factory=lambda: DataHealth(0, 0), metadata=MERGED)
    with_nan: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()


class Measurements:
    """The statistics of a plan's values over all batches; a batch that is interrupted counts in none of them."""

    def __init__(self, target: ProfileTarget, plan: Plan, wanted: Wanted, mask: Mask | None) -> None:
        self.target, self.plan = target, plan
        self._axes = None if mask is None else Axes(target.graph, mask)
        self.wanted = replace(wanted, mask="" if self._axes is None else self._axes.name)
        self._done = _Done()

    @property
    def seen(self) -> Mapping[int, ValueStatistics]:
        return self._done.seen

    @property
    def batches(self) -> int:
        return self._done.health.batches

    @property
    def samples(self) -> int:
        return self._done.health.samples

    def inside(self, batch: Batch, values: Sequence[Any]) -> Inside | None:
        """Which positions of a batch count; None: all do."""
        return None if self._axes is None or not count_samples(list(values)) else self._axes.of(batch, values)

    def adds_empty(self, values: Sequence[Any]) -> bool:
        """Whether a batch has no element; it is counted then, and need not run."""
        empty = has_no_element(values)
        if empty:
            self.add(values, {}, None, None)
        return empty

    def add(
        self,
        values: Sequence[Any],
        found: Mapping[int, ValueStatistics],
        outputs: Any,
        inside: Inside | None,
        *,
        changed: bool = False,
    ) -> None:
        """Adds what was found on a batch; ``changed``: observing changed the outputs."""
        number, samples = self.batches, count_samples(list(values))
        if has_no_element(values) or is_empty(samples, outputs):
            health = DataHealth(1, samples, (empty_batch(number),))
        else:
            health = health_of(self.target, number, values, inside)
        has_nan = any(each.statistics.nans for key, each in found.items() if not self.plan.values[key].constant)
        self._done = self._done.merge(_Done(found, health, (number,) * has_nan, (number,) * changed))

    def profile(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> Profile:
        """The report.  Values that are not tensors, such as sizes, have no rows."""
        seen, health = self.seen, self._done.health
        refuse_empty(self.batches, count_empty(health.set_apart))
        numbers = {number: position for position, number in enumerate(sorted(seen))}
        described = {number: described_by(self.plan.values[number], seen[number]) for number in numbers}
        rows = tuple(
            ProfileRow(
                **{**asdict(place), "value": numbers[place.value]},
                **numbers_of(described[place.value], seen[place.value]),
            )
            for place in self.plan.places
            if place.value in seen
        )
        said = (*self.target.notes, *self._not_measured(), *before, *self.notes(), *after)
        return Profile(
            rows=rows,
            **packed_values(list(described.values()), [seen[number] for number in numbers], self.wanted),
            side=self.target.side,
            quantizer=self.target.quantizer,
            batches=self.batches,
            samples=self.samples,
            notes=tuple(dict.fromkeys(said)),
            model=self.target.model,
            environment=self.target.environment,
            set_apart=health.set_apart,
            input_ranges=health.input_ranges,
        )

    def _not_measured(self) -> Iterator[str]:
        for place in self.plan.places:
            if place.value in self.seen and self.seen[place.value].is_uneven:
                yield f"{place.name}: no numbers by channel, batches differ in the channel axis"
        if self.plan.unwritten:
            yield f"not measured, {UNWRITTEN}: {few(self.plan.unwritten)}"

    def notes(self) -> Iterator[str]:
        if self._axes is not None and self._axes.layouts is not None:
            yield from self._about_mask(self._axes.layouts)
        total = counted(self.batches, "batch", "batches")
        unusable = "no values, because observing changed the program's outputs,"
        for what, found in (("NaN", self._done.with_nan), (unusable, self._done.changed)):
            if found:
                yield f"{what} in {len(found)} of {total}: {few([f'batch {number}' for number in found])}"

    def _about_mask(self, known: Mapping[str, Any]) -> Iterator[str]:
        values = self.plan.values
        names = {n: name for n, name in self.plan.names.items() if n in self.seen and not values[n].constant}
        masked = {number for number in names if known.get(values[number].node.name) is not None}
        yield from without_axes([name for number, name in names.items() if number not in masked], len(names))
        along = [
            name
            for number, name in names.items()
            if number in masked and self.seen[number].channels is None and len(self.seen[number].shape) > 1
        ]
        if along and self.wanted.per_channel:
            yield f"no numbers by channel, the channels are samples or positions: {few(along, 3)}"
