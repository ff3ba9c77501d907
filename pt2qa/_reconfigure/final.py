"""The converted graph decides: aims higher if it measures less than the simulator, and prunes on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._reconfigure.search import Search, Selection, pruned
from pt2qa._trials.outcome import Outcome
from pt2qa.overrides.plan import OverridePlan

ATTEMPTS = 3
"""Searches, each with a higher aim, if the converted model measures less than the simulated one."""

SAME = 0.01
"""Maximum gap in dB between converted graph and simulation for simulated results to hold on the graph."""


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

    Returns the first that meets the target, else the best one; and what was done, for the notes.  If the simulator was
    wrong, a result that meets the target is also tried without each of its edits on the converted graph.
    """
    search, best, aim, notes = searched(needed), first, needed, list[str]()
    wrong = abs(first.quality.value - simulated.value) > SAME
    for _ in range(ATTEMPTS - 1):
        if best.quality.value >= needed or math.isnan(best.quality.value):
            break
        notes.append(f"converted, the plan for {aim:.4g} measured {best.quality.value:.4g}; aimed higher")
        aim += 1.05 * (needed - best.quality.value)
        search = searched(aim)
        tried = converted(search.run().chosen)
        best = tried if search.fits(tried.chosen) and tried.quality.rank > best.quality.rank else best
    if wrong and best.quality.value >= needed:
        best = _without_needless(best, needed, search, converted)
    return best, notes


def _without_needless(
    best: Converted, needed: float, search: Search, converted: Callable[[Selection], Converted]
) -> Converted:
    """Drops edits of a higher aim that the target does not need, tried on the converted graph."""
    known = {best.chosen: best}

    def enough(chosen: Selection) -> bool:
        known[chosen] = converted(chosen)
        return known[chosen].quality.value >= needed

    return known[pruned(best.chosen, search.candidates, enough)]
