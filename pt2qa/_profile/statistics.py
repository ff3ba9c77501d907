"""What is known about a value: sums that add up over chunks, batches and ranks.

float32 and narrower float types are summed pairwise in float32 over chunks of half a million elements, around a centre
near the mean, and in float64 across chunks.  Every other dtype, chunks with NaN or infinities, and sums of squares that
leave the range of float32 take the exact route: float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pt2qa._metrics import CHUNK, SMALLEST_SQUARES, float64, scratch, value_range
from pt2qa._profile.histogram import SHIFT, Histogram
from pt2qa._report.sums import LARGEST, MERGED, SMALLEST, Array, Mergeable

_PREFIXES = 1 << (32 - SHIFT)
"""How many values the bits of a float32 have that a bin is told by."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and the sum of squared distances from it, of finite values.

    Source:
        Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

    >>> Moments(2, 1.5, 0.5).merge(Moments(1, 3.0, 0.0))
    Moments(count=3, mean=2.0, squares=2.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart * apart * (self.count * (other.count / count)),
        )

    @property
    def variance(self) -> float:
        """Population variance; nan if nothing was seen."""
        return self.squares / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Statistics(Mergeable):
    """Everything a profile says about a value over the whole tensor; merges of chunks equal the whole.

    >>> seen = Statistics.of(torch.tensor([0.0, 1.0, 5.0, float("nan")]), histogram=True)
    >>> seen.count, seen.smallest, seen.largest, seen.moments.mean, seen.zeros, seen.nans
    (4, 0.0, 5.0, 2.0, 1, 1)
    """

    count: int = 0
    moments: Moments = field(default_factory=Moments, metadata=MERGED)
    smallest: float = field(default=math.inf, metadata=SMALLEST)
    largest: float = field(default=-math.inf, metadata=LARGEST)
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    histogram: Histogram | None = field(default=None, metadata=MERGED)

    @classmethod
    def of(cls, x: Tensor, *, histogram: bool) -> Statistics:
        """The statistics of a tensor of any dtype, shape and strides; a complex value counts as its two parts."""
        total, prefixes, rest = cls(), np.zeros(_PREFIXES, np.int64), Histogram()
        for chunk in flat_chunks(x):
            found = _fast(chunk)
            if found is None:
                found, exact = _exact(chunk)
                rest = rest.merge(exact) if histogram else rest
            elif histogram:
                prefixes += _prefix_counts(chunk)
            total = total.merge(found)
        return replace(total, histogram=Histogram.of_prefixes(prefixes).merge(rest)) if histogram else total


def flat_chunks(x: Tensor) -> Iterator[Tensor]:
    """Flat pieces of a tensor, without a copy if it is dense; float16 and bfloat16 come as float32."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_contiguous():
        # Another order of dimensions, such as channels last, is dense too.
        x = x.permute(sorted(range(x.dim()), key=lambda axis: x.stride()[axis], reverse=True))
    for piece in x.reshape(-1).split(CHUNK) if x.numel() else ():
        yield piece.float() if piece.dtype in (torch.float16, torch.bfloat16) else piece


def _fast(x: Tensor) -> Statistics | None:
    """The float32 route; None if it does not apply or its result cannot be trusted."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return None
    smallest, largest = value_range(x)
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return None
    count = x.numel()
    total = float(x.sum())
    centre = float(np.float32(total / count))
    if not math.isfinite(centre):
        return None
    apart = torch.sub(x, centre, out=scratch(x))
    shift = float(apart.sum())
    squares = float(apart.square_().sum())
    if not (math.isfinite(squares) and (squares >= SMALLEST_SQUARES or smallest == largest)):
        return None
    # Sums of ones are exact in float32 up to 2**24.
    filled = count if smallest > 0 or largest < 0 else int(torch.sign(x, out=scratch(x)).abs_().sum())
    moments = Moments(count, centre + shift / count, max(0.0, squares - shift * shift / count))
    return Statistics(count, moments, smallest, largest, count - filled)


def _exact(x: Tensor) -> tuple[Statistics, Histogram]:
    """The float64 route, which also separates NaN and infinities."""
    count = x.numel()
    x = float64(x)
    finite = x.isfinite()
    nans = int(x.isnan().sum())
    infs = count - nans - int(finite.sum())
    x = x[finite] if nans or infs else x
    if not x.numel():
        return Statistics(count, nans=nans, infs=infs), Histogram()
    mean = float(x.mean())
    moments = Moments(x.numel(), mean, float((x - mean).square_().sum()))
    zeros = int((x == 0).sum())
    return Statistics(count, moments, float(x.min()), float(x.max()), zeros, nans, infs), Histogram.of(x.cpu().numpy())


def _prefix_counts(x: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each prefix of bits occurs in a flat finite float32 tensor; negative values come first."""
    prefix = torch.bitwise_right_shift(x.view(torch.int32), SHIFT, out=scratch(x).view(torch.int32))
    prefix += _PREFIXES // 2
    return torch.bincount(prefix, minlength=_PREFIXES).numpy()


@dataclass(frozen=True, slots=True, eq=False)
class ChannelStatistics:
    """What a profile says about each channel, as its report keeps it: all arrays have one number per channel.

    A channel without values has nan, and 0 as its share of ``zeros``.  Tensors with another number of channels (the
    axis is dynamic) cannot be merged: the result is ``uneven``, which has no channels.
    """

    count: Array
    min: Array
    max: Array
    mean: Array
    variance: Array
    zeros: Array

    @classmethod
    def empty(cls, channels: int = 0) -> ChannelStatistics:
        none = np.full(channels, np.nan)
        return cls(np.zeros(channels, np.int64), none, none, none, none, np.zeros(channels))

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
        count, total = finite.sum(1), finite.sum(1).clamp(min=1)
        mean = torch.where(finite, x, 0.0).sum(1) / total
        variance = torch.where(finite, x - mean[:, None], 0.0).square_().sum(1) / total
        low, high = torch.where(finite, x, torch.inf).amin(1), torch.where(finite, x, -torch.inf).amax(1)
        known = (torch.where(count > 0, part, torch.nan) for part in (low, high, mean, variance))
        return cls(*(part.cpu().numpy() for part in (count, *known, (x == 0).sum(1) / total.double())))

    @property
    def uneven(self) -> bool:
        return not len(self.count)

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        if len(self.count) != len(other.count):
            return ChannelStatistics.empty()
        count = self.count + other.count
        ours, theirs = self.count / np.maximum(count, 1), other.count / np.maximum(count, 1)

        def mean(one: Array, another: Array) -> Array:
            both = np.where(ours > 0, one, 0.0) * ours + np.where(theirs > 0, another, 0.0) * theirs
            return np.where(count > 0, both, np.nan)

        between = np.where((ours > 0) & (theirs > 0), other.mean - self.mean, 0.0) ** 2 * ours * theirs
        return ChannelStatistics(
            count,
            np.fmin(self.min, other.min),
            np.fmax(self.max, other.max),
            mean(self.mean, other.mean),
            mean(self.variance, other.variance) + between,
            (self.zeros * self.count + other.zeros * other.count) / np.maximum(count, 1),
        )

    def arrays(self) -> tuple[Array, ...]:
        return self.count, self.min, self.max, self.mean, self.variance, self.zeros


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
