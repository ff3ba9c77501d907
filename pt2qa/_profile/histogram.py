"""Histograms with fixed bins, so that those of chunks merge exactly, and arrays of many values as a report keeps them.

The bins are those of a float32's first bits: sign, exponent and the first five bits of the mantissa.  They cover every
magnitude, each is at most 1/32 as wide as its values are large, and they do not depend on data.  Does not use torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, nan
from typing import Final

import numpy as np

from pt2qa._report.sums import Array
from pt2qa.errors import ReportError

Packed = dict[str, Array]
"""Arrays by name; those of value i are ``offsets[i]`` to ``offsets[i + 1]``."""

OFFSETS: Final = "offsets"
HISTOGRAM: Final = ("bins", "counts")
CHANNELS: Final = ("count", "min", "max", "mean", "variance", "zeros")

MANTISSA_BITS: Final = 5
"""Bits of the mantissa that tell bins apart: 32 bins for each power of two."""

SHIFT: Final = 23 - MANTISSA_BITS
"""Bits of a float32 that a bin's number leaves out."""

BINS: Final = 255 << MANTISSA_BITS
"""Bins of one sign; the number of a negative bin is negative, and bin 0 holds both zeros."""

RELATIVE_ERROR: Final = 1 / 64
"""How far a quantile may be from the value that has this rank, as a share of it: half a bin, for |x| ≥ 1.2e-38."""

_SMALLEST: Final = float(np.array(1 << SHIFT, np.int32).view(np.float32))
"""Upper edge of bin 0: 3.7e-40."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many values fell into each bin; empty bins are left out.

    ``a.merge(b)`` is exact, and neither order nor grouping of merges changes it.

    Args:
        bins: numbers of the bins, ascending, int32.
        counts: how many values each holds, int64.

    >>> chunks = Histogram.of(np.array([1.0, 1.01])).merge(Histogram.of(np.array([-3.0])))
    >>> chunks.counts.tolist(), chunks.quantile(0.5)
    ([1, 2], 1.015625)
    """

    bins: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def of(cls, values: Array) -> Histogram:
        """The histogram of finite values of any shape; values beyond float32 fall into its last bin."""
        largest = np.finfo(np.float32).max
        bits = np.clip(np.asarray(values, np.float64), -largest, largest).astype(np.float32).ravel().view(np.int32)
        magnitudes = (bits & 0x7FFFFFFF) >> SHIFT
        bins, counts = np.unique(np.where(bits < 0, -magnitudes, magnitudes), return_counts=True)
        return cls(bins.astype(np.int32), counts.astype(np.int64))

    @classmethod
    def of_prefixes(cls, counts: Array) -> Histogram:
        """From how often each prefix of bits occurred: negative values by magnitude, then positive ones."""
        half = len(counts) // 2
        dense = np.concatenate([counts[BINS - 1 : 0 : -1], counts[half : half + BINS]]).astype(np.int64)
        dense[BINS - 1] += counts[0]
        filled = np.flatnonzero(dense)
        return cls((filled - (BINS - 1)).astype(np.int32), dense[filled])

    def merge(self, other: Histogram) -> Histogram:
        bins, places = np.unique(np.concatenate([self.bins, other.bins]), return_inverse=True)
        counts = np.zeros(len(bins), np.int64)
        np.add.at(counts, places, np.concatenate([self.counts, other.counts]))
        return Histogram(bins, counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def magnitudes(self) -> Histogram:
        """The histogram of the nonzero absolute values."""
        positive, negative = self.bins > 0, self.bins < 0
        return Histogram(self.bins[positive], self.counts[positive]).merge(
            Histogram(-self.bins[negative][::-1], self.counts[negative][::-1])
        )

    @property
    def centres(self) -> Array:
        """The middle of each bin, float64; 0 for bin 0."""
        middle: Array = (_edge(np.abs(self.bins)) + _edge(np.abs(self.bins) + 1)) / 2
        return np.where(self.bins == 0, 0.0, np.sign(self.bins) * middle)

    def quantile(self, share: float) -> float:
        """The middle of the bin that holds the value of rank ``ceil(share * count)``; nan if there is none."""
        if not self.total:
            return nan
        rank = max(1, ceil(share * self.total))
        return float(self.centres[np.searchsorted(np.cumsum(self.counts), rank)])

    def contiguous(self) -> tuple[Array, Array]:
        """Edges (float64, ascending) and counts (int64, one less): gaps between bins become empty bins."""
        lower, upper = self._edges()
        edges = np.column_stack([lower, upper]).ravel()
        counts = np.column_stack([self.counts, np.zeros_like(self.counts)]).ravel()[:-1]
        wide = np.diff(edges) > 0
        return edges[np.concatenate([[True], wide])] if len(edges) else np.zeros(1), counts[wide]

    def spread(self, edges: Sequence[float] | Array, low: float, high: float) -> Array:
        """Counts in other bins, float64: assumes each bin's values lie evenly between its edges.

        The new edges ascend; a bin holds its lower edge, the last one its upper edge too.  ``low`` and ``high`` are the
        smallest and the largest of the values; without any, all counts are 0.
        """
        if not self.total:
            return np.zeros(len(edges) - 1)
        lower, upper = self._edges()
        lower, upper = np.clip(lower, low, high), np.clip(upper, low, high)
        # A bin of zero width is a jump just right of its value.
        upper = np.maximum(upper, np.nextafter(lower, np.inf) + 2 * _SMALLEST * (lower == 0))
        points = np.maximum.accumulate(np.column_stack([lower, upper]).ravel())
        below = np.cumsum(self.counts)
        levels = np.column_stack([below - self.counts, below]).ravel()
        at = np.asarray(edges, np.float64).copy()
        at[-1] = np.nextafter(at[-1], np.inf) + 2 * _SMALLEST * (at[-1] == 0)
        return np.diff(np.interp(at, points, levels, left=0.0, right=float(self.total)))

    def _edges(self) -> tuple[Array, Array]:
        near, far = _edge(np.abs(self.bins)), _edge(np.abs(self.bins) + 1)
        return (np.where(self.bins < 0, -far, near), np.where(self.bins < 0, -near, far))


def transport(left: Histogram, right: Histogram) -> float:
    """How far the values of one have to move, on average, to become those of the other: the Wasserstein-1 distance.

    ``∫ |F(x) - G(x)| dx`` with the two cumulative distributions; assumes values lie in the middle of their bins.

    Returns:
        in the unit of the values; nan if one is empty.

    Source:
        Villani, "Optimal Transport", Springer 2009, remark 6.5, for one dimension.

    >>> transport(Histogram.of(np.array([1.0, 2.0])), Histogram.of(np.array([2.0, 4.0])))
    1.5234375
    """
    if not left.total or not right.total:
        return nan
    every = np.union1d(left.bins, right.bins)
    cumulative = [_cumulative(each, every) for each in (left, right)]
    steps = np.diff(Histogram(every, np.zeros(len(every), np.int64)).centres)
    return float(np.sum(np.abs(cumulative[0] - cumulative[1])[:-1] * steps))


def _cumulative(histogram: Histogram, bins: Array) -> Array:
    counts = np.zeros(len(bins))
    counts[np.searchsorted(bins, histogram.bins)] = histogram.counts
    return np.cumsum(counts) / histogram.total


def _edge(magnitude: Array) -> Array:
    """Lower edge of the bins of one sign; the last one ends at float32's largest number."""
    edges = (np.minimum(magnitude, BINS).astype(np.int32) << SHIFT).view(np.float32)
    finite: Array = np.minimum(edges, np.finfo(np.float32).max).astype(np.float64)
    return finite


def packed(names: Sequence[str], values: Iterable[Sequence[Array]]) -> Packed:
    """The arrays of many values, concatenated; each value's have one length."""
    rows = [tuple(value) for value in values]
    offsets = np.cumsum([0, *(len(arrays[0]) for arrays in rows)]).astype(np.int64)
    columns = zip(*rows, strict=True)
    return {OFFSETS: offsets, **{name: np.concatenate(column) for name, column in zip(names, columns, strict=True)}}


def unpacked(arrays: Packed, names: Sequence[str], value: int) -> list[Array]:
    """The arrays of one value; a ReportError if there are none."""
    offsets = arrays.get(OFFSETS, ())
    if not 0 <= value < len(offsets) - 1:
        raise ReportError(f"the profile has no arrays for the value number {value}; it has {max(0, len(offsets) - 1)}")
    start, end = offsets[value : value + 2]
    return [arrays[name][start:end] for name in names]


def check_packed(field_name: str, arrays: Packed, names: Sequence[str], values: int) -> None:
    """Raises a ReportError if arrays do not fit each other, and as many values."""
    if not arrays:
        return
    if set(arrays) != {OFFSETS, *names}:
        raise ReportError(f"{field_name}: got arrays {sorted(arrays)}, expected {sorted([OFFSETS, *names])}, or none")
    offsets, lengths = arrays[OFFSETS], {arrays[name].shape for name in names}
    fits = (
        offsets.dtype.kind == "i"
        and offsets.ndim == 1
        and len(offsets) > values
        and not np.any(offsets[1:] < offsets[:-1])
    )
    if not fits or offsets[0] != 0 or lengths != {(int(offsets[-1]),)}:
        raise ReportError(
            f"{field_name}: the arrays do not fit {values} values: offsets {offsets.shape} end at "
            f"{offsets.reshape(-1)[-1:].tolist()}, and the arrays have the shapes {sorted(lengths)}"
        )
