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

CHUNK = 1 << 19
"""Elements of one pass: 2 MiB of float32, which stays in the cache between the five steps."""
_EXACT_BOUND = 1 << 23
"""Integers up to this, and their sums with a zero point, are exact in float32."""


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
    clamped: list[int] | None = None,
) -> Tensor:
    """``dequantize(quantize(x))`` with one scale for the whole tensor.

    Args:
        x: float32 tensor of any shape and strides.
        scale: width of one integer step, in the unit of ``x``; positive.
        zero_point: the integer that stands for 0.0.
        quant_min: smallest integer.
        quant_max: largest integer.
        out: float32 tensor of the shape of ``x`` to write to; ``x`` itself where nobody reads it again.
        clamped: where given, the number of values that the clamp moves is appended to it.

    Returns:
        float32 tensor of the shape of ``x``.

    >>> quantize_dequantize(torch.tensor([0.26, 9.0, -9.0]), 0.5, 0, -8, 7)
    tensor([ 0.5000,  3.5000, -4.0000])
    """
    low, high = quant_min - zero_point, quant_max - zero_point
    out = torch.empty_like(x) if out is None else out
    inverse, moved = 1.0 / scale, 0
    zero = x.new_zeros(())
    for source, target in _flat_chunks(x, out):
        torch.mul(source, inverse, out=target)
        target.round_().nan_to_num_(nan=-zero_point)
        if clamped is not None:
            moved += _outside(target, low, high)
        target.clamp_(low, high)
        torch.add(zero, target, alpha=scale, out=target)
    if clamped is not None:
        clamped.append(moved)
    return out


def _outside(steps: Tensor, low: int, high: int) -> int:
    """How many of the rounded values the clamp will move."""
    if not steps.numel():
        return 0
    smallest, largest = torch.stack(torch.aminmax(steps)).tolist()
    if smallest >= low and largest <= high:
        return 0
    # Three float passes: comparisons make booleans, which cost more to write and to count.
    return int(torch.count_nonzero(steps - steps.clamp(low, high)))


def _flat_chunks(x: Tensor, out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Chunks of both tensors; tensors of another layout than one dense block are taken whole."""
    if x.numel() <= CHUNK or not (x.is_contiguous() and out.is_contiguous()):
        return [(x, out)]
    return list(zip(x.view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True))
