"""The search against all subsets, on a model whose quality is known in closed form."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from pt2qa._reconfigure.candidates import Costs, EditCandidate
from pt2qa._reconfigure.search import Search
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Budget, Target
from pt2qa.overrides.annotations import Edge
from pt2qa.overrides.plan import Edit

NOISE = {0: 50.0, 1: 30.0, 2: 9.0, 3: 8.0, 4: 2.0, 5: 1.0}
COST = [0.30, 0.05, 0.20, 0.05, 0.25, 0.15]
SIGNAL = 10_000.0
EDGES_OF = {site: frozenset({Edge(f"w{site}", f"op{site}", "weight", "int8")}) for site in NOISE}
CANDIDATES = [EditCandidate(Edit("float", (f"op{site}",)), EDGES_OF[site], COST[site]) for site in NOISE]
SHARES = {site: (noise / SIGNAL,) for site, noise in NOISE.items()}
COSTS = Costs({f"op{site}": COST[site] for site in NOISE}, {f"op{site}": 1 / 6 for site in NOISE}, 0.0)


class AdditiveScorer:
    """Stands in for the simulator where noise adds up exactly."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.pair = SimpleNamespace(sites=[SimpleNamespace(index=site) for site in NOISE])
        self.seen: set[frozenset[int]] = set()

    @property
    def evaluations(self) -> int:
        return len(self.seen)

    def quality(self, on: Any) -> Outcome:
        self.seen.add(frozenset(on))
        noise = sum(NOISE[site] for site in on)
        sqnr = 10 * math.log10(SIGNAL / noise) if noise else math.inf
        return Outcome(sqnr, (("output", sqnr),))


def search(needed: float | None, budget: Budget | None = None) -> tuple[Any, AdditiveScorer]:
    scorer = AdditiveScorer(Target(needed if needed is not None else 0.0))
    return Search(scorer, CANDIDATES, EDGES_OF, SHARES, COSTS, needed, budget or Budget()).run(), scorer  # type: ignore[arg-type]


def cheapest(needed: float) -> float:
    """The least cost of any subset that meets the target."""
    best = math.inf
    for count in range(len(CANDIDATES) + 1):
        for subset in itertools.combinations(range(len(CANDIDATES)), count):
            noise = sum(NOISE.values()) - sum(NOISE[site] for site in subset)
            if not noise or 10 * math.log10(SIGNAL / noise) >= needed:
                best = min(best, sum(COST[site] for site in subset))
    return best


@pytest.mark.parametrize("needed", [21.0, 22.0, 25.0, 27.0, 29.0, 33.0, 38.0])
def test_the_plan_is_as_cheap_as_the_best_of_all_subsets(needed: float) -> None:
    found, _ = search(needed)
    assert found.met
    assert found.quality.value >= needed
    assert sum(COST[number] for number in found.chosen) == pytest.approx(cheapest(needed), abs=1 / 500)


def test_a_model_that_meets_the_target_needs_no_edit() -> None:
    found, scorer = search(19.0)
    assert found.met
    assert found.chosen == ()
    assert scorer.evaluations == 1


def test_few_configurations_are_scored() -> None:
    _, scorer = search(29.0)
    assert scorer.evaluations <= 2 + math.ceil(math.log2(len(CANDIDATES))) + len(CANDIDATES)


def test_a_budget_is_kept_and_filled_by_the_knapsack() -> None:
    found, _ = search(None, Budget(macs=0.36))
    assert set(found.chosen) == {0, 1}  # 80 of 100, where gain per cost alone would take 1, 3 and 0 and miss the budget
    assert found.met


def test_a_target_out_of_reach_of_the_budget_gives_the_best_there_is() -> None:
    found, _ = search(30.0, Budget(macs=0.1))
    assert not found.met
    assert set(found.chosen) == {1, 3}
    assert found.proof == "every combination of edits within it was scored"


def test_the_float_model_itself_is_no_choice() -> None:
    found, _ = search(1000.0, Budget())
    assert not found.met
    assert found.proof == "every combination of edits that leaves something quantized was scored"


def test_a_budget_of_bytes_is_kept() -> None:
    found, _ = search(40.0, Budget(bytes=0.34))
    assert not found.met
    assert len(found.chosen) <= 2


class SeveralOutputs(AdditiveScorer):
    """Two outputs whose noise is not what was predicted."""

    def __init__(self, target: Target, seed: int) -> None:
        super().__init__(target)
        generator = random.Random(seed)
        self.noise = {site: (10 ** generator.uniform(-4, -1), 10 ** generator.uniform(-4, -1)) for site in NOISE}
        self.predicted = {
            site: tuple(noise * 10 ** generator.uniform(-0.6, 0.6) for noise in each)
            for site, each in self.noise.items()
        }

    def quality(self, on: Any) -> Outcome:
        self.seen.add(frozenset(on))
        sums = [sum(self.noise[site][output] for site in on) for output in (0, 1)]
        outputs = tuple(10 * math.log10(1 / noise) if noise else math.inf for noise in sums)
        return Outcome(min(outputs), tuple(("output", each) for each in outputs))


@pytest.mark.parametrize("seed", range(20))
def test_each_edit_that_is_left_was_measured_to_be_necessary(seed: int) -> None:
    scorer = SeveralOutputs(Target(0.0), seed)
    needed = scorer.quality(NOISE).value + 3 + seed % 7
    found = Search(scorer, CANDIDATES, EDGES_OF, scorer.predicted, COSTS, needed, Budget()).run()  # type: ignore[arg-type]
    assert found.met
    assert scorer.quality(set(NOISE) - set(found.chosen)).value >= needed
    for number in found.chosen:
        fewer = frozenset(NOISE) - set(found.chosen) | {number}
        assert fewer in scorer.seen
        assert scorer.quality(fewer).value < needed


@pytest.mark.parametrize("seed", range(20))
def test_a_target_is_given_up_only_after_every_choice_within_the_budget(seed: int) -> None:
    scorer = SeveralOutputs(Target(0.0), seed)
    budget = Budget(macs=0.45)
    reached = max(
        scorer.quality(set(NOISE) - set(chosen)).value
        for count in range(len(NOISE))
        for chosen in itertools.combinations(NOISE, count)
        if sum(COST[number] for number in chosen) <= 0.45 + 1e-9
    )
    for needed in (reached, reached + 0.01, None):
        found = Search(scorer, CANDIDATES, EDGES_OF, scorer.predicted, COSTS, needed, budget).run()  # type: ignore[arg-type]
        assert found.met == (needed is None or needed <= reached)
        if needed != reached:
            assert found.quality.value == reached
            assert found.proof == "every combination of edits within it was scored"


def test_a_search_with_many_edits_says_whether_something_was_left_to_try() -> None:
    edges_of = {site: frozenset({Edge(f"w{site}", f"op{site}", "weight", "int8")}) for site in range(12)}
    candidates = [
        EditCandidate(Edit("float", (f"op{site}",)), edges_of[site], 1 / 12) for site in range(11)
    ]  # one site has none
    costs = Costs({f"op{site}": 1 / 12 for site in range(12)}, {f"op{site}": 1 / 12 for site in range(12)}, 0.0)

    class Many(AdditiveScorer):
        def quality(self, on: Any) -> Outcome:
            self.seen.add(frozenset(on))
            return Outcome(-float(len(set(on))), (("output", -float(len(set(on)))),))

    scorer = Many(Target(0.0))
    scorer.pair = SimpleNamespace(sites=[SimpleNamespace(index=site) for site in edges_of])
    noise = dict.fromkeys(edges_of, (1.0,))
    for budget, proof in ((Budget(), "all edits together do not reach it"), (Budget(macs=0.5), "")):
        found = Search(scorer, candidates, edges_of, noise, costs, 0.0, budget).run()  # type: ignore[arg-type]
        assert not found.met
        assert found.proof == proof
        assert found.quality.value == (-1.0 if budget == Budget() else -6.0)


def test_a_search_without_any_edit_says_so() -> None:
    scorer = AdditiveScorer(Target(0.0))
    found = Search(scorer, [], EDGES_OF, SHARES, COSTS, 90.0, Budget()).run()  # type: ignore[arg-type]
    assert not found.met
    assert found.chosen == ()
    assert found.proof == "the quantizer can leave no op out of int8"
