"""The converted graph's own quantize and dequantize ops, on one piece of a large value after the other.

Each op is half a dozen passes over memory that is new each time; of a piece, all of them are in cache.  Every step
(multiplication, rounding, sum, clamp, cast) is exact or correctly rounded for each element by itself, so the bits are
those of the whole value, and so are the strides of a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
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


def call_op(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an op of a graph returns, computed in pieces if it rounds a large value with one scale, or undoes that."""
    if function not in _PER_TENSOR or not isinstance(args[0], Tensor):
        return function(*args, **kwargs)
    value, *params = args
    if value.numel() <= CHUNK or not is_plain(value):
        return function(value, *params, **kwargs)
    # Without an element, an op only shows its dtype.
    dtype = function(flat(value)[:0], *params, **kwargs).dtype
    result = value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
    for source, target in zip(flat(value).split(CHUNK), flat(result).split(CHUNK), strict=True):
        target.copy_(function(source, *params, **kwargs))
    return result
