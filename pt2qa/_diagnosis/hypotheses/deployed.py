"""The kernels that ship, where they compute something else than the converted graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.report import DeployedReport
from pt2qa._deployed.rows import DeployedRow
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.worth import Worth
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.formats import decibel, number
from pt2qa._report.prose import few
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit


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
