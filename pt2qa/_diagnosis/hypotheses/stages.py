"""Stages before quantization, capture and prepare; NaN and infinity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from pt2qa._deployed.lowerable import leaves_of
from pt2qa._deployed.stages import Stages
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.sites import in_float
from pt2qa._diagnosis.hypotheses.weights import changed as changed_weights
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import noise_sums
from pt2qa._report.formats import decibel, number
from pt2qa._sensitivity.played import with_roundings
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.treatment import Treatment

MARGIN = 10.0
"""How far, in dB, a stage must be above the quantized model not to matter to its error."""


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
        if apart >= case.now.worst[1] + MARGIN or apart != apart:
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
            gain=rest - whole,
        )


def constants(case: Case) -> Iterator[Hypothesis]:
    """Weights, biases and other constants that are not the float model's, beyond rounding."""
    apart = {
        constant.reader: f"has {decibel(found)} dB relative to its float value"
        for constant in case.pair.program.constants
        if constant.site is None
        and not constant.mutated
        and isinstance(constant.reference, Tensor)
        and isinstance(constant.quantized, Tensor)
        and (found := _sqnr([constant.reference], [constant.quantized])) < SAME
    }
    weights = changed_weights(case)
    apart |= {
        case.pair.sites[site].name: f"is {number(steps)} LSB from its float value; rounding is half an LSB at most"
        for site, steps in sorted(weights.items(), key=lambda item: item[1])
    }
    if not apart:
        return
    values = case.pair.values(case.first)
    every = frozenset(site.index for site in case.pair.sites)
    program = with_roundings(case.pair.program, {site: case.fitted_weights[site].value for site in weights})
    # Only what is rounded is the quantized model's: biases and other constants are as in the float model.
    restored_constants = tuple(replace(each, weight_site=None) for each in program.constants)
    simulator = Simulator(replace(program, constants=restored_constants), fused=case.pair.simulator.fused)
    case.judge.forwards += 1
    counted = case.counted(case.data, case.first, values)
    reference, quantized, restored = (
        leaves_of(pytree.tree_leaves(found)) if counted is None else counted.tensors(leaves_of(found))
        for found in (
            case.judge.outputs(values, on=False),
            case.judge.outputs(values),
            simulator.run(values, on=every),
        )
    )
    name = list(apart)[-1]
    yield Hypothesis(
        cause="prepare-changed",
        name=name,
        others=tuple(apart),
        evidence=f"a weight or bias {apart[name]}",
        remedy="find what changed it between the float model and the converted graph, such as batch norm folding with "
        "other statistics",
        treatment=Treatment(),
        gain=_sqnr(reference, restored) - _sqnr(reference, quantized),
    )


SAME = 60.0
"""dB from which on two constants are the same, as folding in another order leaves them."""


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
