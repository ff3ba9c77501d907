"""A program with other parameters at some sites, to measure what they would give without quantizing again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pt2qa._simulator.fused import quantize_dequantize
from pt2qa._simulator.program import Program, QuantParams
from pt2qa._simulator.site_functions import SiteFunction
from pt2qa._simulator.strides import after_rounding

EPSILON = torch.finfo(torch.float32).eps
"""The smallest scale, as in torchao's observers."""

INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
"""The whole range of a dtype."""


def with_parameters(
    program: Program, activations: Mapping[int, SiteFunction], constants: Mapping[int, Tensor]
) -> Program:
    """A program in which some sites round otherwise.

    Args:
        program: what to start from; it is not changed.
        activations: by site, the function that rounds it.
        constants: by site of a weight or bias, its rounded value.
    """
    steps = tuple(
        replace(step, function=activations[step.site], converted=None, duplicate_of=None)
        if step.site is not None and step.site in activations
        else step
        for step in program.steps
    )
    held = tuple(
        replace(constant, quantized=constants[constant.site])
        if constant.site is not None and constant.site in constants
        else constant
        for constant in program.constants
    )
    return replace(program, steps=steps, constants=held)


def fitted(lowest: float, highest: float, low: int, high: int) -> QuantParams:
    """Parameters per tensor that cover a range and 0: ``scale = (highest - lowest) / (high - low)``."""
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    scale = max((highest - lowest) / (high - low), EPSILON)
    zero_point = min(max(low - round(lowest / scale), low), high)
    return QuantParams("", float(torch.tensor(scale)), zero_point, low, high)


def rounding(params: QuantParams) -> SiteFunction:
    """The function of parameters per tensor."""
    assert isinstance(params.scale, float)
    assert isinstance(params.zero_point, int)
    return functools.partial(_round, params.scale, params.zero_point, params.quant_min, params.quant_max)


def rounding_by_channel(lowest: Tensor, highest: Tensor, axis: int, low: int, high: int) -> SiteFunction:
    """The same with parameters for each channel, which no kernel has: what the channels' ranges cost."""
    lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
    scale = ((highest - lowest) / (high - low)).clamp_(min=EPSILON)
    zero_point = (low - torch.round(lowest / scale)).clamp_(low, high)
    return functools.partial(_round_by_channel, scale, zero_point, axis, low, high)


def rounded_weight(value: Tensor, axis: int | None) -> Tensor:
    """int8 weights as kernels like them best: symmetric, -127..127, one scale for each output channel."""
    axes = [each for each in range(value.dim()) if each != axis]
    largest = value.abs().amax(axes, keepdim=True) if axis is not None and axes else value.abs().amax()
    scale = (largest / 127.0).clamp_(min=EPSILON)
    return torch.round(value / scale).clamp_(-127, 127).mul_(scale)


def _round(scale: float, zero_point: int, low: int, high: int, x: Tensor, **options: object) -> Tensor:
    return quantize_dequantize(x, scale, zero_point, low, high, **options)  # type: ignore[arg-type]


def _round_by_channel(
    scale: Tensor, zero_point: Tensor, axis: int, low: int, high: int, x: Tensor, **options: object
) -> Tensor:
    shape = [-1 if each == axis % x.dim() else 1 for each in range(x.dim())]
    steps, zero = scale.view(shape), zero_point.view(shape)
    out = x.new_empty_strided(x.shape, after_rounding(x))
    return out.copy_((torch.round(x / steps) + zero).clamp_(low, high).sub_(zero).mul_(steps))
