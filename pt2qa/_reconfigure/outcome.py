"""The result of a search, as the rows and sentences of its report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pt2qa._decibels import power
from pt2qa._quantize.pairing import QuantizedPair, identity_of
from pt2qa._quantize.plain_flow import kept_flow
from pt2qa._reconfigure.candidates import Noise
from pt2qa._reconfigure.report import CurvePoint, EditRow, Reconfiguration, Stage
from pt2qa._reconfigure.search import Baseline, Search, SearchResult, Selection
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import as_fields
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Budget, Target, Treatment
from pt2qa.overrides.plan import Edit, OverridePlan


def reported(
    judge: Judge,
    new: QuantizedPair,
    plan: OverridePlan,
    verdict: str,
    notes: Sequence[str],
    verify_code: bool,
    **rest: Any,
) -> Reconfiguration:
    """The report of a new pair; ``rest`` are its other fields."""
    health, old = judge.reference.health, judge.pair
    said = health.before(verdict)
    about = f"{old.model}, quantized by {old.quantizer} with {counted(len(plan.edits), 'edit')}.\n\n{said}"
    flow, interrupted = kept_flow(new, about, verify_code, judge.data.progress)
    return Reconfiguration(
        verdict=said,
        evaluations=judge.measured,
        plan_json=plan.to_json(),
        code=flow.code,
        code_verified=flow.verified,
        notes=tuple(dict.fromkeys([*notes, *interrupted])),
        **identity_of(old),
        **as_fields(health),
        **rest,
    ).with_pair(new)


def free_rows(pair: QuantizedPair, base: Baseline, more: Sequence[Edit] = ()) -> Iterator[EditRow]:
    """The free edits that hold after some more, with the measured gain of all of them together on the worst output."""
    known = base.judge.metric is None
    before, after = (power(-found.value) for found in (base.judge.outcome(Treatment()), base.outcome))
    gain = 1 - after / before if known and before > 0 else math.nan
    for edit in base.edited(more).kept_edits:
        yield EditRow(edit.ops[0], edit.kind, 0.0, gain, len(pair.sites) - len(base.pair.sites), ", ".join(edit.ops))


def edit_rows(chosen: Selection, search: Search) -> Iterator[EditRow]:
    """The edits in search order, each with its estimated gain on the output that was worst then."""
    whole = search.predicted_noise(())
    together = [tuple(number for number in bundle.members if number in chosen) for bundle in search.bundles]
    together += [(number,) for number in chosen if not any(number in each for each in together)]
    taken: list[int] = []
    for own in together:
        noise, sites = search.predicted_noise(taken), len(search.predicted_on(taken))
        taken += own
        off = sites - len(search.predicted_on(taken))
        gain = _gain(noise, search.predicted_noise(taken), whole)
        for number in own:
            edit = search.candidates[number].edit
            macs = search.costs.macs_of(edit.ops) if search.candidates[number].cost else 0.0
            yield EditRow(edit.ops[0], edit.kind, macs, gain, off, ", ".join(edit.ops))


def _gain(before: Noise, after: Noise, whole: Noise) -> float:
    worst = max(range(len(before)), key=before.__getitem__)
    if not whole[worst]:
        return 0.0
    return (before[worst] - after[worst]) / whole[worst] if math.isfinite(whole[worst]) else math.nan


def curve(base: Baseline, found: SearchResult, search: Search) -> Iterator[CurvePoint]:
    """The quality of the worst output against cost: initially, with the free edits, and bundle by bundle."""
    edits = base.state.edits
    if edits:
        free = search.float_macs(()), search.float_bytes(())
        yield CurvePoint("none", 0, *free, math.nan, base.judge.outcome(Treatment()).value)
    last = edits[-1].ops[0] if edits else "none"
    taken: list[int] = []
    for count in range(len(search.bundles) + 1):
        taken += search.bundles[count - 1].members if count else ()
        predicted = search.predicted(taken) if base.judge.metric is None else math.inf
        yield CurvePoint(
            name=search.candidates[taken[-1]].edit.ops[0] if taken else last,
            edits=len(base.edited([search.candidates[number].edit for number in taken]).all_edits),
            macs=search.float_macs(taken),
            bytes=search.float_bytes(taken),
            predicted=predicted if math.isfinite(predicted) else math.nan,
            measured=found.measured.get(frozenset(taken), math.nan),
        )


def stages(name: str, found: Outcome, macs: float, sites: int) -> Iterator[Stage]:
    yield Stage(name, found.value, macs, sites)
    if len(found.outputs) > 1:
        for output, sqnr in found.outputs:
            yield Stage(f"{name}: {output}", sqnr, macs, sites)


def target_text(aim: Target, needed: float | None, budget: Budget) -> str:
    unit = " dB" if aim.metric is None else ""
    parts = [] if needed is None else [f"{aim.name} ≥ {needed:g}{unit}"]
    parts += [] if budget.macs is None else [f"at most {100 * budget.macs:g} % of the MACs in float"]
    parts += [] if budget.bytes is None else [f"at most {100 * budget.bytes:g} % of the weights' bytes in float"]
    return ", ".join(parts)


@dataclass(frozen=True)
class Result:
    """What the verdict is about: the given pair and the final converted graph.

    ``met`` is whether the target is reached within the budget, on all of the data; ``proof`` says why it cannot be,
    empty if there may be more to try; ``apart`` is how many batches the float model itself gives no number on.
    ``fallback`` is the level of the ops that left int8, which count as float in all costs.
    """

    before: Outcome
    after: Outcome
    met: bool
    float_macs: float
    float_bytes: float
    edits: int
    scored: int
    proof: str
    apart: int
    fallback: str = "float"


def verdict(aim: Target, needed: float | None, budget: Budget, result: Result, quantizer: str) -> str:
    """Met or not, quality before and after, and the cost; results that are not a number come first."""
    unit = " dB" if aim.metric is None else ""
    before, after = (f"{found.value:.4g}{unit}{_worst(found)}" for found in (result.before, result.after))
    change = f"{aim.name} {before} before, {after} converted and measured"
    level = "float" if result.fallback == "float" else f"float or {result.fallback}"
    cost = f"{100 * result.float_macs:.3g} % of the MACs in {level}"
    exceeded = _exceeded(budget, result)
    absent = [*result.after.missing]
    if result.apart:
        absent.append(f"{counted(result.apart, 'batch', 'batches')} set apart could not be measured")
    elif math.isnan(result.after.value) and not absent:
        absent.append(f"{aim.name} is NaN")
    if exceeded:
        return (
            f"The budget cannot be met: {quantizer} itself leaves {exceeded} in float, and no edit quantizes more; "
            f"{aim.name} {after} as it is."
        )
    if absent:
        head = "Best within the budget" if needed is None else "The target is not met"
        return f"{head}: {'; '.join(absent)}; {change}, {cost}."
    if needed is None:
        return f"Best within the budget: {change}, {cost}."
    held = _unseen(result.after)
    if not result.edits and result.met:
        return f"The target is already met: {aim.name} {after}{held}."
    if result.met:
        return f"The target is met: {change}{held}, {cost}."
    if held and result.after.value >= needed:
        return f"The target is met on the batches that the search saw alone: {change}{held}, {cost}. Aim higher."
    if result.proof:
        limit = " within the budget" if budget != Budget() else ""
        return f"The target cannot be met{limit}: {result.proof}. Best found: {change}, {cost}."
    tried = counted(result.scored, "configuration")
    return f"None of {tried} tried meets the target. Best found: {change}, {cost}."


def _unseen(found: Outcome) -> str:
    """What the batches give that no search saw, and what others may."""
    if found.unseen is None:
        return ""
    low = "" if math.isnan(found.unseen.lowest) else f", other data {found.unseen.lowest:.4g} dB or more"
    samples = counted(found.unseen.samples, "sample")
    return f" ({found.unseen.value:.4g} dB on {samples} that the search did not see{low})"


def _worst(found: Outcome) -> str:
    return "" if len(found.outputs) < 2 or found.missing else f" ({found.worst[0]})"


def _exceeded(budget: Budget, result: Result) -> str:
    parts = [
        f"{100 * share:.3g} % of the {what}"
        for share, limit, what in (
            (result.float_macs, budget.macs, "MACs"),
            (result.float_bytes, budget.bytes, "weights' bytes"),
        )
        if limit is not None and share > limit + 1e-9
    ]
    return " and ".join(parts)
