from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._report.columns import Amount, Count, column
from pt2qa._report.formats import number, share
from pt2qa._report.rows import Row

ALL_SITES: Final = -1
"""The ``place`` of sums for the fully quantized model."""


def _sigma(value: float) -> str:
    """One digit: it is an estimate."""
    return number(value) if value in (0.0, inf) or isnan(value) else f"{value:.1g}"


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityRow(Row):
    """How quantizing one site, or a group of sites together, affects the model's output.

    Let ``ref`` be the reference's outputs and ``alone`` the outputs with only this site quantized, with sums over all
    elements of all outputs and batches::

        noise = sum((ref - alone)**2)        value = 10 * log10(sum(ref**2) / noise)     dB, for the metric sqnr

    A row of what :func:`pt2qa.sensitivity` returns.

    Args:
        name: of the op that produces the value (activation) or reads it (weight), e.g. ``layer1.0.conv1/conv2d``; for a
            group the region's first op, or the module's path.
        kind: ``activation`` or ``weight`` (a bias counts as a weight); a group is an ``activation`` if it holds one.
        op: that op's type, e.g. ``conv2d``, ``input`` for model inputs; for a module its class name.
        value: the metric with only this site quantized; for ``sqnr`` dB, ``inf`` if the output does not change.
        dtype: of the quantized values, e.g. ``int8``.
        flops: floating-point operations of that op per sample, a multiply-add counting two; 0 for ops without a
            formula.
        flops_share: its share of the model's flops, 0..1.
        site: index in ``pair.sites``; -1 for a group.
        handle: the op's handle; -1 if there is none.
        module: module path of the op.
        region: index in ``pair.regions``; -1 for the model's inputs and for modules.
        noise: squared output error caused by this site alone, summed over the data; linear units, additive.
        noise_share: its share, 0..1, of the sum over all rows.
        error: one sigma of the sampling error of ``value``, in its unit; 0 if nothing was sampled.
        rank: 1 is the worst.
        near_tie: whether an adjacent rank is within the sampling error of both.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("rank", "near_tie", "name", "kind", "op", "dtype"),
        *("value", "error", "noise_share", "flops_share"),
    )

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    kind: Annotated[Literal["activation", "weight"], column(key=True, importance=6)]
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    value: Annotated[float, column(importance=0)]
    dtype: Annotated[str, column(importance=2)]
    flops: int
    flops_share: Annotated[float, column("flops\n%", show=share, importance=3)]
    site: Annotated[int, column(extended=True)]
    handle: Annotated[int, column(worse="smaller", extended=True)]
    module: Annotated[str, column(extended=True)]
    region: Annotated[int, column(extended=True)]
    noise: Annotated[float, column(extended=True)]
    noise_share: Annotated[float, column("noise\n%", show=share, importance=7, extended=True)]
    error: Annotated[float, column("±", show=_sigma, importance=3, extended=True)]
    rank: Annotated[int, column(worse="smaller", importance=5, extended=True)]
    near_tie: Annotated[bool, column("", show=lambda near: "≈" * near, importance=4, extended=True)]


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityBatch(Row):
    """One measured batch, so that an interrupted analysis can resume with the same data.

    Args:
        fingerprint: digest of the inputs.
        samples: how many.
        signal: sum of the squared reference outputs.
        projections: random projections; 0 for the exact method, and where each row was measured alone.
    """

    fingerprint: str
    samples: Count
    signal: Amount
    projections: Annotated[int, column(since=2, least=0)] = 0


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityPart(Row):
    """The sums of one site or group on one batch; those of all batches make a row.

    Args:
        place: position of the row among all rows of the analysis; :data:`ALL_SITES` for all sites on.
        batch: position of the batch.
        noise: sum of the squared output errors.
        variance: of ``noise``, due to the random projections; 0 for the exact method.
        quant_signal: sum of the squared outputs with the site on.
        product: sum of the products of both outputs.
        absolute: sum of the absolute errors.
        largest: largest absolute error.
        count: number of output elements.
        loss: weighted sum of a loss; 0 for metrics that need none.
        weight: sum of the weights in ``loss``.
    """

    place: Annotated[int, column(least=-1)]
    batch: Count
    noise: Amount
    variance: Amount = 0.0
    quant_signal: Amount = 0.0
    product: float = 0.0
    absolute: Amount = 0.0
    largest: Amount = 0.0
    count: Count = 0
    loss: float = 0.0
    weight: float = 0.0
