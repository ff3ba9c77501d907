"""Statistics by channel: one number for each index of one axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._metrics import CHUNK, float64

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class ChannelStatistics:
    """What a profile says about each channel; all arrays have one number per channel.

    ``squares`` are summed distances from the mean.  Tensors with another number of channels (the axis is dynamic)
    cannot be merged: the result is ``uneven`` and empty.
    """

    count: Array
    smallest: Array
    largest: Array
    mean: Array
    squares: Array
    zeros: Array
    uneven: bool = False

    @classmethod
    def empty(cls, channels: int, *, uneven: bool = False) -> ChannelStatistics:
        none, whole = np.zeros(channels), np.zeros(channels, np.int64)
        return cls(whole, np.full(channels, np.inf), np.full(channels, -np.inf), none, none, whole, uneven)

    @classmethod
    def of(cls, x: Tensor, axis: int) -> ChannelStatistics:
        """Those of a real tensor along one of its axes, in float64."""
        total = cls.empty(x.shape[axis])
        for chunk in _chunks(x.detach(), axis):
            total = total.merge(cls._of_chunk(float64(chunk)))
        return total

    @classmethod
    def _of_chunk(cls, x: Tensor) -> ChannelStatistics:
        """Those of a float64 tensor of shape (channels, values)."""
        finite = x.isfinite()
        mean = torch.where(finite, x, 0.0).sum(1) / finite.sum(1).clamp(min=1)
        apart = torch.where(finite, x - mean[:, None], 0.0)
        parts = (
            finite.sum(1),
            torch.where(finite, x, torch.inf).amin(1),
            torch.where(finite, x, -torch.inf).amax(1),
            mean,
            apart.square_().sum(1),
            (x == 0).sum(1),
        )
        count, smallest, largest, means, squares, zeros = (part.cpu().numpy() for part in parts)
        return cls(count, smallest, largest, means, squares, zeros)

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        if self.uneven or other.uneven or len(self.count) != len(other.count):
            return ChannelStatistics.empty(0, uneven=True)
        count = self.count + other.count
        apart, total = other.mean - self.mean, np.maximum(count, 1)
        return ChannelStatistics(
            count,
            np.minimum(self.smallest, other.smallest),
            np.maximum(self.largest, other.largest),
            # A side without values has mean 0, which must not count.
            np.where(self.count == 0, other.mean, self.mean + apart * other.count / total),
            self.squares + other.squares + apart * apart * (self.count * other.count / total),
            self.zeros + other.zeros,
        )

    @classmethod
    def of_arrays(
        cls, count: Array, low: Array, high: Array, mean: Array, variance: Array, zeros: Array
    ) -> ChannelStatistics:
        if not len(count):
            return cls.empty(0, uneven=True)
        seen = count > 0
        return cls(
            count,
            np.where(seen, low, np.inf),
            np.where(seen, high, -np.inf),
            np.where(seen, mean, 0.0),
            np.where(seen, variance * count, 0.0),
            np.rint(zeros * np.maximum(count, 1)).astype(np.int64),
        )

    def arrays(self) -> tuple[Array, ...]:
        """What a report keeps: count, min, max, mean, variance, share of zeros; nan for a channel without values."""
        seen, count = self.count > 0, np.maximum(self.count, 1)
        low, high, mean = (np.where(seen, each, np.nan) for each in (self.smallest, self.largest, self.mean))
        return self.count, low, high, mean, np.where(seen, self.squares / count, np.nan), self.zeros / count


def _chunks(x: Tensor, axis: int) -> Iterator[Tensor]:
    """Pieces of shape (channels, values): whole slices along the first other axis, half a million elements at most."""
    if not x.numel():
        return
    rows = x.movedim(axis, -1)
    if x.dim() == 1:
        yield rows[:, None]
        return
    for piece in rows.split(max(1, CHUNK // max(1, rows[0].numel()))):
        yield piece.reshape(-1, x.shape[axis]).T
