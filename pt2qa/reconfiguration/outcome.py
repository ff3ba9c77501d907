"""What a search found, as the rows and sentences of its report."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pt2qa.pairing import QuantizedPair
from pt2qa.reconfiguration.search import Found, Search
from pt2qa.reconfiguration.start import Start
from pt2qa.reconfiguration.target import Budget, Target
from pt2qa.report import CurvePoint, EditRow


def free_rows(pair: QuantizedPair, start: Start) -> Iterator[EditRow]:
    """The edits that cost nothing, with what all of them together were measured to bring."""
    before, after = (_noise_of(quality) for quality in (start.before, start.quality))
    known = start.scorer.target.metric is None and before > 0
    for edit in start.edits:
        gain = 1 - after / before if known else math.nan
        yield EditRow(edit.ops[0], edit.kind, 0.0, gain, len(pair.sites) - len(start.pair.sites), ", ".join(edit.ops))


def _noise_of(sqnr: float) -> float:
    """Noise power for a signal of power 1."""
    return float(10 ** (-sqnr / 10))


def edit_rows(found: Found, search: Search) -> Iterator[EditRow]:
    """The edits in the order of the search, each with what it was found to bring."""
    total = sum(search.noise.values())
    taken: list[int] = []
    for choice in found.choices:
        own = [number for number in choice.units if number in found.units]
        noise, sites = search.predicted_noise(taken), len(search.predicted_on(taken))
        taken += own
        gain, off = noise - search.predicted_noise(taken), sites - len(search.predicted_on(taken))
        for number in own:
            edit = search.units[number].edit
            macs = search.costs.macs_of(edit.ops) if search.units[number].cost else 0.0
            yield EditRow(edit.ops[0], edit.kind, macs, gain / total if total else 0.0, off, ", ".join(edit.ops))


def curve(start: Start, found: Found, search: Search, signal: float) -> Iterator[CurvePoint]:
    """Quality against cost: as it was, with the free edits, and choice by choice."""
    if start.edits:
        yield CurvePoint("none", 0, search.costs.float_macs, 0.0, math.nan, start.before)
    last = start.edits[-1].ops[0] if start.edits else "none"
    taken: list[int] = []
    for count in range(len(found.choices) + 1):
        taken += found.choices[count - 1].units if count else ()
        noise = search.predicted_noise(taken)
        known = search.scorer.target.metric is None and noise > 0 and signal > 0
        yield CurvePoint(
            name=search.units[taken[-1]].edit.ops[0] if taken else last,
            edits=len(start.edits) + len(taken),
            macs=search.float_macs(taken),
            bytes=search.costs.bytes_of(search.float_ops(taken)),
            predicted=10 * math.log10(signal / noise) if known else math.nan,
            measured=found.measured.get(count, math.nan),
        )


def target_text(aim: Target, needed: float | None, budget: Budget) -> str:
    """The target and the budget in words."""
    unit = " dB" if aim.metric is None else ""
    parts = [] if needed is None else [f"{aim.name} ≥ {needed:g}{unit}"]
    parts += [] if budget.macs is None else [f"at most {100 * budget.macs:g} % of the MACs in float"]
    parts += [] if budget.bytes is None else [f"at most {100 * budget.bytes:g} % of the weights' bytes in float"]
    return ", ".join(parts)


def verdict(
    aim: Target,
    needed: float | None,
    budget: Budget,
    met: bool,
    before: float,
    measured: float,
    found: Found,
    float_macs: float,
    edits: int,
) -> str:
    """One sentence: met or not, from where to where, at what cost."""
    unit = " dB" if aim.metric is None else ""
    change = f"{aim.name} {before:.4g}{unit} before, {measured:.4g}{unit} converted and measured"
    cost = f"{100 * float_macs:.3g} % of the MACs in float"
    if needed is None:
        return f"Best within the budget: {change}, {cost}."
    if not edits and met:
        return f"The target is met as it is: {aim.name} {measured:.4g}{unit}."
    if met:
        return f"The target is met: {change}, {cost}."
    reach = found.exhausted
    if reach == reach and reach < needed:
        limit = "within the budget" if budget != Budget() else "with every edit"
        return f"The target cannot be met {limit}; the best found: {change}, {cost}."
    return f"The target is not met: {change}, {cost}."
