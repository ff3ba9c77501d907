"""The search for a configuration: the cheapest sites to leave in float until the target is met.

Every configuration is scored on the simulator by switching sites.  Choices come in the order of gain per cost; the
smallest prefix that meets the target is found by bisection, a knapsack over the same gains may beat it, and edits that
turn out needless are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pt2qa.overrides.annotations import Edge
from pt2qa.reconfiguration.costs import Costs
from pt2qa.reconfiguration.ordering import Choice, Unit, order_choices, sites_off
from pt2qa.reconfiguration.scoring import Scorer
from pt2qa.reconfiguration.target import Budget

COST_STEPS = 2000
"""Steps into which the knapsack cuts the whole model's cost."""
MARGINS = (0.0, 0.5)
"""How many dB a knapsack aims above the target: its prediction may miss."""
PREDICTION_MARGIN = 10**0.05
"""How far a prediction of the noise may miss (0.5 dB) for an edit still to be tried without."""


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        units: the units of the plan, in the order of the search.
        quality: measured on the simulator.
        met: whether it meets the target within the budget.
        choices: all choices in order, for the curve.
        measured: quality by the number of choices, where it was scored.
        exhausted: quality with every choice, nan where it was not needed.
    """

    units: tuple[int, ...]
    quality: float
    met: bool
    choices: tuple[Choice, ...]
    measured: Mapping[int, float]
    exhausted: float


class Search:
    """One search over the edits of a pair.

    Args:
        scorer: scores configurations.
        units: all edits.
        holders: by site, the edges that ask for it.
        noise: by site, the output noise power that it causes.
        costs: shares of ops.
        needed: the quality to reach; None: the best within the budget.
        budget: what may be left in float.
        sites_on: the sites that stay with some units; None: those that an edge is left to ask for.
    """

    def __init__(
        self,
        scorer: Scorer,
        units: Sequence[Unit],
        holders: Mapping[int, frozenset[Edge]],
        noise: Mapping[int, float],
        costs: Costs,
        needed: float | None,
        budget: Budget,
        sites_on: Callable[[Collection[int]], frozenset[int]] | None = None,
    ) -> None:
        self.scorer, self.units, self.holders, self.noise = scorer, units, holders, noise
        self.costs, self.needed, self.budget = costs, needed, budget
        self.every = frozenset(site.index for site in scorer.pair.sites)
        self.choices = order_choices(units, holders, noise)
        self.on = self.predicted_on if sites_on is None else sites_on
        self.measured: dict[int, float] = {}

    def run(self) -> Found:
        """Searches; see the module's text."""
        prefix = self._affordable_prefix()
        before = self._prefix_quality(0)
        if self.needed is not None and before >= self.needed:
            return self._found((), before)
        exhausted = self._prefix_quality(prefix)
        if self.needed is None or not exhausted >= self.needed:
            best = self._best_within_budget(prefix, exhausted)
            return self._found(*best, exhausted=best[1])
        low, high = 0, prefix
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._prefix_quality(middle) >= self.needed else (middle, high)
        units = self._cheaper(self._units_of(range(high)))
        return self._found(*self._without_needless(units), exhausted=exhausted)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _affordable_prefix(self) -> int:
        """How many choices the budget allows in their order."""
        return max(n for n in range(len(self.choices) + 1) if self._fits(self._units_of(range(n))))

    def _fits(self, units: Collection[int]) -> bool:
        if not self.on(units):
            return False  # a model that stays in float as a whole is no quantized model
        macs, size = self.budget.macs, self.budget.bytes
        return (macs is None or self.float_macs(units) <= macs + 1e-9) and (
            size is None or self.costs.bytes_of(self.float_ops(units)) <= size + 1e-9
        )

    def float_ops(self, units: Collection[int]) -> set[str]:
        """The ops that these units take out of int8."""
        return {op for number in units if self.units[number].cost for op in self.units[number].edit.ops}

    def float_macs(self, units: Collection[int]) -> float:
        """Share of the multiply-accumulates in float, with those that the quantizer leaves there by itself."""
        return self.costs.float_macs + self.costs.macs_of(self.float_ops(units))

    def _units_of(self, choices: Collection[int]) -> tuple[int, ...]:
        return tuple(number for index in choices for number in self.choices[index].units)

    def predicted_on(self, units: Collection[int]) -> frozenset[int]:
        """The sites that an edge is left to ask for, with these units."""
        return self.every - sites_off((self.units[number] for number in units), self.holders)

    def _quality(self, units: Collection[int]) -> float:
        return self.scorer.quality(self.on(units))

    def _prefix_quality(self, count: int) -> float:
        self.measured[count] = self._quality(self._units_of(range(count)))
        return self.measured[count]

    def predicted_noise(self, units: Collection[int]) -> float:
        """Output noise by the sum over the sites that stay."""
        return sum(self.noise.get(site, 0.0) for site in self.predicted_on(units))

    def _best_within_budget(self, prefix: int, quality: float) -> tuple[tuple[int, ...], float]:
        """The better of the prefix that fits and a knapsack over all choices."""
        units = self._units_of(range(prefix))
        if self.budget == Budget():
            return units, quality
        chosen = self._knapsack()
        if self._fits(chosen) and set(chosen) != set(units):
            other = self._quality(chosen)
            if other > quality:
                return chosen, other
        return units, quality

    def _knapsack(self, gain_needed: float = math.inf) -> tuple[int, ...]:
        """The choices of the largest gain within the budget, or the cheapest ones that gain as much as is needed."""
        budget = 1.0 if self.budget.macs is None else max(0.0, self.budget.macs - self.costs.float_macs)
        limit = int(budget * COST_STEPS)
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (limit + 1)
        for index, choice in enumerate(self.choices):
            weight = math.ceil(choice.cost * COST_STEPS)
            for cost in range(limit, weight - 1, -1):
                gain, taken = best[cost - weight]
                if gain + choice.gain > best[cost][0]:
                    best[cost] = gain + choice.gain, (*taken, index)
        enough = next((taken for gain, taken in best if gain >= gain_needed), best[-1][1])
        return self._units_of(enough)

    def _cheaper(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """The knapsack's choices where they cost less than the prefix and meet the target as well."""
        assert self.needed is not None
        quality = self._quality(units)
        if math.isnan(self.scorer.noise):
            return units
        total, now = self.predicted_noise(()), self.predicted_noise(units)
        for margin in MARGINS:
            # The prediction is scaled to what the prefix measured.
            allowed = now * 10 ** ((quality - self.needed - margin) / 10)
            other = self._knapsack(total - allowed)
            if self._cost(other) < self._cost(units) and self._fits(other) and self._quality(other) >= self.needed:
                return other
        return units

    def _cost(self, units: Collection[int]) -> float:
        return sum(self.units[number].cost for number in units)

    def _without_needless(self, units: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """Drops edits that cost something and are not needed, the dearest first."""
        assert self.needed is not None
        quality = self._quality(units)
        for number in sorted((n for n in units if self.units[n].cost), key=lambda n: -self.units[n].cost):
            fewer = tuple(other for other in units if other != number)
            if not self._worth_trying(units, fewer):
                continue
            without = self._quality(fewer)
            if without >= self.needed:
                units, quality = fewer, without
        return units, quality

    def _worth_trying(self, units: tuple[int, ...], fewer: tuple[int, ...]) -> bool:
        """Whether a configuration may meet an SQNR, by its predicted noise and what the last one's was."""
        assert self.needed is not None
        if self.scorer.target.metric is not None:
            return True
        quality = self._quality(units)
        predicted, now = self.predicted_noise(fewer), self.predicted_noise(units)
        return now > 0 and quality - 10 * math.log10(predicted / now / PREDICTION_MARGIN) >= self.needed

    def _found(self, units: tuple[int, ...], quality: float, exhausted: float = math.nan) -> Found:
        met = (self.needed is None or quality >= self.needed) and self._fits(units)
        return Found(units, quality, met, tuple(self.choices), dict(self.measured), exhausted)
