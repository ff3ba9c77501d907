"""The convolutions and linears of a quantized graph that multiply integers, with everything that scales them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.input_ranges import limits
from pt2qa._simulator.products import WEIGHTED
from pt2qa._simulator.program import Constant, QuantParams, Site, Slot, Step
from pt2qa._weights.sums import SumsOfWeights

FEW_CHANNELS = 0.1
"""Share of a weight's channels up to which their rounding moves the layer's output by little."""


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """A convolution or linear whose weight is quantized to integers with known scales; computed on the CPU.

    ``bias_params`` and ``input_params`` are None if these stay float, ``channel_axis`` is that of the weight's output
    channels.  ``output_scale`` is the largest scale with which its output is rounded, directly or after elementwise ops
    and ops that move values; nan if it stays float or each batch sets the scale.
    """

    name: str
    weight: Constant
    weight_params: QuantParams
    channel_axis: int
    bias: Constant | None
    bias_params: QuantParams | None
    input_params: QuantParams | None
    output_scale: float
    sums: SumsOfWeights

    @property
    def weights(self) -> Tensor:
        """The float weights, output channels first, each channel flat: float32 of shape (channels, rest)."""
        weight: Tensor = self.weight.reference
        return weight.detach().movedim(self.channel_axis, 0).flatten(1)

    @property
    def scales(self) -> Tensor:
        """One weight scale for each output channel: float64 of shape (channels,)."""
        scale = torch.as_tensor(self.weight_params.scale).cpu().double().flatten()
        return scale.expand(self.weight.reference.shape[self.channel_axis]) if scale.numel() == 1 else scale

    @property
    def integers(self) -> Tensor:
        """The integer weights, zero point subtracted: float64 of the weight's shape, output channels first."""
        moved = self.weight.quantized.detach().cpu().double().movedim(self.channel_axis, 0)
        return torch.round(moved / self.scales.view(-1, *[1] * (moved.dim() - 1)))

    @property
    def largest(self) -> Tensor:
        """The largest absolute weight of each output channel: float64 of shape (channels,)."""
        return self.sums.of(self.weight, self.channel_axis).largest.cpu()

    @property
    def zero(self) -> Tensor:
        """Whether all integers of each output channel are zero: booleans of shape (channels,)."""
        return self.sums.of(self.weight, self.channel_axis).zero.cpu()

    @property
    def visible(self) -> Tensor:
        """Whether each output channel can change the rounded output: booleans of shape (channels,).

        A channel whose ``sum(|w|) * max(|x|)`` stays below half a step of the output adds nothing but its bias to it,
        quantized or not: pretrained models have such channels where training switched a batch norm off.  All are
        visible if the range of the input or the scale of the output is unknown.
        """
        if self.input_params is None or math.isnan(self.output_scale):
            return torch.ones(len(self.weights), dtype=torch.bool)
        input_reach = max(abs(end) for end in limits(self.input_params))
        # One weight may suffice, so that few channels are read again.
        hidden = self.largest * input_reach < self.output_scale / 2
        reach = self.weights[hidden].cpu().double().abs().sum(1) * input_reach
        hidden[hidden.clone()] = reach < self.output_scale / 2
        return ~hidden


def integer_products(pair: QuantizedPair, sums: SumsOfWeights) -> tuple[IntegerProduct, ...]:
    """The convolutions and linears of a pair with quantized weights, in graph order."""
    constants = {constant.slot: constant for constant in pair.program.constants}
    readers: dict[int, list[Step]] = {}
    for step in pair.program.steps:
        for slot in step.reads:
            readers.setdefault(slot, []).append(step)
    found = (_product(pair, step, constants, readers, sums) for step in pair.program.steps if step.op in WEIGHTED)
    return tuple(product for product in found if product is not None)


def _product(
    pair: QuantizedPair,
    step: Step,
    constants: Mapping[int, Constant],
    readers: Mapping[int, list[Step]],
    sums: SumsOfWeights,
) -> IntegerProduct | None:
    slots = [part.number if isinstance(part, Slot) else -1 for part in (*step.args, None, None)][:3]
    weight, bias = constants.get(slots[1]), constants.get(slots[2])
    params = _params(pair, weight)
    if weight is None or params is None or params.scale is None or not isinstance(weight.reference, Tensor):
        return None
    # The op for all convolutions has an argument for transposing.
    axis = int("transpose" in step.op or (step.op == "convolution" and bool(step.args[6])))
    if params.axis not in (None, axis):
        return None
    given = next((site.params for site in pair.sites if site.result == slots[0]), None)
    scale = _output_scale(step, readers, pair.sites)
    return IntegerProduct(step.name, weight, params, axis, bias, _params(pair, bias), given, scale, sums)


def _params(pair: QuantizedPair, constant: Constant | None) -> QuantParams | None:
    return None if constant is None or constant.site is None else pair.sites[constant.site].params


def _output_scale(step: Step, readers: Mapping[int, list[Step]], sites: Sequence[Site]) -> float:
    """The largest scale among the sites reached without another product; nan without any."""
    scales, seen, open_slots = [], {step.out}, [step.out]
    while open_slots:
        for reader in readers.get(open_slots.pop(), []):
            if reader.site is not None:
                scales.append(sites[reader.site].params.largest_scale)
            elif reader.op not in WEIGHTED and reader.out not in seen:
                seen.add(reader.out)
                open_slots.append(reader.out)
    return max((scale for scale in scales if not math.isnan(scale)), default=math.nan)
