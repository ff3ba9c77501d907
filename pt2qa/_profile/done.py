"""What a profiler has measured so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pt2qa._profile.plan import Plan
from pt2qa._profile.watch import ValueStatistics
from pt2qa._report.prose import counted, few
from pt2qa._report.set_apart import DataHealth
from pt2qa._simulator.accumulate import empty_batch
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.nonfinite import is_empty


@dataclass(frozen=True, slots=True)
class Done:
    """What was measured so far; ``empty``, ``with_nan`` and ``changed`` are numbers of batches, from 0."""

    seen: dict[int, ValueStatistics] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0
    empty: tuple[int, ...] = ()
    with_nan: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    health: DataHealth = field(default_factory=lambda: DataHealth(0, 0))

    def plus(
        self,
        plan: Plan,
        found: Mapping[int, ValueStatistics],
        values: Sequence[Any],
        outputs: Any,
        *,
        changed: bool = False,
        health: DataHealth | None = None,
    ) -> Done:
        """With one more batch, as a new object: an interrupted batch counts in all values or in none."""
        seen = {**self.seen, **found}
        seen |= {number: self.seen[number].merge(found[number]) for number in self.seen.keys() & found}
        samples, empty = count_samples(list(values)), is_empty(count_samples(list(values)), outputs)
        apart = DataHealth(1, 0, (empty_batch(self.batches),))
        made = (each for number, each in found.items() if not plan.values[number].constant)
        has_nan = any(each.statistics.nans for each in made)
        this = (self.batches,)
        return Done(
            seen,
            self.batches + 1,
            self.samples + samples,
            self.empty + this * empty,
            self.with_nan + this * has_nan,
            self.changed + this * changed,
            self.health.and_also(apart if empty or health is None else health),
        )

    def notes(self) -> Iterator[str]:
        """On which batches values are NaN, and which were not observed."""
        total = counted(self.batches, "batch", "batches")
        unusable = "no values, because observing changed the program's outputs,"
        for what, found in (("NaN", self.with_nan), (unusable, self.changed)):
            if found:
                yield f"{what} in {len(found)} of {total}: {few([f'batch {number}' for number in found])}"
