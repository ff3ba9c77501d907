"""Rows of an error budget: what one mechanism of one site makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._report.columns import column
from pt2qa._report.formats import share
from pt2qa._report.rows import Row

Mechanism = Literal[
    "activation rounding",
    "activation clamping",
    "weight rounding",
    "weight clamping",
    "bias",
    "nested graph not attributed",
]

UNATTRIBUTED: Final = "nested graph not attributed"
"""What all quantization of a nested graph makes together whose sites are not known."""


@dataclass(frozen=True, slots=True, eq=False)
class BudgetRow(Row):
    """The part of the output noise that one mechanism of one site makes alone.

    Let F be the model's outputs as a function of the site's value x, all else as in the reference, ``clamp(x)`` the
    end of the range where x is more than half a step outside and x elsewhere, and ``round(x)`` the value that the
    quantized model has in its place, with sums over all outputs and batches::

        clamping: noise = sum((F(clamp(x)) - F(x))**2)
        rounding: noise = sum((F(round(x)) - F(clamp(x)))**2)
        bias:     noise = sum((F(round(x)) - F(x))**2)

    The noise of a nested graph that is not attributed is that of all its quantization together.

    For a site in series, behind another one with only ops between that pick or clip values, x is its value with that
    one on: behind a relu that is not fused, a site that rounds alike adds nothing.

    Args:
        name: of the op that produces the value (activation) or reads it (weight, bias).
        module: module path of that op.
        op: its type, such as ``conv2d``.
        kind: what is quantized.
        mechanism: what makes the noise.
        noise: squared output error, summed over the data; linear units, additive.
        noise_share: of the measured noise; 0..1, and more where errors cancel in the whole model.
        dtype: of the quantized values.
        site: index in ``pair.sites``.
        error: one sigma of the sampling error of ``noise_share``; 0 if nothing was sampled.
    """

    shown: ClassVar[tuple[str, ...]] = ("name", "op", "mechanism", "dtype", "noise_share", "error")

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: Annotated[str, column(extended=True)]
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    kind: Annotated[Literal["activation", "weight", "bias"], column(importance=2)]
    mechanism: Annotated[Mechanism, column(key=True, importance=6)]
    noise: Annotated[float, column(importance=4)]
    noise_share: Annotated[float, column("noise\n%", show=share, importance=7)]
    dtype: Annotated[str, column(importance=2)]
    site: Annotated[int, column(extended=True)]
    error: Annotated[float, column("± %", show=share, importance=3, extended=True)]
