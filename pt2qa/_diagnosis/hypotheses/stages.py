"""Stages before quantization, capture and prepare; NaN and infinity."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from torch import Tensor

from pt2qa._deployed.stages import Stages
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.sites import in_float
from pt2qa._diagnosis.hypotheses.weights import changed as changed_weights
from pt2qa._diagnosis.worth import error
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import noise_sums
from pt2qa._report.formats import decibel, number
from pt2qa._simulator.outputs import leaves_of
from pt2qa._simulator.program import Constant
from pt2qa._trials.treatment import Treatment

MATTERS = 0.1
"""The noise of a stage, as a share of that of the quantized model, from which on it matters."""

SAME = 1e-3
"""The root mean square of a difference, as a share, up to which constants are the same: folding reorders sums."""

ALL = 0.5
"""The share of the weights that are others, above which it is another checkpoint."""


def changed(case: Case) -> Iterator[Hypothesis]:
    """Capture or prepare that changed the model, on the first batch; nothing if the quantized model has no number."""
    if math.isnan(case.now.worst[1]):
        return
    stages = Stages(case.pair)
    values = case.pair.values(case.first)
    outputs = stages.before(case.first, values)
    case.judge.forwards += len(outputs)
    outputs["prepared"], quantized = (
        leaves_of(pytree.tree_leaves(case.judge.outputs(values, on))) for on in (False, True)
    )
    counted = case.counted(case.data, case.first, values)
    if counted is not None:
        outputs = {name: counted.tensors(found) for name, found in outputs.items()}
        quantized = counted.tensors(quantized)
    names = list(outputs)
    for before, after in itertools.pairwise(names):
        apart = _sqnr(outputs[before], outputs[after])
        if not error(apart) ** 2 > MATTERS * error(case.now.worst[1]) ** 2 or math.isnan(apart):
            continue
        cause = "capture-changed" if after == "capture" else "prepare-changed"
        whole, rest = _sqnr(outputs[before], quantized), _sqnr(outputs[after], quantized)
        yield Hypothesis(
            cause=cause,
            name="",
            evidence=f"SQNR on the first batch: {after} {decibel(apart)} dB relative to {before}; quantized "
            f"{decibel(whole)} dB relative to {before}, {decibel(rest)} dB relative to {after} (stages)",
            remedy="compare the two graphs op by op with pt2qa.compare_graphs; no quantizer setting can help",
            treatment=Treatment(),
            gain=math.nan,
        )


def constants(case: Case) -> Iterator[Hypothesis]:
    """Weights, biases and other constants that are not the float model's, beyond rounding; that one is played."""
    found: list[_Changed] = [
        (each.reader, f"has {decibel(sqnr)} dB relative to its float value", _restored(each))
        for each in case.pair.program.constants
        if each.site is None
        and not each.mutated
        and isinstance(each.reference, Tensor)
        and isinstance(each.quantized, Tensor)
        and error(sqnr := _sqnr([each.reference], [each.quantized])) > SAME
        and not math.isnan(sqnr)
    ]
    for site, steps in changed_weights(case).items():
        said = f"is {number(steps)} LSB from its float value; rounding is half an LSB at most"
        found.append((case.pair.sites[site].name, said, case.played(case.fitted_weights, [site])))
    weights = sum(site.kind == "weight" for site in case.pair.sites)
    if len({name for name, _, _ in found}) > max(ALL * weights, 1):
        whole = functools.reduce(Treatment.then, (treatment for _, _, treatment in found))
        found = [(found[0][0], f"and {len(found) - 1} others are not the float model's: here it {found[0][1]}", whole)]
        remedy = "load the weights of the float model: those of the converted graph are from another checkpoint"
    else:
        remedy = (
            "load the float model's value, and find what changed it before the converted graph, such as batch norm "
            "folding with other statistics"
        )
    for name, said, treatment in found:
        yield Hypothesis("prepare-changed", name, f"a weight or bias {said}", remedy, treatment)


_Changed = tuple[str, str, Treatment]
"""The op that reads a constant, how far that is from its own value, and what plays its own."""


def _restored(constant: Constant) -> Treatment:
    return Treatment(restored=frozenset({(constant.reader, constant.argument)}))


def nonfinite(case: Case) -> Iterator[Hypothesis]:
    fault = case.fault
    if fault is None or fault.side != "quantized":
        return
    sites = [site for site in case.pair.sites if fault.name in (site.name, *site.readers)]
    if sites:
        treatment, remedy, cost = in_float(case, sites[0])
        yield Hypothesis(
            cause="nonfinite",
            name=fault.name,
            evidence=f"{fault.what} appears first at {fault.name}, only in the quantized model",
            remedy=f"keep the op in float{remedy}",
            treatment=treatment,
            cost=cost,
        )


def _sqnr(reference: list[Tensor], other: list[Tensor]) -> float:
    found = (
        noise_sums((ref, out), ((0, 1),))[0].sqnr
        for ref, out in zip(reference, other, strict=False)
        if ref.is_floating_point() and ref.shape == out.shape
    )
    return min((each for each in found if not math.isnan(each)), default=math.nan)
