"""Strides: the layout of each op's output, down to dimensions of size one.

Two tensors with equal values but different strides are not the same to torch: a convolution chooses its kernel by the
strides, even by those of dimensions of size one, and other kernels give other bits.  An image that was read as
``(height, width, channel)`` and passed to the model as ``.permute(2, 0, 1)[None]`` has strides that some ops keep and
others change.  So an op that replaces another (the fused op for a quantize-dequantize pair, ``relu`` for ``relu_``)
must return the strides that the other would return.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED, storage_number

Strides = tuple[int, ...]


def is_plain(x: Tensor) -> bool:
    """Whether a tensor has the strides of a new one, contiguous or channels last.

    Every pointwise op keeps these.  If the strides fit both layouts, the tensor counts as contiguous.
    """
    shape, strides = x.shape, x.stride()
    if strides == _contiguous(shape):
        return True
    return len(shape) == 4 and shape[1] > 1 and shape[2] * shape[3] > 1 and strides == _channels_last(shape)


def flat(x: Tensor) -> Tensor:
    """A one-dimensional view of a plain tensor, in memory order."""
    return (x if x.is_contiguous() else x.permute(0, 2, 3, 1)).reshape(-1)


def after_rounding(x: Tensor) -> Strides:
    return x.stride() if is_plain(x) else _after_rounding(x.shape, x.stride(), x.device)


def with_strides(x: Tensor, strides: Strides) -> Tensor:
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


def copied(x: Tensor) -> Tensor:
    """A copy with the same strides; if elements of ``x`` share memory, the strides are those of ``x.clone()``."""
    overlaps = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.clone() if overlaps else x.new_empty_strided(x.shape, x.stride()).copy_(x)


def copied_together(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides, which share memory where the values do."""
    memory = {storage_number(x): x.untyped_storage().clone() for x in values}
    return [x.new_empty(0).set_(memory[storage_number(x)], x.storage_offset(), x.shape, x.stride()) for x in values]


@functools.lru_cache(1024)
def _contiguous(shape: torch.Size) -> Strides:
    return torch.empty(shape, device="meta").stride()


@functools.lru_cache(1024)
def _channels_last(shape: torch.Size) -> Strides:
    return torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()


@functools.lru_cache(1024)
def _after_rounding(shape: torch.Size, strides: Strides, device: torch.device) -> Strides:
    # Tried on real tensors: kernels, not the rules of the meta device, decide about dimensions of size one.
    ops = QUANTIZED_DECOMPOSED
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    x = torch.zeros(span if shape.numel() else 0, device=device).as_strided(shape, strides)
    arguments = (1.0, 0, -128, 127, torch.int8)
    found: Strides = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *arguments), *arguments).stride()
    return found
