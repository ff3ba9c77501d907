"""Stages before quantization, capture and prepare, and the kernels that ship after it; NaN and infinity."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.comparison import Stages
from pt2qa._deployed.report import DeployedReport, DeployedRow
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.sites import in_float
from pt2qa._diagnosis.hypotheses.weights import changed as changed_weights
from pt2qa._diagnosis.worth import Worth, error
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import noise_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import decibel, few, number
from pt2qa._simulator.batches import leaves_of
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit

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
    outputs = {name: counted.tensors(found) for name, found in outputs.items()}
    quantized = counted.tensors(quantized)
    recipe = case.judge.recipe
    trained = recipe is not None and recipe.train is not None
    names = [name for name in outputs if name != "prepared" or not trained]
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
    """Weights, biases and other constants that are not the float model's, beyond rounding; that one is simulated."""
    found: list[tuple[str, str, Treatment]] = [
        (
            each.reader,
            f"has {decibel(sqnr)} dB relative to its float value",
            Treatment(restored=frozenset({(each.reader, each.argument)})),
        )
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


@dataclass(frozen=True)
class Kernels:
    """The programs of pairs, each lowered and compared once; ``backend`` is a report where none is to be lowered."""

    case: Case
    backend: Any
    known: list[tuple[QuantizedPair, DeployedReport]] = field(default_factory=list)

    def hypotheses(self) -> list[Hypothesis]:
        """Where kernels cost much, the best remedy; none is tried without lowering."""
        found = list(_costly(self.case, self.of(self.case.pair), self))
        if not found or isinstance(self.backend, DeployedReport):
            return found
        return [max(found, key=lambda each: each.gain or 0.0)]

    def of(self, pair: QuantizedPair) -> DeployedReport:
        if isinstance(self.backend, DeployedReport):
            return self.backend
        report = next((report for each, report in self.known if each is pair), None)
        if report is None:
            data = self.case.data
            report = compare_deployed(
                pair,
                data.batches,
                backend=self.backend,
                metric=self.case.judge.metric,
                inputs_of=data.inputs_of,
                mask=data.mask,
                progress=data.progress,
            )
            self.known.append((pair, report))
        return report

    def sqnr(self, treatment: Treatment) -> float:
        return self.of(self.case.judge.applied(treatment)).sqnr


def _costly(case: Case, report: DeployedReport, program: Kernels) -> Iterator[Hypothesis]:
    by_name = {row.name: row for row in report.stages}
    if not report.suspects or "converted" not in by_name or "deployed" not in by_name:
        return
    converted, deployed = by_name["converted"].sqnr, by_name["deployed"].sqnr
    if not Worth().pays(deployed, converted - deployed, 0.0, is_fault=True):
        return
    worst = report.suspects[0]
    costly = Hypothesis(
        cause="deployed-kernel",
        name=worst.name,
        others=tuple(row.name for row in report.suspects[1:]),
        evidence=f"converted {decibel(converted)} dB, deployed {decibel(deployed)} dB; on the same inputs, its kernel "
        f"differs from the converted graph by up to {number(worst.isolated_max_lsb)} LSB (deployed kernels)",
        remedy=f"use another kernel or float for {few([row.name for row in report.suspects])}; see the notes of "
        "diagnosis.reports['deployed'] for known issues",
        treatment=Treatment(),
        gain=math.nan,
    )
    if isinstance(program.backend, DeployedReport) or case.judge.recipe is None:
        yield costly
        return
    if case.options.get("reduce_range") is False:  # sums of products of 7 bits stay within 16
        narrower = Treatment(options=(("reduce_range", True),))
        gain = program.sqnr(narrower) - deployed
        yield replace(
            costly,
            cause="saturation",
            remedy="quantize with reduce_range=true, or deploy on CPUs with VNNI",
            treatment=narrower,
            gain=gain,
        )
        if gain >= (converted - deployed) / 2:
            return
    edits = _floats(case, report.suspects[:MOST])
    if edits:
        floats = Treatment(floats=edits)
        ops = tuple(dict.fromkeys(op for edit in edits for op in edit.ops))
        yield replace(
            costly,
            remedy=f"keep these ops in float: {', '.join(ops)}",
            treatment=floats,
            gain=program.sqnr(floats) - deployed,
            cost=case.costs.macs_of(ops),
        )


MOST = 4
"""How many ops are left to float kernels at once."""


def _floats(case: Case, suspects: Iterable[DeployedRow]) -> tuple[Edit, ...]:
    """What leaves the ops that compute these values in float, where the quantizer has that level."""
    annotations, names = case.annotations, {row.name for row in suspects}
    if annotations is None:
        return ()
    regions = (tuple(op for op in region.ops if op in annotations.ops) for region in case.pair.regions)
    edits = (Edit("float", ops) for ops in regions if names & {*ops})
    return tuple(edit for edit in edits if annotations.after(edit) is not None)
