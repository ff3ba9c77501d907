"""Rows of a report of candidates: the values of the model, and the configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pt2qa._report.columns import column
from pt2qa._report.formats import megabytes
from pt2qa._report.rows import Row


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRow(Row):
    """One value of the model, with its SQNR for each candidate.

    Args:
        handle: of the op, in graph order; -1 for an output of the model.
        name: as reports show it; ``output``, ``output[1]`` for outputs.
        module: path of the module that calls the op.
        op: what it does; ``output`` for outputs.
        custom: cumulative SQNR in dB by candidate; nan if a candidate has no such value.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "op")

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=10)]
    custom: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate(Row):
    """One quantizer configuration.

    Args:
        name: the name given by the user.
        quantizer: the plug-in and its options, or the class of a quantizer without a plug-in.
        sqnr: the smallest SQNR of the model's outputs, dB; nan if it failed, even on a single batch.
        quantized_ops: convolutions, linears and the like that read quantized values.
        ops: how many convolutions, linears and the like there are.
        activations: sites where an activation is rounded.
        weights: sites where a weight is rounded.
        bytes: of all stored parameters: quantized ones at their integer width, others in float.
        note: why it failed; empty if it did not.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "quantizer", "sqnr", "quantized_ops", "ops", "activations", "weights", "bytes"),
    )

    name: Annotated[str, column("candidate", key=True, importance=0, shrinks_to=16)]
    quantizer: Annotated[str, column(importance=1, shrinks_to=16)]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=0)]
    quantized_ops: Annotated[int, column("int8\nops", importance=6)]
    ops: Annotated[int, column("of", importance=5)]
    activations: Annotated[int, column("activation\nsites", importance=3)]
    weights: Annotated[int, column("weight\nsites", importance=4)]
    bytes: Annotated[int, column("weights\nMB", show=megabytes, importance=7)]
    note: Annotated[str, column(optional=True)] = ""
