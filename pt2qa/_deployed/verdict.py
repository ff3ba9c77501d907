"""What a deployed report proves: the stage that makes the output's error, then the op."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isinf, isnan
from typing import Final

from pt2qa._decibels import power
from pt2qa._deployed.rows import FLOAT_MATCH_DB, DeployedRow, StageRow
from pt2qa._report.formats import decibel, number
from pt2qa._report.prose import counted, few
from pt2qa._report.ranking import ranked

SLIGHT: Final = 1e-6
"""Relative noise power, 60 dB, below which a stage is not blamed: rounding of float32 sums."""

DOING: Final = {
    "capture": "torch.export or pt2qa's normalisation changes the model",
    "prepared": "prepare_pt2e rewrites the model, or it was trained",
    "converted": "quantization",
    "deployed": "the kernels",
}


def blamed(stages: Sequence[StageRow]) -> StageRow | None:
    """The stage at which the noise at the output grows most; None if none adds any that matters."""
    grown = [
        (power(-row.sqnr) - power(-before.sqnr), row)
        for before, row in pairwise(stages)
        if not isnan(row.sqnr) and not isnan(before.sqnr)
    ]
    most = max(grown, key=lambda pair: pair[0], default=None)
    return most[1] if most is not None and most[0] > SLIGHT else None


def suspects(rows: Sequence[DeployedRow]) -> tuple[DeployedRow, ...]:
    """The rows whose kernel computes something else, lowest isolated SQNR first."""
    return tuple(ranked(DeployedRow, [row for row in rows if row.is_suspect], "isolated_sqnr", ties="handle"))


def summary_of(rows: Sequence[DeployedRow], stages: Sequence[StageRow], untapped: int) -> list[str]:
    """The verdict: stage, op, and whether differences are only the growth of single steps."""
    return [each for each in (_about_stages(stages), *_about_kernels(rows, stages), _counts(rows, untapped)) if each]


def _about_stages(stages: Sequence[StageRow]) -> str:
    if len(stages) < 2 or isnan(stages[-1].sqnr):
        return "No verdict: the outputs have no SQNR."
    first, last = stages[0].name, stages[-1]
    worst = "identical to" if isinf(last.sqnr) else f"{decibel(last.sqnr)} dB from"
    total = f"The {last.name} output is {worst} {'the eager model' if first == 'eager' else f'the {first}'}"
    found = blamed(stages)
    if found is None:
        return f"{total}; no stage adds noise above {10 * 6} dB."
    before = stages[[row.name for row in stages].index(found.name) - 1]
    step = f"from {_level(before.sqnr)} to {_level(found.sqnr)}"
    return f"{total}. Stage: {found.name} ({DOING.get(found.name, 'it')}), {step}."


def _level(sqnr: float) -> str:
    return "exact" if sqnr == inf else f"{decibel(sqnr)} dB"


def _about_kernels(rows: Sequence[DeployedRow], stages: Sequence[StageRow]) -> list[str]:
    measured = [row for row in rows if not isnan(row.isolated_sqnr) or not isnan(row.isolated_max_lsb)]
    if not measured:
        return ["Nothing inside the program was observed." if not rows else "No value inside the program has a number."]
    found = suspects(measured)
    if found:
        worst = found[0]
        how = (
            f"{number(worst.isolated_max_lsb)} LSB in {100 * worst.isolated_differing:.3g} % of its values, "
            if not isnan(worst.isolated_max_lsb)
            else ""
        )
        others = [row.name for row in found[1:]]
        also = f" Also: {few(others)}." if others else ""
        return [
            f"Op: {worst.name} computes something else than the converted graph on the same inputs: {how}"
            f"isolated SQNR {decibel(worst.isolated_sqnr)} dB.{also}"
        ]
    integers = [row for row in measured if not isnan(row.isolated_max_lsb)]
    floats = len(measured) - len(integers)
    equal = sum(row.isolated_max_lsb == 0 for row in integers)
    most = max((row.isolated_differing for row in integers), default=0.0)
    parts = [f"{equal} of {counted(len(integers), 'integer value')} are equal bit for bit"] if integers else []
    if equal < len(integers):
        parts.append(f"the others differ by one LSB, in at most {100 * most:.2g} % of their elements")
    if floats:
        parts.append(f"{counted(floats, 'float value')} agree to {FLOAT_MATCH_DB:g} dB or more")
    about = [f"The kernels are right: on the same inputs, {'; '.join(parts)}."]
    step = next((row.step_sqnr for row in stages if row.name == "deployed"), inf)
    if step < FLOAT_MATCH_DB:
        about.append(
            f"Deployed and converted outputs are {decibel(step)} dB apart, which is only the growth of single-LSB "
            "differences along the graph: no op is to blame."
        )
    return about


def _counts(rows: Sequence[DeployedRow], untapped: int) -> str:
    if not rows:
        return ""
    without = sum(isnan(row.isolated_sqnr) and isnan(row.isolated_max_lsb) for row in rows)
    left = sum(not row.delegated for row in rows)
    return (
        f"Counts: {counted(len(rows), 'value')}, {without} not observed; {counted(untapped, 'op')} inside kernels; "
        f"{counted(left, 'value')} of ops left to portable kernels."
    )
