"""The converted graph's own quantize and dequantize ops, on one piece of a large value after the other.

Each op is half a dozen passes over memory that is new each time; of a piece, all of them are in cache.  Every step
(multiplication, rounding, sum, clamp, cast) is exact or correctly rounded for each element by itself, so the bits are
those of the whole value, and so are the strides of a plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._metrics import CHUNK
from pt2qa._simulator.strides import flat, is_plain

_PER_TENSOR: Final = frozenset(
    getattr(op, overload)
    for op in (QUANTIZED_DECOMPOSED.quantize_per_tensor, QUANTIZED_DECOMPOSED.dequantize_per_tensor)
    for overload in ("default", "tensor")
)
_PER_CHANNEL: Final = frozenset(
    {QUANTIZED_DECOMPOSED.quantize_per_channel.default, QUANTIZED_DECOMPOSED.dequantize_per_channel.default}
)


def call_op(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an op of a graph returns; computed in pieces if it quantizes or dequantizes a large value."""
    value, *params = args or (None,)
    if not isinstance(value, Tensor) or value.numel() <= CHUNK or not is_plain(value):
        return function(*args, **kwargs)
    by_channel = function in _PER_CHANNEL and _has_channels_first(value, params)
    if not by_channel and function not in _PER_TENSOR:
        return function(*args, **kwargs)
    size = max(1, CHUNK // value[0].numel()) if by_channel else CHUNK
    result: Tensor | None = None
    for start in range(0, len(value) if by_channel else value.numel(), size):
        piece = slice(start, start + size)
        own = [each[piece] if by_channel and isinstance(each, Tensor) else each for each in params]
        made = function((value if by_channel else flat(value))[piece], *own, **kwargs)
        if result is None:
            result = value.new_empty_strided(value.shape, value.stride(), dtype=made.dtype)
        (result if by_channel else flat(result))[piece].copy_(made)
    return result


def _has_channels_first(value: Tensor, params: Sequence[Any]) -> bool:
    """Whether each channel is one block of memory and has a scale and a zero point of its own."""
    scales, zero_points, axis, *_ = params
    return axis == 0 and value.is_contiguous() and len(scales) == len(zero_points) == len(value)
