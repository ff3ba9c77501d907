"""Rows of a deployed report: the values of the backend's kernels, and the outputs of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._decibels import agreement
from pt2qa._report.columns import column
from pt2qa._report.formats import share
from pt2qa._report.rows import Row

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
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "step_sqnr", "sqnr")

    name: Annotated[str, column(key=True, importance=0)]
    step_sqnr: Annotated[float, column("step\ndB", unit="dB", importance=1)]
    sqnr: Annotated[float, column("from eager\ndB", unit="dB", importance=0)]
