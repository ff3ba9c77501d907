"""The methods of :func:`pt2qa.repair` as remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._repair.guard import Method, guarded
from pt2qa._report.prose import counted
from pt2qa._simulator.data import Data
from pt2qa._trials.folds import Folds
from pt2qa._trials.treatment import Treatment

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
    found = guarded(
        method, pair, Folds.of(pair, data), lambda edits: case.judge.pair_with(state.then(Treatment(edits=edits)))
    )
    if found.fit is None:
        return found.refused
    edits = found.fit.edits
    names = _noisiest(case, [op for edit in edits for op in edit.ops])
    return Hypothesis(
        cause=CAUSE_OF[method.name],
        name=names[0],
        others=names,
        evidence=f"{counted(len(edits), 'edit')} fitted to the output error; {found.gain:+.2g} dB on held-out "
        "calibration data",
        remedy=f"{method.name}, as pt2qa.repair does: {counted(len(edits), 'edit')} in the plan",
        treatment=Treatment(edits=edits),
    )


def _noisiest(case: Case, ops: Sequence[str]) -> tuple[str, ...]:
    noise = dict.fromkeys(ops, 0.0)
    for site in case.pair.sites:
        if site.name in noise:
            noise[site.name] += case.noise(site.index)
    return tuple(sorted(noise, key=lambda op: -noise[op]))
