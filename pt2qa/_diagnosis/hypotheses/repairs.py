"""The methods of :func:`pt2qa.repair` as remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.calibration import Chosen
from pt2qa._diagnosis.hypotheses.sites import evidence_of_outliers, with_outliers
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import batches_before, everywhere
from pt2qa._repair.equalization import Equalization
from pt2qa._repair.guard import Method, guarded
from pt2qa._repair.ranges import Ranges
from pt2qa._report.prose import counted
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds, Outcome
from pt2qa._trials.treatment import Treatment, places_of, with_params
from pt2qa.errors import SelectionError

CAUSE_OF: Final = {
    "shifting": "norm-offsets",
    "equalization": "norm-outliers",
    "ranges": "range",
    "rounding": "weight-rounding",
    "biases": "bias",
}
"""What each method of :func:`pt2qa.repair` is the remedy for."""


def calibration_of(case: Case, state: Treatment) -> tuple[Data | None, str]:
    """The batches that a repair is fitted to, or why there are none."""
    recipe = case.judge.recipe
    if recipe is None:
        return None, "the pair was not made by pt2qa.quantize"
    if recipe.qat:
        return None, "the pair was trained (QAT), so its ranges and weights are learned"
    if not state.made_of_edits:
        return None, "a remedy above must be applied to the model or the quantizer first"
    if state.data is not None:
        return state.data, ""
    if recipe.data is None:
        return None, "the pair was calibrated on an iterator, which is exhausted"
    return replace(recipe.data, mask=case.data.mask), ""


def fitted(case: Case, state: Treatment, data: Data, method: type[Method]) -> Hypothesis | str:
    """A method's fit to the pair with all remedies so far, or why it is not applied."""
    pair = case.judge.applied(state)
    found = guarded(method, pair, Folds(pair, data))
    if found.fit is None or found.doubt:
        return found.refused or f"{found.gain:+.2g} dB on held-out calibration data, {found.doubt}"
    edits = found.fit.edits
    names = _noisiest(case, [op for edit in edits for op in edit.ops])
    cause, evidence = CAUSE_OF[method.name], f"{counted(len(edits), 'edit')} fitted to the output error"
    if method is Equalization and (outliers := with_outliers(case)):
        cause, evidence = "outlier-channel", f"{evidence_of_outliers(case, outliers)}; {evidence}"
        names = (*case.names(outliers), *names)
    return Hypothesis(
        cause=cause,
        name=names[0],
        others=names,
        evidence=f"{evidence}; {found.gain:+.2g} dB on held-out calibration data",
        remedy=f"{method.name}, as pt2qa.repair does: {counted(len(edits), 'edit')} in the plan",
        treatment=Treatment(edits=edits),
    )


def equalized(case: Case) -> Iterator[Hypothesis]:
    """Outlier channels that the weights around them absorb."""
    data, _ = calibration_of(case, Treatment())
    if data is not None and with_outliers(case):
        found = fitted(case, Treatment(), data, Equalization)
        if isinstance(found, Hypothesis):
            yield found


ENOUGH = 16
"""Calibration samples that show what a repair gives."""


def bound(case: Case, state: Treatment, quality: Outcome) -> tuple[Outcome | None, Treatment]:
    """What :func:`pt2qa.repair` gives at least, for free: its ranges, fitted to a few calibration batches, as edits.

    Evaluation batches that are among these are judged with what was fitted to others.  No less than ``quality``, which
    is without it; None where it has nothing to fit, or nothing to change.
    """
    data, _ = calibration_of(case, state)
    if data is None:
        return None, Treatment()
    judge = case.judge
    pair = judge.pair_with(state)
    folds = Folds(pair, replace(data, batches=_first(pair, data)))
    shared = {key: fold for key, fold in judge.reference.fold_of.items() if key in folds.fold_of}
    folds.fold_of |= shared
    try:
        look = Ranges.look(pair, folds)
    except SelectionError:
        return None, Treatment()
    whole = look.fit((0, 1))
    if not whole.edits:
        return None, Treatment()
    apart = (look.fit([1]), look.fit([0])) if shared else ()
    places = places_of(pair)
    for fit, *others in zip(*((each, *each.weaker) for each in (whole, *apart)), strict=True):
        params, *without = (
            {site: params for group, params in each.groups.items() for site in group.sites} for each in (fit, *others)
        )
        sites = dict.fromkeys(site for each in (params, *without) for site in each)
        own = {site: pair.sites[site].params for site in sites}
        played = tuple(
            (places[site], with_params(params.get(site, own[site]), [each.get(site, own[site]) for each in without]))
            for site in sites
        )
        found = judge.outcome(state.then(Treatment(played=played)))
        if found.rank > quality.rank:
            return found, Treatment(edits=fit.edits)
    return quality, Treatment()


def ranged(case: Case, ranges: Treatment, found: Hypothesis | None = None) -> Hypothesis:
    """The ranges that :func:`pt2qa.repair` fits, as the remedy of a cause for which ops need not leave int8, if any."""
    names, edits = _noisiest(case, [op for edit in ranges.edits for op in edit.ops]), counted(len(ranges.edits), "edit")
    made = Hypothesis(
        cause="range",
        name=names[0],
        others=names,
        evidence=f"{edits} fitted to the output error",
        remedy=f"ranges, as pt2qa.repair does: {edits} in the plan",
        treatment=ranges,
    )
    if found is None:
        return made
    cause = made.cause if found.cause == "precision" else found.cause  # 8 bits are enough
    return replace(found, cause=cause, remedy=made.remedy, treatment=ranges, cost=0.0)


def _first(pair: QuantizedPair, data: Data) -> Chosen:
    """The first batches of all ranks that have enough samples together, but two at least."""
    own = [count_samples(pair.values(batch)) for batch in data]
    counts = [count for found in everywhere(own) for count in found]
    stop = next((n for n in range(2, len(counts)) if sum(counts[:n]) >= ENOUGH), len(counts))
    before = batches_before(lambda: len(own))
    return Chosen(data.batches, [before + number < stop for number in range(len(own))])


def _noisiest(case: Case, ops: Sequence[str]) -> tuple[str, ...]:
    noise = dict.fromkeys(ops, 0.0)
    for site in case.pair.sites:
        if site.name in noise:
            noise[site.name] += case.noise(site.index)
    return tuple(sorted(noise, key=lambda op: -noise[op]))
