"""What it costs to leave an op out of int8."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pt2qa.pairing import QuantizedPair
from pt2qa.report.sensitivities.report import SensitivityReport

LEAST_COST = 1e-3
"""The cost of an op without multiplications, as a share of the model: its input and output are converted."""

_ROUNDING = 1e-9
"""Shares below this are what adding shares up to 1 leaves."""


@dataclass(frozen=True)
class Costs:
    """Shares of the model's arithmetic and weights by op name.

    Attributes:
        macs: share of the multiply-accumulates.
        bytes: share of the bytes of all weights.
        float_macs: share of the multiply-accumulates that the quantizer leaves in float by itself.
    """

    macs: Mapping[str, float]
    bytes: Mapping[str, float]
    float_macs: float

    def of(self, ops: Iterable[str]) -> float:
        """The cost of ops by which edits are weighed."""
        names = set(ops)
        return max(self.macs_of(names), LEAST_COST) if names else 0.0

    def macs_of(self, ops: Collection[str]) -> float:
        """Share of the multiply-accumulates."""
        return sum(self.macs.get(name, 0.0) for name in set(ops))

    def bytes_of(self, ops: Collection[str]) -> float:
        """Share of the bytes of all weights."""
        return sum(self.bytes.get(name, 0.0) for name in set(ops))


def costs_of(pair: QuantizedPair, sensitivities: SensitivityReport) -> Costs:
    """The shares of a pair's ops, from the FLOPs of the sensitivity list and the sizes of the weights."""
    macs = {row.name: row.flops_share for row in sensitivities.rows}
    quantized = {site.name for site in pair.sites if site.kind == "weight"}
    sizes: dict[str, float] = {}
    total = 0
    for constant in pair.program.constants:
        if isinstance(constant.reference, Tensor) and (constant.is_parameter or constant.site is not None):
            size = constant.reference.numel() * constant.reference.element_size()
            total += size
            if constant.site is not None:
                sizes[constant.reader] = sizes.get(constant.reader, 0) + size
    shares = {name: size / total for name, size in sizes.items()}
    left = 1.0 - sum(macs.get(name, 0.0) for name in quantized)
    return Costs(macs, shares, left if left > _ROUNDING and any(macs.values()) else 0.0)
