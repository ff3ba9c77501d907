"""Rounded constants, kept as integers: their float values are made when an op reads them.

A float value for each weight would be a second model in memory.  The first that fit into a number of bytes are kept all
the same, since making them takes time in each run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import is_alone
from pt2qa._metrics import CHUNK

WEIGHT_CACHE: Final = 1 << 27
"""Bytes of dequantized constants that a program keeps: those of ResNet-50 fit."""

_EXACT: Final = frozenset({torch.int8, torch.uint8, torch.int16})
"""Integers that are exact in float32, and so are their differences to a zero point of the same dtype."""


@dataclass(eq=False, slots=True)
class ValueCache:
    """How many bytes are left for values that are kept, and memory for one that is not.

    What was kept once stays.  The memory is used again once nothing else has it, since writing to fresh memory takes
    ten times as long; it is at most as large as the whole cache.
    """

    left: int
    size: int = field(init=False)
    _memory: list[Tensor] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.left

    def takes(self, value: Tensor) -> bool:
        """Whether there is room for a value; if so, it is used up."""
        size = value.untyped_storage().nbytes()
        if size > self.left:
            return False
        self.left -= size
        return True

    def memory_like(self, integers: Tensor) -> Tensor | None:
        """A float32 tensor of their shape for a value that is not kept; None for one that is, or is too large."""
        count, known = integers.numel(), None
        if 4 * count <= self.left or 4 * count > self.size:
            return None
        # Taken off the list, so that no other thread has it.
        with contextlib.suppress(IndexError):
            known = self._memory.pop()
        if known is None or known.numel() < count or known.device != integers.device or not is_alone(known):
            known = torch.empty(count, device=integers.device)
        like = torch.empty_like(integers, device="meta")
        found = torch.empty(0, device=integers.device)
        found.set_(known.untyped_storage(), 0, like.shape, like.stride())
        self._memory = [known]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class Integers:
    """What ``(integers - zero_point) * scale`` is made from in float32, bit for bit as the ops of the graph compute it.

    They make a tensor of 64-bit integers first, and take several times as long.

    Attributes:
        integers: of any shape.
        scale: a number, or float32 ones that broadcast with the integers.
        zero_point: like ``scale``; None if all are 0.
    """

    integers: Tensor
    scale: Any
    zero_point: Any

    @classmethod
    def of(cls, integers: Tensor, scale: Any, zero_point: Any, axis: int | None) -> Integers | None:
        """From parameters of the whole tensor, or one for each channel of ``axis``.

        None where only the op itself is sure to give these bits.
        """
        if integers.dtype not in _EXACT or not integers.is_contiguous() or not integers.dim():
            return None
        if axis is not None:
            # Along another axis, the ops may return other strides.
            if axis != 0 or not (
                isinstance(scale, Tensor) and scale.dtype == torch.float32 and isinstance(zero_point, Tensor)
            ):
                return None
            # An observer that saw no value has one scale for all channels.
            if not len(integers) == scale.numel() == zero_point.numel():
                return None
            shape = (-1, *[1] * (integers.dim() - 1))
            moves = bool((zero_point != 0).any())
            return cls(integers, scale.reshape(shape), zero_point.reshape(shape).float() if moves else None)
        if not (isinstance(scale, float) and isinstance(zero_point, int)):
            return None
        return cls(integers, scale, zero_point or None)

    def value(self, out: Tensor | None = None) -> Tensor:
        """The whole value, in ``out`` or as a new tensor."""
        result = torch.empty_like(self.integers, dtype=torch.float32) if out is None else out
        rows = max(1, CHUNK // max(1, self.integers[:1].numel()))
        for start in range(0, len(result), rows):
            # A block at a time: what is written is still in cache when it is read.
            self.rows(start, start + rows, out=result[start : start + rows])
        return result

    def rows(self, start: int, end: int, out: Tensor) -> Tensor:
        """Some of the value along the first axis, written to ``out``."""

        def own(params: Any) -> Any:
            return params[start:end] if isinstance(params, Tensor) else params

        out.copy_(self.integers[start:end])
        if self.zero_point is not None:
            out.sub_(own(self.zero_point))
        return out.mul_(own(self.scale))


class Stored:
    """A constant that is made from what the graph holds of it, with the same bits each time."""

    __slots__ = ("_cache", "_make", "_value")

    def __init__(self, make: Callable[[], Any] | Integers, cache: ValueCache | None) -> None:
        """``cache`` is None for what is never kept, such as a view of another constant."""
        self._make, self._cache = make, cache
        self._value: Any = None

    @property
    def by_rows(self) -> Any:
        """The integers, where the value would be made from them now; else the value."""
        return self._make if self._value is None and isinstance(self._make, Integers) else self.value()

    def value(self) -> Any:
        """The value; nothing may write to it."""
        if self._value is not None:
            return self._value
        with torch.no_grad():
            if isinstance(self._make, Integers):
                made = self._make.value(None if self._cache is None else self._cache.memory_like(self._make.integers))
            else:
                made = self._make()
        if self._cache is not None and isinstance(made, Tensor) and self._cache.takes(made):
            self._value = made
        return made


def read(constant: Any) -> Any:
    return constant.value() if type(constant) is Stored else constant


def shares_memory(value: Any, source: Any) -> bool:
    """Whether a value is a view of another, or no tensor at all."""
    if not (isinstance(value, Tensor) and isinstance(source, Tensor)):
        return True
    return value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
