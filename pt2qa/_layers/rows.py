"""Rows of a layer report: what was measured at one op, or why it could not be measured.

The rows hold numbers as they were computed, in float64.  Rounding, units and sorting belong to the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._report.columns import column
from pt2qa._report.formats import cosine as five_digits
from pt2qa._report.formats import share
from pt2qa.errors import ReportError

NONFINITE_ALONE: Final = "NaN or infinite when run by itself"
"""In the note of a :class:`LayerRow` whose isolated SQNR was measured and is nan."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The error of one op's output (or a model output, or a module's output).

    With ``ref`` the reference's value and ``quant`` the quantized model's, sums over all elements of all batches in
    float64, the **reference is the signal**::

        sqnr = 10 * log10(sum(ref**2) / sum((ref - quant)**2))        dB; equal tensors: inf; zero reference: nan
        mse  = mean((ref - quant)**2)          l1   = mean(|ref - quant|)
        atol = max(|ref - quant|)              max_lsb = atol / scale
        cosine = sum(ref * quant) / sqrt(sum(ref**2) * sum(quant**2))

    ``nan`` means "not defined" or "not measured", and ``note`` says why.

    Args:
        handle: the op's handle, unique in the model and in graph order; -1 where there is none (outputs, modules).
        name: module path, op and ordinal, e.g. ``layer1.0.conv1/conv2d``.
        module: the module path alone; empty at the top of the model.
        op: the op, e.g. ``conv2d``; of a module row its class name.
        observed_at: what was compared: ``dq`` is the dequantized value that consumers read, ``raw`` is the op's own
            output where nothing quantizes it.
        dtype: the integer type it is quantized to, e.g. ``int8``; of a ``raw`` row the tensor's own type.
        scale: real value of one integer step; nan without one.
        zero_point: the integer that stands for 0.0, a whole number; nan without one.
        shape: shape of the first batch's value; ``()`` for a 0-d tensor.
        sqnr: cumulative, dB: the reference run against the quantized run, so upstream error is included.
        isolated_sqnr: dB: this op's region run quantized on the *reference's* inputs, so without
            error from further upstream.
        rounding_sqnr: dB: quantize-dequantize of the reference value against that value, the site's own rounding.
        mse, cosine, l1, atol: as above, cumulative, in the units of the value (``mse`` squared).
        max_lsb: largest error in integer steps.
        saturation: share of values, 0..1, that the clamp moved: outside the integer range after rounding.
        ref_min, quant_min, ref_max, quant_max, ref_mean, quant_mean: of the two sides, in the units of the value.
        range_use: share of the integer range, 0..1, that the reference values span.
        note: why a number is nan, or what is special here.
        part_of: for a part of a recurrent op that capture took apart, that op's name; else empty.
        step: which step of the sequence such a part computes, from 0; -1 where it is of none, or of all.
        answers_for: name of the op whose quantization is to blame for the isolated error: the row's own where the value
            is rounded; where it stays in float the convolution or the like in its region.  Empty where no op reads the
            value as it is (a convolution's, before the ReLU that is computed with it), and where its error is that of
            rounded values which an op in float reads.
        input_sqnr: dB: the smallest ``sqnr`` among the values that the op's region reads; inf where it reads the
            model's inputs alone, nan where one of them has no row or no number.
        excess_lsb: how far, in integer steps, the reference's values reach beyond what the integers hold; 0 where they
            stay within, nan where there is no single scale.
        custom: the user's own metrics by name; every row of one report has the same names.

    Raises:
        ReportError: ``zero_point`` is neither nan nor a whole number.

    Source:
        the definitions are those of ``docs/concepts.md``.
    """

    shown: ClassVar = (
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
    custom: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # to_pandas promises a nullable integer column, so a fractional zero point is refused where it is made.
        if not isnan(self.zero_point) and not float(self.zero_point).is_integer():
            raise ReportError(f"zero_point of {self.name!r}: got {self.zero_point}, expected a whole number or nan")
