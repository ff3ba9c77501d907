"""The cost of leaving an op out of int8."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._sensitivity.costs import survey
from pt2qa._simulator.products import PRODUCTS, constant_role, is_quantized, reads_of

LEAST_COST = 1e-3
"""The cost of an op without multiplications, as a share of the model: its input and output are converted."""


@dataclass(frozen=True)
class Costs:
    """Shares of the multiply-accumulates, and of the bytes of all weights, by op name.

    ``float_macs`` and ``float_bytes`` are what the quantizer itself leaves in float.
    """

    macs: Mapping[str, float]
    bytes: Mapping[str, float]
    float_macs: float
    float_bytes: float = 0.0

    def of(self, ops: Iterable[str]) -> float:
        names = set(ops)
        return max(self.macs_of(names), LEAST_COST) if names else 0.0

    def macs_of(self, ops: Collection[str]) -> float:
        return sum(self.macs.get(name, 0.0) for name in set(ops))

    def bytes_of(self, ops: Collection[str]) -> float:
        return sum(self.bytes.get(name, 0.0) for name in set(ops))


def costs_of(pair: QuantizedPair, values: Sequence[Any]) -> Costs:
    """The shares of a pair's ops; arithmetic is counted in one run of the reference on ``values``."""
    return costs_from(pair, survey(pair.simulator, values).flops)


def costs_from(pair: QuantizedPair, flops: Mapping[int, int]) -> Costs:
    whole = sum(flops.values())
    macs: dict[str, float] = {}
    left = 0.0
    for step, reads in reads_of(pair.program):
        share = flops.get(step.index, 0) / whole if whole else 0.0
        macs[step.name] = macs.get(step.name, 0.0) + share
        left += share if step.op in PRODUCTS and not is_quantized(step.op, reads) else 0.0
    sizes: dict[str, float] = {}
    total = alone = 0.0
    for constant in pair.program.constants:
        if not isinstance(constant.reference, Tensor):
            continue
        # Biases are float, or int32 of the same size, whatever the weights are.
        weight = constant_role(constant.op, constant.argument, constant.is_parameter) == "weight"
        if not weight and (constant.site is None or pair.sites[constant.site].kind != "weight"):
            continue
        size = constant.reference.numel() * constant.reference.element_size()
        total += size
        if constant.site is None:
            alone += size
        else:
            sizes[constant.reader] = sizes.get(constant.reader, 0.0) + size
    shares = {name: size / total for name, size in sizes.items()}
    return Costs(macs, shares, left, alone / total if total else 0.0)
