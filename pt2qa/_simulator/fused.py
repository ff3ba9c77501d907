"""Quantize-dequantize in one pass over memory, bit for bit equal to the ``quantized_decomposed`` pair.

The pair computes ``q = clamp(round(x * (1/s)) + zp, qmin, qmax)`` as an integer tensor and ``(q - zp) * s`` from it:
seven passes over memory, two of them conversions.  Here ``round(x * (1/s))`` is clamped to ``qmin - zp .. qmax - zp``
and scaled, which needs no integer tensor; every step is exact in float32 as long as the clamp bounds are.  Three
details keep the bits equal:

* rounding comes before the zero point, so ties round to the same even integer;
* NaN becomes integer 0 in the pair, so it becomes ``-zp`` here;
* the pair never returns a negative zero, so the last step adds 0.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._graph.internals.nodes import VALUE
from pt2qa._metrics import CHUNK, Range, scratch, value_range
from pt2qa._simulator import quant_ops
from pt2qa._simulator.program import QuantParams
from pt2qa._simulator.strides import after_rounding, flat, is_plain

_EXACT_BOUND = 1 << 23
"""Integers up to this, and their sums with a zero point, are exact in float32."""


@dataclass(slots=True)
class RoundingStats:
    """What is known about the values that a site rounds: given before, ``clamped`` and ``range`` found by rounding.

    ``source`` is their range before rounding, ``clamped`` how many the clamp moved, if it is to count them.
    """

    source: Range | None = None
    count: bool = True
    clamped: int = 0
    range: Range | None = None


def is_exact(quant_min: int, quant_max: int, zero_point: int) -> bool:
    """Whether :func:`quantize_dequantize` is exact for these parameters (int8, uint8 and int16 are, int32 is not)."""
    return max(abs(quant_min), abs(quant_max), abs(zero_point)) * 2 <= _EXACT_BOUND


def quantize_dequantize(
    x: Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    *,
    out: Tensor | None = None,
    stats: RoundingStats | None = None,
) -> Tensor:
    """``dequantize(quantize(x))`` with one scale for the whole tensor, a float32 one, with the strides of the pair.

    The result is written to ``out``, which may be ``x`` itself if it is not read again, unless its strides differ from
    those that the pair returns.

    >>> quantize_dequantize(torch.tensor([0.26, 9.0, -9.0]), 0.5, 0, -8, 7)
    tensor([ 0.5000,  3.5000, -4.0000])
    """
    low, high = quant_min - zero_point, quant_max - zero_point
    strides = after_rounding(x)
    if out is None or out.stride() != strides:
        out = x.new_empty_strided(x.shape, strides)
    inverse = 1.0 / scale
    zero = x.new_zeros(())
    for source, target in _flat_chunks(x, out):
        steps = _step_range(source, inverse, stats.source) if stats is not None and source.numel() else None
        torch.mul(source, inverse, out=target)
        target.round_()
        # The range shows whether there is a NaN or a value to clamp, so most tensors need no extra pass.
        if steps is None or not (low <= steps[0] and steps[1] <= high):
            if _may_have_nan(target) if steps is None else _has_nan(steps):
                target.nan_to_num_(nan=-zero_point)
            if stats is not None and stats.count:
                stats.clamped += _count_outside(target, low, high, steps)
            target.clamp_(low, high)
        torch.add(zero, target, alpha=scale, out=target)
        if stats is not None and steps is not None:
            found = value_range(target) if _has_nan(steps) else _dequantized(steps, low, high, scale)
            before = stats.range or found
            stats.range = min(before[0], found[0]), max(before[1], found[1])
    return out


def _may_have_nan(steps: Tensor) -> bool:
    """Whether there may be a NaN; a sum takes a third of the time of replacing them, but makes a GPU wait."""
    return not steps.is_cpu or bool(steps.sum().isnan())


def _has_nan(steps: Range) -> bool:
    """Whether an end of a range is NaN: both are, of a value; one, where an infinity meets the scale that it made."""
    return bool(np.isnan(steps).any())


def _step_range(x: Tensor, inverse: float, known: Range | None) -> Range:
    """Smallest and largest rounded step before the clamp; rounding does not change the order of values."""
    smallest, largest = value_range(x) if known is None else known
    with np.errstate(over="ignore", invalid="ignore"):
        return _rounded(smallest, inverse), _rounded(largest, inverse)


def _rounded(value: float, inverse: float) -> float:
    return float(np.rint(np.float32(value) * np.float32(inverse)))


def _dequantized(steps: Range, low: int, high: int, scale: float) -> Range:
    with np.errstate(invalid="ignore"):  # 0 steps of an infinite scale
        smallest, largest = (float(np.float32(min(max(step, low), high)) * np.float32(scale)) + 0.0 for step in steps)
    return smallest, largest


def _count_outside(steps: Tensor, low: int, high: int, found: Range | None) -> int:
    """How many of the rounded values the clamp will move; ``found`` is their range, nan if unknown."""
    # Arithmetic on floats, because booleans from comparisons cost more to write and count.  Sums of ones are exact.
    smallest, largest = found if found is not None else (np.nan, np.nan)
    flat = steps.reshape(-1)
    beyond = scratch(flat)
    above = 0.0 if largest <= high else float(torch.sub(flat, high, out=beyond).clamp_(0, 1).sum())
    below = 0.0 if smallest >= low else float(torch.sub(flat, low, out=beyond).clamp_(-1, 0).sum())
    return int(above - below)


def _flat_chunks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Chunks of both tensors; a tensor that is not one dense block is a single chunk."""
    if x.numel() <= CHUNK or x.stride() != out.stride() or not is_plain(x):
        return [(x, out)]
    return list(zip(flat(x).split(CHUNK), flat(out).split(CHUNK), strict=True))


SiteFunction = Callable[..., Any]
"""``(x, *, out=None, stats=None) -> dequantized x``; see :func:`pt2qa._simulator.fused.quantize_dequantize`."""


def is_elementwise(function: SiteFunction) -> bool:
    """Whether a site may be computed in pieces: its parameters do not depend on the whole tensor."""
    return isinstance(function, functools.partial) and function.func is _static


def fused_site(quantize: Node, params: QuantParams) -> SiteFunction | None:
    """The fused op; None if it would not be exact (per channel, int32, values that are not float32)."""
    source = quantize.args[0]
    value = source.meta.get(VALUE) if isinstance(source, Node) else None
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        return None
    low, high = params.quant_min, params.quant_max
    if quant_ops.is_static_per_tensor(quantize):
        scale, zero_point = params.scale, params.zero_point
        if isinstance(scale, float) and isinstance(zero_point, int) and scale > 0 and is_exact(low, high, zero_point):
            return functools.partial(_static, scale, zero_point, low, high)
    choose = quant_ops.chosen_by(quantize)
    if choose is not None and quant_ops.is_dynamic_per_tensor(quantize) and is_exact(low, high, high - low):
        return functools.partial(_dynamic, functools.partial(_call, choose), low, high)
    return None


def converted_site(quantize: Node, dequantize: Node, tensor: Callable[[Node], Any]) -> SiteFunction:
    """The ops of the converted graph, one after the other; ``tensor`` returns the constant value of an argument."""
    choose = quant_ops.chosen_by(quantize)
    if choose is not None:

        def dynamic(x: Tensor, *, out: Tensor | None = None, stats: RoundingStats | None = None) -> Any:
            chosen = _call(choose, x)
            return _with(chosen, dequantize, _with(chosen, quantize, x))

        return dynamic
    forth, back = torch.fx.map_arg((quantize.args[1:], dequantize.args[1:]), tensor)

    def static(x: Tensor, *, out: Tensor | None = None, stats: RoundingStats | None = None) -> Any:
        return _call(dequantize, _call(quantize, x, *forth, skip=len(quantize.args)), *back, skip=len(dequantize.args))

    return static


def _call(node: Node, *values: Any, skip: int = 1) -> Any:
    """Runs a node's op on ``values``, followed by its own arguments from number ``skip`` on."""
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(*values, *node.args[skip:], **node.kwargs)


def _with(chosen: Sequence[Any], node: Node, value: Any) -> Any:
    """Runs a node's op on a value, with a scale and zero point that were just computed."""
    args = (chosen[int(str(arg.args[1]))] if isinstance(arg, Node) else arg for arg in node.args[1:])
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(value, *args, **node.kwargs)


def _static(scale: float, zero_point: int, low: int, high: int, x: Tensor, **options: Any) -> Tensor:
    return quantize_dequantize(x, scale, zero_point, low, high, **options)


def _dynamic(choose: Callable[[Tensor], Any], low: int, high: int, x: Tensor, **options: Any) -> Tensor:
    scale, zero_point = choose(x)
    return quantize_dequantize(x, float(scale), int(zero_point), low, high, **options)
