"""The kernels that ship, where they compute something else than the converted graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pt2qa._deployed.analysis import compare_deployed
from pt2qa._deployed.report import DeployedReport
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.trials import Treatment
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.formats import decibel, number
from pt2qa._report.prose import few
from pt2qa.plugins.options import options_of

LOST = 1.0
"""How many dB kernels must cost the output."""


def kernels(case: Case, backend: Any) -> tuple[DeployedReport, Iterator[Hypothesis]]:
    """The comparison with the deployed program, and what its kernels cost."""
    if isinstance(backend, DeployedReport):
        return backend, _costly(case, None, backend)
    report = _compared(case, backend, case.pair)
    return report, _costly(case, backend, report)


def _compared(case: Case, backend: Any, pair: QuantizedPair) -> DeployedReport:
    data = case.data
    return compare_deployed(pair, data.batches, backend=backend, inputs_of=data.inputs_of, progress=case.progress)


def _costly(case: Case, backend: Any, report: DeployedReport) -> Iterator[Hypothesis]:
    by_name = {row.name: row for row in report.stages}
    if not report.suspects or "converted" not in by_name or "deployed" not in by_name:
        return
    converted, deployed = by_name["converted"].sqnr, by_name["deployed"].sqnr
    if not converted - deployed >= LOST:
        return
    worst = report.suspects[0]
    evidence = (
        f"converted {decibel(converted)} dB, deployed {decibel(deployed)} dB; on the same inputs its kernel is up to "
        f"{number(worst.isolated_max_lsb)} integer steps from the converted graph (deployed kernels)"
    )
    others = tuple(row.name for row in report.suspects[1:])
    narrower = list(_narrower(case, backend, deployed, evidence, worst.name, others))
    yield from narrower
    if any(each.gain is not None and each.gain >= (converted - deployed) / 2 for each in narrower):
        return  # saturation explains it
    yield Hypothesis(
        cause="deployed-kernel",
        name=worst.name,
        others=others,
        evidence=evidence,
        remedy=f"leave {few((worst.name, *others))} to another kernel, or in float; the notes of diagnosis.reports"
        "['deployed'] say what is known about it",
        treatment=Treatment(),
        gain=converted - deployed,
    )


def _narrower(
    case: Case, backend: Any, deployed: float, evidence: str, name: str, others: tuple[str, ...]
) -> Iterator[Hypothesis]:
    """Activations of 7 bits, where the plug-in has them: their sums of products stay within 16 bits."""
    recipe = case.trials.recipe
    options = {} if recipe is None else {option.name: option.default for option in options_of(recipe.plugin)}
    if options.get("reduce_range") is not False:
        return
    treatment = Treatment(options=(("reduce_range", True),))
    report = _compared(case, backend, case.trials.pair_with(treatment))
    yield Hypothesis(
        cause="saturation",
        name=name,
        others=others,
        evidence=evidence,
        remedy="quantize with reduce_range=true, or deploy to CPUs with VNNI",
        treatment=treatment,
        gain=report.sqnr - deployed,
    )
