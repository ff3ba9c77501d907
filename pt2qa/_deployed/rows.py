"""Rows of a deployed report, and what they prove: the stage that makes the output's error, then the op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isinf, isnan, nan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._decibels import agreement, decibels, power
from pt2qa._report.columns import column
from pt2qa._report.prose import counted, decibel, few, number, share
from pt2qa._report.rows import Row
from pt2qa._report.table import ranked

FLOAT_MATCH_DB: Final = 60.0
"""How closely a kernel's float output must match; other orders of summation leave 100 dB and more."""

LSB: Final = 1.0
"""How far, in integer steps, a kernel may be from the converted graph: two correct kernels may round a tie apart."""


@dataclass(frozen=True, slots=True, eq=False)
class DeployedRow(Row):
    """One value of the deployed program.

    With the values of one place, all of them dequantized where they are integers::

        isolated_*      the converted graph's region on the *deployed* inputs, against the deployed value
        cumulative_sqnr the converted graph's value against the deployed value
        quantized_sqnr  the reference's value against the converted graph's
        deployed_sqnr   the reference's value against the deployed value

    The first one named is the signal of the SQNR, in dB, over all elements of all batches.

    Args:
        handle: the op's handle; -1 for an output.
        name: the op's name.
        module: the module path; empty at the top of the model.
        op: the op, or ``output``.
        observed_at: ``dq``: the integers that a kernel writes, dequantized; ``raw``: an op's own output.
        dtype: of what was observed, such as ``int8``.
        scale: real value of one integer step; nan without one.
        delegated: whether the backend's own kernels compute all of the op; else some or all of it is left to others.
        isolated_max_lsb: largest difference in integer steps; nan without a scale.
        isolated_differing: share of values that differ, 0..1; nan for float values.
        isolated_sqnr, cumulative_sqnr, quantized_sqnr, deployed_sqnr: as above, dB; inf if nothing differs.
        note: why a number is missing, or with which other roundings it was measured.
        cause: of a difference that makes it a suspect: what the kernel does, as an experiment showed; empty if unknown.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "op", "observed_at", "dtype", "delegated", "isolated_max_lsb", "isolated_differing"),
        *("isolated_sqnr", "cumulative_sqnr", "quantized_sqnr", "deployed_sqnr"),
    )

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    observed_at: Annotated[Literal["dq", "raw"], column("at", importance=2)]
    dtype: Annotated[str, column(importance=3)]
    scale: float
    delegated: Annotated[bool, column(importance=4)]
    isolated_max_lsb: Annotated[float, column("isolated\nmax LSB", importance=0)]
    isolated_differing: Annotated[float, column("isolated\ndiffer %", show=share, importance=7)]
    isolated_sqnr: Annotated[float, column("isolated\ndB", unit="dB", importance=8)]
    cumulative_sqnr: Annotated[float, column("cumulative\ndB", unit="dB", importance=6)]
    quantized_sqnr: Annotated[float, column("converted\ndB", unit="dB", importance=5)]
    deployed_sqnr: Annotated[float, column("deployed\ndB", unit="dB", importance=8)]
    note: Annotated[str, column(extended=True)] = ""
    cause: Annotated[str, column(extended=True, since=3)] = ""

    @property
    def is_measured(self) -> bool:
        """Whether it was compared on the deployed inputs."""
        return not isnan(self.isolated_sqnr) or not isnan(self.isolated_max_lsb)

    @property
    def is_suspect(self) -> bool:
        """Whether the kernel computes something else than the converted graph.

        Integers: more than :data:`LSB` apart. Float values: below :data:`FLOAT_MATCH_DB`, in bfloat16 and float16
        fewer.  What was measured together with others has no such limit.  A value that is the converted graph's own is
        right, whatever was observed of its inputs.
        """
        if self.note or self.cumulative_sqnr == inf:
            return False
        if not isnan(self.isolated_max_lsb):
            return self.isolated_max_lsb > LSB
        least = agreement(FLOAT_MATCH_DB, [self.dtype])
        return self.isolated_sqnr < least and not self.cumulative_sqnr >= least


@dataclass(frozen=True, slots=True, eq=False)
class StageRow(Row):
    """One stage of the way to the device, by the model's worst output.

    Args:
        name: ``eager``: the model itself. ``capture``: its exported program. ``prepared``: after the rewriting of
            ``prepare_pt2e``, observers off, or after training. ``converted``: what ``convert_pt2e`` returned.
            ``deployed``: the backend's program.
        step_sqnr: dB, against the stage before; nan at the first.
        sqnr: dB, against the first stage; inf at the first.
        value: of the metric; nan where it was not measured.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "step_sqnr", "sqnr", "value")

    name: Annotated[str, column(key=True, importance=0)]
    step_sqnr: Annotated[float, column("step\ndB", unit="dB", importance=1)]
    sqnr: Annotated[float, column("from eager\ndB", unit="dB", importance=0)]
    value: Annotated[float, column("metric", show=number, importance=2, since=4)] = nan


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
