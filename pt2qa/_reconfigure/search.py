"""The search for a configuration: the cheapest sites to leave in float until the target is met.

Every configuration is scored on the simulator by switching sites.  Bundles of edits come in order of gain per cost;
bisection finds the smallest prefix that meets the target, a knapsack over the same gains may beat it, and removing each
remaining edit has been tried.  If the order misses the target, alternatives are tried before giving up.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pt2qa._decibels import decibels, power
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._reconfigure.candidates import Costs, EditCandidate, Noise, order_bundles, sites_off, total_noise
from pt2qa._repair.guard import Method, guarded
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Folds, Outcome
from pt2qa._trials.treatment import Budget, Treatment
from pt2qa.overrides.annotations import Annotations, Edge, fusions_in, observing
from pt2qa.overrides.plan import Edit, OverridePlan

COST_STEPS = 2000
"""Steps into which the knapsack divides the whole model's cost."""
MARGINS = (0.0, 0.5)
"""How many dB a knapsack aims above the target, since its prediction may miss."""
SUBSETS = 128
"""If the edits have at most this many subsets, all are tried before a target is given up."""
TRIES = 12
"""How many configurations of a kind are tried before a target is given up if there are more subsets."""

ATTEMPTS = 3
"""Searches, each with a higher aim, if the converted model measures less than the simulated one."""
SAME = 0.01
"""Maximum gap in dB between converted graph and simulation for simulated results to hold on the graph."""

Selection = tuple[int, ...]
"""Positions in the candidate list."""


@dataclass(frozen=True)
class SearchResult:
    """``chosen`` in search order, with the quality measured on the simulator.

    ``met`` is whether it meets the target within the budget, ``proof`` why a missed target cannot be met, empty if
    there may be more to try; ``measured`` is what was scored, for the curve.
    """

    chosen: Selection
    quality: Outcome
    met: bool
    measured: Mapping[frozenset[int], float]
    proof: str


class Search:
    """One search over a pair's edits, for the quality ``needed``; None: the best within the budget.

    ``edges_of`` and ``noise`` are by site: the edges that require it, the noise it causes in each output.  ``edits_of``
    gives the edits of some candidates and the annotations with them; None: they keep their sites, which are in float
    in the simulation if no edge requires them.
    """

    def __init__(
        self,
        base: Baseline,
        candidates: Sequence[EditCandidate],
        edges_of: Mapping[int, frozenset[Edge]],
        noise: Mapping[int, Noise],
        costs: Costs,
        needed: float | None,
        budget: Budget,
        edits_of: Callable[[Selection], tuple[tuple[Edit, ...], Annotations]] | None = None,
    ) -> None:
        self.base, self.candidates, self.edges_of, self.noise = base, candidates, edges_of, noise
        self.costs, self.needed, self.budget = costs, needed, budget
        self.every = frozenset(site.index for site in base.pair.sites)
        self.outputs = range(len(next(iter(noise.values()), ())))
        self.bundles = order_bundles(candidates, edges_of, noise)
        self.edits_of = edits_of
        self.measured: dict[frozenset[int], float] = {}

    def run(self) -> SearchResult:
        if not self.fits(()) or self._enough(()):
            return self._found(())
        prefixes = self._affordable()
        if not self._enough(prefixes[-1]):
            best = self._best(prefixes)
            if not self._enough(best):
                # With only a budget, an edit is needless if the quality is as good without it.
                return self._found(best if self.needed is not None else self._without_needless(best))
        else:
            low, high = 0, len(prefixes) - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self._enough(prefixes[middle]) else (middle, high)
            best = prefixes[high]
        return self._found(self._without_needless(self._cheaper(best)))

    def fits(self, chosen: Collection[int]) -> bool:
        """Whether a configuration keeps the budget, and leaves something quantized."""
        macs, size = self.budget.macs, self.budget.bytes
        kept = (macs is None or self.float_macs(chosen) <= macs + 1e-9) and (
            size is None or self.float_bytes(chosen) <= size + 1e-9
        )
        # A model that stays entirely in float is not quantized.
        return kept and len(self.on(chosen)) > 0

    def float_macs(self, chosen: Collection[int]) -> float:
        """Share of multiply-accumulates in float, including those that the quantizer itself leaves there."""
        return self.costs.float_macs + self.costs.macs_of(self._float_ops(chosen))

    def float_bytes(self, chosen: Collection[int]) -> float:
        return self.costs.float_bytes + self.costs.bytes_of(self._float_ops(chosen))

    def predicted_on(self, chosen: Collection[int]) -> frozenset[int]:
        """The sites that some edge still requires, with these candidates."""
        return self.every - sites_off((self.candidates[number] for number in chosen), self.edges_of)

    def predicted_noise(self, chosen: Collection[int]) -> Noise:
        return total_noise(self.noise, self.predicted_on(chosen), self.outputs)

    def predicted(self, chosen: Collection[int]) -> float:
        return decibels(1.0, self._worst_noise(chosen))

    def _worst_noise(self, chosen: Collection[int]) -> float:
        return max(self.predicted_noise(chosen), default=math.nan)

    def on(self, chosen: Collection[int]) -> frozenset[int]:
        """The sites that stay on."""
        if self.edits_of is None:
            return self.predicted_on(chosen)
        return frozenset(self.edits_of(tuple(chosen))[1].sites_on(self.base.pair.sites))

    def exact(self, chosen: Collection[int]) -> bool:
        """Whether the simulator has the scales that the model has when converted with some candidates."""
        return self.edits_of is None or self.edits_of(tuple(chosen))[1].has_scales_of(self.base.annotations)

    def quality(self, chosen: Collection[int]) -> Outcome:
        """The quality with some candidates, on the simulator."""
        if self.edits_of is None:
            quality = self.base.quality(self.on(chosen))
        else:
            quality = self.base.judge.outcome(self.base.edited(self.edits_of(tuple(chosen))[0]))
        self.measured[frozenset(chosen)] = quality.value
        return quality

    def _enough(self, chosen: Collection[int]) -> bool:
        quality = self.quality(chosen)
        return self.needed is not None and quality.value >= self.needed

    def _float_ops(self, chosen: Collection[int]) -> set[str]:
        return {op for number in chosen if self.candidates[number].cost for op in self.candidates[number].edit.ops}

    def _cost(self, chosen: Collection[int]) -> float:
        return sum(self.candidates[number].cost for number in chosen)

    def _affordable(self) -> list[Selection]:
        prefixes: list[Selection] = [()]
        for bundle in self.bundles:
            longer = (*prefixes[-1], *bundle.members)
            if self.fits(longer):
                prefixes.append(longer)
        return prefixes

    def _without_needless(self, chosen: Selection) -> Selection:
        """Drops edits without which the target is met, or the quality is no worse where there is no target."""
        bar = self.quality(chosen).rank if self.needed is None else self.needed
        return self.pruned(chosen, lambda fewer: self.quality(fewer).rank >= bar)

    def pruned(self, chosen: Selection, enough: Callable[[Selection], bool]) -> Selection:
        """Drops what is not needed, what costs most for its noise first, until no remaining edit can be dropped."""

        def without(number: int) -> Selection:
            return tuple(other for other in chosen if other != number)

        def worth(number: int) -> float:
            added = self._worst_noise(without(number)) - self._worst_noise(chosen)
            return self.candidates[number].cost / added if added > 0 else math.inf

        untried, necessary = deque(sorted(chosen, key=worth, reverse=True)), 0
        while necessary < len(untried):
            number = untried.popleft()
            if enough(without(number)):
                chosen, necessary = without(number), 0
            else:
                untried.append(number)
                necessary += 1
        return chosen

    def _cheaper(self, chosen: Selection) -> Selection:
        assert self.needed is not None
        quality, predicted = self.quality(chosen), self.predicted_noise(chosen)
        if not quality.outputs:
            return chosen
        for margin in MARGINS:
            # Scale each output's prediction to its measurement.
            allowed = [
                noise * power(db - self.needed - margin) if noise else power(-self.needed)
                for noise, (_, db) in zip(predicted, quality.outputs, strict=True)
            ]
            for worth in self._worths():
                other = self._knapsack(worth, allowed)
                if self._cost(other) < self._cost(chosen) and self.fits(other) and self._enough(other):
                    return other
        return chosen

    def _best(self, prefixes: Sequence[Selection]) -> Selection:
        """Where the order does not reach the target: the best alternative, or the first one that does."""
        best = prefixes[-1]
        for chosen in self._others(prefixes):
            if self.fits(chosen) and self.quality(chosen).rank > self.quality(best).rank:
                best = chosen
                if self._enough(best):
                    break
        return best

    def _others(self, prefixes: Sequence[Selection]) -> Iterator[Selection]:
        longest, everything = prefixes[-1], range(len(self.candidates))
        yield self._filled(longest)
        if self.budget != Budget():
            for worth in self._worths():
                yield self._filled(self._knapsack(worth))
        if self._few:
            for count in reversed(everything):
                yield from itertools.combinations(everything, count + 1)
        else:
            yield from prefixes[:: -(-len(prefixes) // TRIES)]
            swapped = [self._filled(tuple(n for n in longest if n != out), out) for out in longest]
            yield from sorted(swapped, key=self.predicted, reverse=True)[:TRIES]

    def _filled(self, chosen: Selection, but: int = -1) -> Selection:
        in_order = dict.fromkeys([number for bundle in self.bundles for number in bundle.members])
        for number in (*in_order, *(n for n in range(len(self.candidates)) if n not in in_order)):
            if number not in (*chosen, but) and self.fits((*chosen, number)):
                chosen = (*chosen, number)
        return chosen

    @property
    def _few(self) -> bool:
        return 1 << len(self.candidates) <= SUBSETS

    def _worths(self) -> Iterator[Noise]:
        """Weights of the outputs for a knapsack: all outputs alike, or the worst one alone."""
        start = self.predicted_noise(())
        yield tuple(1 / noise if noise else 0.0 for noise in start)
        if len(start) > 1:
            yield tuple(float(noise == max(start)) for noise in start)

    def _knapsack(self, worth: Noise, allowed: Sequence[float] | None = None) -> Selection:
        """The bundles with the most gain within the budget, or the cheapest that leave no more noise than allowed.

        ``worth`` is how much a gain in each output counts.
        """
        by_bytes = self.budget.macs is None and self.budget.bytes is not None
        spent = self.float_bytes(()) if by_bytes else self.costs.float_macs
        share = self.budget.bytes if by_bytes else self.budget.macs
        limit = int((1.0 if share is None else max(0.0, share - spent)) * COST_STEPS)
        best: list[tuple[float, Selection]] = [(0.0, ())] * (limit + 1)
        for index, bundle in enumerate(self.bundles):
            cost = self.float_bytes(bundle.members) - spent if by_bytes else bundle.cost
            weight = math.ceil(cost * COST_STEPS)
            value = sum(each * gain for each, gain in zip(worth, bundle.gain, strict=True))
            for total in range(limit, weight - 1, -1):
                gain, taken = best[total - weight]
                if gain + value > best[total][0]:
                    best[total] = gain + value, (*taken, index)
        start = self.predicted_noise(())

        def leaves_enough(taken: Selection) -> bool:
            gains = [sum(self.bundles[index].gain[output] for index in taken) for output in self.outputs]
            return allowed is not None and all(
                noise - gain <= limit for noise, gain, limit in zip(start, gains, allowed, strict=True)
            )

        cheapest = next((taken for _, taken in best if leaves_enough(taken)), best[-1][1])
        return tuple(number for index in cheapest for number in self.bundles[index].members)

    def _found(self, chosen: Selection) -> SearchResult:
        quality = self.quality(chosen)
        met = self.fits(chosen) and (self.needed is None or quality.value >= self.needed)
        return SearchResult(chosen, quality, met, dict(self.measured), self._proof())

    def _proof(self) -> str:
        if not self.candidates:
            return "the quantizer can leave no op out of int8"
        everything = range(len(self.candidates))
        scored = frozenset(everything) in self.measured
        if self._few and self.budget != Budget():
            return "every combination of edits within it was scored"
        if self._few:
            return f"every combination of edits{'' if scored else ' that leaves something quantized'} was scored"
        return "all edits together do not reach it" if scored else ""


@dataclass(frozen=True)
class Converted:
    """An applied plan for ``chosen``: prepared, calibrated, converted, and measured on the converted graph."""

    chosen: Selection
    plan: OverridePlan
    pair: QuantizedPair
    quality: Outcome


def aimed_until_met(
    first: Converted,
    simulated: Outcome,
    needed: float,
    searched: Callable[[float], Search],
    converted: Callable[[Selection], Converted],
) -> tuple[Converted, list[str]]:
    """Aims higher as long as the converted graph misses a target that its simulation met.

    Returns the first that meets the target, else the best one, and notes.  If the simulator was wrong, or has other
    scales with an edit less, edits are also dropped one by one on the converted graph.
    """
    search, best, aim, notes = searched(needed), first, needed, list[str]()
    wrong = abs(first.quality.value - simulated.value) > SAME
    for _ in range(ATTEMPTS - 1):
        if best.quality.value >= needed or math.isnan(best.quality.value):
            break
        notes.append(f"the plan found for {aim:.4g} measured {best.quality.value:.4g} when converted; aimed higher")
        aim += 1.05 * (needed - best.quality.value)
        search = searched(aim)
        tried = converted(search.run().chosen)
        best = tried if search.fits(tried.chosen) and tried.quality.rank > best.quality.rank else best
    wrong = wrong or not all(search.exact([n for n in best.chosen if n != out]) for out in best.chosen)
    if wrong and best.quality.value >= needed:
        best = _without_needless(best, needed, search, converted)
    return best, notes


def _without_needless(
    best: Converted, needed: float, search: Search, converted: Callable[[Selection], Converted]
) -> Converted:
    """Without the edits that the target does not need, measured on the converted graph."""
    known = {best.chosen: best}

    def enough(chosen: Selection) -> bool:
        known[chosen] = converted(chosen)
        return known[chosen].quality.value >= needed

    return known[search.pruned(best.chosen, enough)]


@dataclass(frozen=True)
class Baseline:
    """A treatment of free edits, its pair and its outcome."""

    judge: Judge
    state: Treatment = field(default_factory=Treatment)
    notes: tuple[str, ...] = ()

    @property
    def pair(self) -> QuantizedPair:
        return self.judge.pair_with(self.state)

    @property
    def annotations(self) -> Annotations:
        found = self.judge.annotations(self.state)
        assert found is not None, "a pair that is quantized again has annotations"
        return found

    @property
    def outcome(self) -> Outcome:
        return self.judge.outcome(self.state)

    def quality(self, on: Collection[int]) -> Outcome:
        """The quality with these sites of the pair on, and all others in float."""
        off = {site.index for site in self.pair.sites}.difference(on)
        return self.judge.outcome(self.judge.without(self.state, off) if off else self.state)

    def edited(self, edits: Sequence[Edit]) -> Treatment:
        """The treatment with more edits, all of which are applied by quantizing again."""
        return self.state.then(Treatment(floats=tuple(edits)))

    def better(self, edits: Sequence[Edit]) -> Baseline:
        if not edits:
            return self
        changed = replace(self, state=self.state.then(Treatment(edits=tuple(edits))))
        return changed if changed.outcome.rank > self.outcome.rank else self


def with_free_edits(
    base: Baseline,
    fuse: bool,
    observers: Sequence[str],
    repairs: Sequence[type[Method]],
    data: Folds,
    needed: float | None,
) -> Baseline:
    """Converts with all fusions, then with each other observer, then with repairs; keeps what measures best.

    A pair that reaches the ``needed`` quality gets no further edit.
    """

    def enough(found: Baseline) -> bool:
        return needed is not None and found.outcome.value >= needed

    best = base
    if fuse and not enough(best):
        best = best.better(fusions_in(best.annotations))
    fused = best
    for observer in observers:
        if not enough(best):
            tried = fused.better(observing(fused.annotations, observer))
            best = tried if tried.outcome.rank > best.outcome.rank else best
    for method in repairs:
        if not enough(best):
            best = repaired(best, method, data)
    return best


def repaired(base: Baseline, method: type[Method], data: Folds) -> Baseline:
    """The pair with a repair, if it gains on held-out calibration data and on the evaluation data; a note says so."""
    found = guarded(method, base.pair, data)
    new = base if found.fit is None else base.better(found.fit.edits)
    gain = f"{found.gain:+.2g} dB on held-out calibration data"
    if found.fit is None:
        note = f"{method.name} not applied: {found.refused}"
    elif new is base:
        note = f"{method.name} not applied: {gain}, but no gain on the evaluation data"
    elif found.doubt and not new.outcome.gain_over(base.outcome).is_certain:
        new, note = (
            base,
            f"{method.name} not applied: {gain}, {found.doubt}, and no certain gain on the evaluation data",
        )
    else:
        note = "; ".join(filter(None, (f"{method.name} applied: {gain}", found.left_out)))
    base.judge.forget(new.state)
    return replace(new, notes=(*base.notes, note))
