"""Rows of a sensitivity report: what each site costs, and the sums that this was made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pt2qa._report.columns import since
from pt2qa._report.rows import EXTENDED

ALL_SITES: Final = -1
"""The ``place`` of sums that belong to the fully quantized model."""


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """What the quantization of one site alone does to the model's output, or that of a group of sites together.

    With ``ref`` the reference's outputs and ``alone`` the outputs with this site alone quantized, sums over all
    elements of all outputs and batches::

        noise = sum((ref - alone)**2)        value = 10 * log10(sum(ref**2) / noise)     dB, for the metric sqnr

    Args:
        name: of the op that makes the value (activation) or reads it (weight), e.g. ``layer1.0.conv1/conv2d``; of a
            group the region's first op, or the module's path.
        kind: ``activation`` or ``weight`` (a bias counts as a weight); a group is an ``activation`` if it holds one.
        op: that op's kind, e.g. ``conv2d``, ``input`` for the model's inputs; of a module its class name.
        value: the metric with this site alone quantized; for ``sqnr`` dB, ``inf`` where the output does not change.
        dtype: of the quantized values, e.g. ``int8``.
        flops: floating-point operations of that op for one sample, a multiply-add counting two; 0 for ops without a
            formula.
        flops_share: its share of the model's, 0..1.
        site: index in ``pair.sites``; -1 for a group.
        handle: the op's handle; -1 where there is none.
        module: module path of the op.
        region: index in ``pair.regions``; -1 for the model's inputs and for modules.
        noise: squared error of the outputs that this site alone makes, summed over the data; linear units, adds up.
        noise_share: its share, 0..1, of the sum over all rows.
        error: one sigma of the sampling error of ``value``, in its unit; 0 where nothing was sampled.
        rank: 1 is the worst.
        near_tie: whether a neighbour in rank is within the sampling error of both.
    """

    name: str
    kind: Literal["activation", "weight"]
    op: str
    value: float
    dtype: str
    flops: int
    flops_share: float
    site: int = field(metadata=EXTENDED)
    handle: int = field(metadata=EXTENDED)
    module: str = field(metadata=EXTENDED)
    region: int = field(metadata=EXTENDED)
    noise: float = field(metadata=EXTENDED)
    noise_share: float = field(metadata=EXTENDED)
    error: float = field(metadata=EXTENDED)
    rank: int = field(metadata=EXTENDED)
    near_tie: bool = field(metadata=EXTENDED)


@dataclass(frozen=True, slots=True)
class SensitivityBatch:
    """One batch that was measured, so that an interrupted analysis can go on with the same data.

    Args:
        fingerprint: digest of the inputs.
        samples: how many.
        signal: sum of the squared reference outputs.
        projections: random projections; 0 for the exact method.
    """

    fingerprint: str
    samples: int
    signal: float
    projections: int = field(default=0, metadata=since(2))


@dataclass(frozen=True, slots=True)
class SensitivityPart:
    """The sums of one site or group on one batch; with those of all batches they make a row.

    Args:
        place: position of the row among all rows that the analysis makes; :data:`ALL_SITES` for all sites on.
        batch: position of the batch.
        noise: sum of the squared output errors.
        variance: of ``noise``, by the random projections; 0 for the exact method.
        quant_signal: sum of the squared outputs with the site on.
        product: sum of the products of both outputs.
        absolute: sum of the absolute errors.
        largest: largest absolute error.
        count: elements of the outputs.
        loss: sum of a loss over what it is a mean of; 0 for metrics that need none.
        weight: over how much that sum goes.
    """

    place: int
    batch: int
    noise: float
    variance: float = 0.0
    quant_signal: float = 0.0
    product: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    count: int = 0
    loss: float = 0.0
    weight: float = 0.0
