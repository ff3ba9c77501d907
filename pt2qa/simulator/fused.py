"""Quantize-dequantize in one pass over memory, equal in every bit to the ``quantized_decomposed`` pair.

The pair computes ``q = clamp(round(x * (1/s)) + zp, qmin, qmax)`` as an integer tensor and ``(q - zp) * s`` from it:
seven passes over memory, two of them conversions.  Here ``round(x * (1/s))`` is clamped to ``qmin - zp .. qmax - zp``
and scaled, which needs no integer tensor; every step is exact in float32 as long as the clamp bounds are.  Three
details keep the bits equal:

* rounding comes before the zero point, so ties go to the same even integer;
* NaN becomes integer 0 in the pair, so it becomes ``-zp`` here;
* the pair never returns a negative zero, so the last step adds 0.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 19
"""Elements of one pass: 2 MiB of float32, which stays in the cache between the five steps."""
_EXACT_BOUND = 1 << 23
"""Integers up to this, and their sums with a zero point, are exact in float32."""


def is_exact(quant_min: int, quant_max: int, zero_point: int) -> bool:
    """Whether :func:`quantize_dequantize` is exact for these parameters (int8, uint8 and int16 are, int32 is not)."""
    return max(abs(quant_min), abs(quant_max), abs(zero_point)) * 2 <= _EXACT_BOUND


def quantize_dequantize(
    x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, *, in_place: bool = False
) -> Tensor:
    """``dequantize(quantize(x))`` with one scale for the whole tensor.

    Args:
        x: float32 tensor of any shape and strides.
        scale: width of one integer step, in the unit of ``x``; positive.
        zero_point: the integer that stands for 0.0.
        quant_min: smallest integer.
        quant_max: largest integer.
        in_place: overwrite ``x`` and return it, for values that nobody reads again.

    Returns:
        float32 tensor of the shape of ``x``.

    >>> quantize_dequantize(torch.tensor([0.26, 9.0, -9.0]), 0.5, 0, -8, 7)
    tensor([ 0.5000,  3.5000, -4.0000])
    """
    low, high = quant_min - zero_point, quant_max - zero_point
    out = x if in_place else torch.empty_like(x)
    inverse = 1.0 / scale
    zero = x.new_zeros(())
    for source, target in _flat_chunks(x, out):
        torch.mul(source, inverse, out=target)
        target.round_().nan_to_num_(nan=-zero_point).clamp_(low, high)
        torch.add(zero, target, alpha=scale, out=target)
    return out


def count_clamped(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> int:
    """How many values of ``x`` lie, once rounded, outside ``quant_min .. quant_max``: those that the clamp moves.

    >>> count_clamped(torch.tensor([0.26, 9.0, -4.0]), 0.5, 0, -8, 7)
    1
    """
    low, high, inverse = quant_min - zero_point, quant_max - zero_point, 1.0 / scale
    if not x.numel():
        return 0
    bounds = torch.stack(torch.aminmax(x)).mul_(inverse).round_().tolist()
    if bounds[0] >= low and bounds[1] <= high:
        return 0
    clamped = 0
    for chunk in x.reshape(-1).split(_CHUNK):
        steps = (chunk * inverse).round_()
        clamped += int(((steps < low) | (steps > high)).sum())
    return clamped


def _flat_chunks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Chunks of both tensors; tensors of another layout than one dense block are taken whole."""
    if x.numel() <= _CHUNK or not (x.is_contiguous() and out.is_contiguous()):
        return [(x, out)]
    return list(zip(x.view(-1).split(_CHUNK), out.view(-1).split(_CHUNK), strict=True))
