"""Rows of a layer report: what was measured at one op, or why it could not be measured.

The rows hold unrounded float64 numbers.  Rounding, units and sorting belong to the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import Annotated, ClassVar, Literal

from pt2qa._grouping import grouped
from pt2qa._printable import near_names
from pt2qa._report.prose import cosine as five_digits
from pt2qa._report.prose import counted, share
from pt2qa._report.rows import Row, column
from pt2qa.errors import ReportError


@dataclass(frozen=True, slots=True, eq=False)
class LayerRow(Row):
    """The error of one op's output (or a model output, or a module's output).

    Let ``ref`` be the reference's value and ``quant`` the quantized model's, with sums in float64 over all elements of
    all batches; the **reference is the signal**::

        sqnr = 10 * log10(sum(ref**2) / sum((ref - quant)**2))        dB; equal tensors: inf; zero reference: nan
        mse  = mean((ref - quant)**2)          l1   = mean(|ref - quant|)
        atol = max(|ref - quant|)              max_lsb = atol / scale
        cosine = sum(ref * quant) / sqrt(sum(ref**2) * sum(quant**2))

    ``nan`` means "not defined" or "not measured", and ``note`` says why.

    A row of what :func:`pt2qa.compare_layers` returns.

    Args:
        handle: the op's handle, unique in the model and in graph order; -1 if there is none (outputs, modules).
        name: module path, op and ordinal, e.g. ``layer1.0.conv1/conv2d``.
        module: the module path alone; empty at the top of the model.
        op: the op, e.g. ``conv2d``; for a module row the class name.
        observed_at: what was compared: ``dq`` is the dequantized value that consumers read, ``raw`` is the op's own
            output if nothing quantizes it.
        dtype: the integer type it is quantized to, e.g. ``int8``; for a ``raw`` row the tensor's own dtype.
        scale: real value of one integer step; nan without one.
        zero_point: the integer that represents 0.0, a whole number; nan without one.
        shape: shape of the value in the first batch; ``()`` for a 0-d tensor.
        sqnr: cumulative, dB: reference run against quantized run, so upstream error is included.
        isolated_sqnr: dB: this op's region run quantized on the *reference's* inputs, so upstream error is excluded.
        rounding_sqnr: dB: quantize-dequantize of the reference value against that value: the site's own rounding.
        mse, cosine, l1, atol: as above, cumulative, in the units of the value (``mse`` squared).
        max_lsb: largest error in integer steps.
        saturation: share of values, 0..1, that were clamped: outside the integer range after rounding.
        ref_min, quant_min, ref_max, quant_max, ref_mean, quant_mean: of both sides, in the units of the value.
        range_use: share of the integer range, 0..1, that the reference values span.
        note: why a number is nan, or what is special.
        part_of: for a part of a recurrent op that capture decomposed, that op's name; else empty.
        step: which step of the sequence such a part computes, from 0; -1 if none, or all.
        answers_for: name of the op whose quantization causes the isolated error: the row's own op if the value is
            rounded; if it stays in float, the convolution or similar op in its region.  Empty if no op reads the value
            directly (a convolution's, before a fused ReLU), and if its error comes from rounded values that a float op
            reads.
        input_sqnr: dB: the smallest ``sqnr`` among the values that the op's region reads; inf if it reads only model
            inputs, nan if one of them has no row or no number.
        excess_lsb: how far, in integer steps, the reference's values exceed the integer range; 0 if they stay within
            it, nan if there is no single scale.
        inputs: names of the nearest rows before this one in the graph, separated by commas: those whose values its op
            reads, directly or through ops that have no row.
        nonfinite: whether NaN or infinite values were left out, or made numbers nan.
        custom: the user's metrics by name; all rows of a report have the same names.

    Raises:
        ReportError: ``zero_point`` is neither nan nor a whole number.

    Source:
        the definitions in ``docs/concepts.md``.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "op", "observed_at", "dtype", "sqnr", "isolated_sqnr", "rounding_sqnr"),
        *("max_lsb", "saturation", "cosine"),
    )

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    observed_at: Annotated[Literal["dq", "raw"], column("at", importance=3)]
    dtype: Annotated[str, column(importance=2)]
    scale: float
    zero_point: float
    shape: tuple[int, ...]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=8)]
    isolated_sqnr: Annotated[float, column("isolated\ndB", unit="dB", importance=0)]
    rounding_sqnr: Annotated[float, column("rounding\ndB", unit="dB", importance=5)]
    mse: float
    cosine: Annotated[float, column(show=five_digits, worse="smaller", importance=4)]
    l1: float
    atol: float
    max_lsb: Annotated[float, column("max err\nLSB", importance=6)]
    saturation: Annotated[float, column("saturation\n%", show=share, importance=7)]
    ref_min: float
    quant_min: float
    ref_max: float
    quant_max: float
    ref_mean: float
    quant_mean: float
    range_use: Annotated[float, column("range_use\n%", show=share, worse="smaller", extended=True)] = nan
    note: Annotated[str, column(extended=True)] = ""
    part_of: Annotated[str, column(extended=True)] = ""
    step: Annotated[int, column(extended=True)] = -1
    answers_for: Annotated[str, column(extended=True, since=2)] = ""
    input_sqnr: Annotated[float, column(unit="dB", extended=True, since=2)] = nan
    excess_lsb: Annotated[float, column(extended=True, since=2)] = nan
    inputs: Annotated[str, column(extended=True, since=3)] = ""
    nonfinite: Annotated[bool, column(extended=True, since=4)] = False
    custom: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # to_pandas promises a nullable integer column, so a fractional zero point is rejected here.
        if not isnan(self.zero_point) and not float(self.zero_point).is_integer():
            raise ReportError(f"zero_point of {self.name!r}: got {self.zero_point}, expected a whole number or nan")


def folded(
    rows: Sequence[LayerRow], by: str, rank: Callable[[Sequence[LayerRow], str], Sequence[LayerRow]]
) -> tuple[tuple[LayerRow, ...], tuple[str, ...]]:
    """Rows with the parts of each recurrent op folded into one, at the position of the first part.

    The folded row has the numbers of the worst part by a column, which ``rank`` puts first; the lines say what it
    covers.
    """
    parts = grouped((row.part_of, row) for row in rows)
    result, lines = [], []
    for row in rows:
        own = parts[row.part_of]
        if not row.part_of or len(own) == 1:
            result.append(row)
        elif row is own[0]:
            worst = rank(own, by)[0]
            name = f"{row.part_of} ({counted(len({part.step for part in own} - {-1}), 'step')})"
            where = f", step {worst.step}" if worst.step >= 0 else ""
            result.append(replace(worst, name=name))
            lines.append(
                f"{name} stands for {len(own)} rows; its numbers are those of the worst by {by}, {worst.name}{where}: "
                f'report.opened("{row.part_of}") or pt2qa show --open {row.part_of} shows each'
            )
    return tuple(result), tuple(lines)


def opened(rows: Sequence[LayerRow], name: str) -> tuple[LayerRow, ...]:
    known = dict.fromkeys(row.part_of for row in rows if row.part_of)
    if name not in known:
        near = near_names(name, known) or "none: capture decomposed no recurrent op"
        raise ReportError(f"cannot open {name!r}: expected a decomposed op, {near}")
    return tuple(replace(row, part_of="") if row.part_of == name else row for row in rows)
