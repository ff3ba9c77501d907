"""What a deployed report proves: the stage that makes the output's error, then the op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf, isinf, isnan
from typing import Final

from pt2qa._decibels import decibels, power
from pt2qa._deployed.rows import FLOAT_MATCH_DB, DeployedRow, StageRow
from pt2qa._report.formats import decibel, number
from pt2qa._report.prose import counted, few
from pt2qa._report.table import ranked

SLIGHT: Final = 1e-6
"""Relative noise power, 60 dB, below which a stage is not blamed: rounding of float32 sums."""

DOING: Final = {
    "capture": "torch.export or pt2qa's normalisation changes the model",
    "prepared": "prepare_pt2e rewrites the model, or it was trained",
    "converted": "quantization",
}


def blamed(stages: Sequence[StageRow]) -> StageRow | None:
    """The stage at which the noise at the output changes most; None if it never changes by an amount that matters.

    A stage that takes away at least half of what another one added comes first: the other one's noise is not that of
    the device.
    """
    changes = [
        (power(-row.sqnr) - power(-before.sqnr), row)
        for before, row in pairwise(stages)
        if not isnan(row.sqnr) and not isnan(before.sqnr)
    ]
    most, found = max(changes, key=lambda pair: pair[0], default=(0.0, None))
    if most <= SLIGHT:
        return None
    less, better = min(changes, key=lambda pair: pair[0])
    return better if less < -most / 2 else found


def suspects(rows: Sequence[DeployedRow]) -> tuple[DeployedRow, ...]:
    return tuple(ranked(DeployedRow, [row for row in rows if row.is_suspect], "isolated_sqnr", ties="handle"))


def summary_of(
    rows: Sequence[DeployedRow], outputs: Sequence[DeployedRow], stages: Sequence[StageRow], fused: int
) -> list[str]:
    """The verdict: stage, op, and whether differences are only the growth of single steps."""
    about = [
        _about_stages(stages, "the kernels" if rows else "the program, which was made elsewhere"),
        *_about_kernels(rows, outputs, stages),
        _counts(rows, fused),
    ]
    return [each for each in about if each]


def _about_stages(stages: Sequence[StageRow], deployed: str) -> str:
    if len(stages) < 2 or isnan(stages[-1].sqnr):
        return "No verdict: the outputs have no SQNR."
    first, last = stages[0].name, stages[-1]
    worst = "identical to" if isinf(last.sqnr) else f"{decibel(last.sqnr)} dB from"
    total = f"The {last.name} output is {worst} {'the eager model' if first == 'eager' else f'the {first} one'}"
    found = blamed(stages)
    if found is None:
        return f"{total}; no stage adds noise above {decibels(1.0, SLIGHT):g} dB."
    before = stages[[row.name for row in stages].index(found.name) - 1]
    levels = ("exact" if row.sqnr == inf else f"{decibel(row.sqnr)} dB" for row in (before, found))
    better = f": better than the {before.name} graph says" if found.sqnr > before.sqnr else ""
    doing = deployed if found.name == "deployed" else DOING.get(found.name, "it")
    return f"{total}. Stage: {found.name} ({doing}), from {' to '.join(levels)}{better}."


def _about_kernels(
    rows: Sequence[DeployedRow], outputs: Sequence[DeployedRow], stages: Sequence[StageRow]
) -> list[str]:
    measured = [row for row in rows if row.is_measured]
    if not measured:
        return ["No intermediate value was observed." if not rows else "No intermediate value could be compared."]
    judged = [row for row in (*measured, *outputs) if row.is_measured and not row.note]
    together = [row.name for row in (*measured, *outputs) if row.is_measured and row.note]
    rest = [f"Not judged, as unobserved roundings lie in between: {few(together)}."] if together else []
    if found := suspects(judged):
        return [_accused(found), *rest]
    missing = len(rows) > len(measured) or together
    about = f"{'The kernels that could be observed' if missing else 'The kernels'} are right: on the same inputs, "
    about += "; ".join(_agreement([row for row in judged if row.op != "output"])) + "."
    step = next((row.step_sqnr for row in stages if row.name == "deployed"), inf)
    if step < FLOAT_MATCH_DB and not missing:
        about += (
            f" Deployed and converted outputs are {decibel(step)} dB apart, which is only single-LSB differences "
            "growing along the graph: no op is at fault."
        )
    return [about, *rest]


def _accused(found: Sequence[DeployedRow]) -> str:
    worst, others = found[0], [row.name for row in found[1:]]
    how = (
        f"up to {number(worst.isolated_max_lsb)} LSB apart, in {100 * worst.isolated_differing:.3g} % of its values; "
        if not isnan(worst.isolated_max_lsb)
        else ""
    )
    also = f" Also: {few(others)}." if others else ""
    why = "Cause unknown: no hypothesis that was run gives the deployed value."
    why = f"Cause, as run again with it gives the deployed value: {worst.cause}." if worst.cause else why
    return (
        f"Op: {worst.name}: its kernel and the converted graph compute different values from the same inputs: {how}"
        f"isolated SQNR {decibel(worst.isolated_sqnr)} dB. {why}{also}"
    )


def _agreement(rows: Sequence[DeployedRow]) -> Iterator[str]:
    integers = [row for row in rows if not isnan(row.isolated_max_lsb)]
    floats = [row.isolated_sqnr for row in rows if isnan(row.isolated_max_lsb)]
    equal = sum(row.isolated_max_lsb == 0 for row in integers)
    if integers:
        yield f"{equal} of {counted(len(integers), 'integer value')} {'is' if equal == 1 else 'are'} equal bit for bit"
    if equal < len(integers):
        most = max(row.isolated_differing for row in integers)
        yield f"the rest is within one LSB, with at most {100 * most:.2g} % of a value's elements off"
    if floats:
        close = "equal" if min(floats) == inf else f"within {decibel(min(floats))} dB"
        yield f"{counted(len(floats), 'float value')} {'is' if len(floats) == 1 else 'are'} {close}"


def _counts(rows: Sequence[DeployedRow], fused: int) -> str:
    if not rows:
        return ""
    without = sum(not row.is_measured for row in rows)
    left = sum(not row.delegated for row in rows)
    return (
        f"Counts: {counted(len(rows), 'value')}, {without} not observed; {counted(fused, 'op')} inside kernels; "
        f"{counted(left, 'value')} of ops left to other kernels, completely or partly."
    )
