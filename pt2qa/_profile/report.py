"""The report of a profiler: the numbers of every value, and their histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pt2qa._profile.histogram import BINS, Histogram
from pt2qa._profile.rows import ProfileRow, Role
from pt2qa._profile.text import profile_summary, profile_table, profile_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.rows import Environment
from pt2qa._report.storage import register
from pt2qa.errors import ReportError

Array = npt.NDArray[Any]
Packed = dict[str, Array]
"""Arrays of many values, one value after the other; those of value i are ``offsets[i]`` to ``offsets[i + 1]``."""

SIDES: Final = ("reference", "quantized", "float", "graph")
"""What a profile may be of."""

OFFSETS: Final = "offsets"
HISTOGRAM: Final = ("bins", "counts")
MOST: Final = 2**53
"""Values that the histograms of a report may hold: floats count so far."""

CHANNELS: Final = ("count", "min", "max", "mean", "variance", "zeros")


@register("profile", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class Profile(RowReport):
    """What every op of a graph reads and makes.

    Tables and texts show each value once, at the op that makes it; ``to_pandas`` and ``csv`` have every row.

    Args:
        rows: one for each value at each op, in graph order: inputs, weights, bias, output.
        histograms: bins and counts of the values, packed; empty where none were made.  :meth:`histogram` reads them.
        channels: numbers by channel, packed; empty where none were made.  :meth:`channel` reads them.
        side: which graph it was: ``reference``, ``quantized``, ``float`` (a capture) or ``graph``.
        quantizer: that of a pair; empty for other graphs.
        batches, samples: how much was run.
        notes: what else the reader must know.
        model: the model's class name.
        environment: versions, and the model's fingerprint.

    Raises:
        ReportError: the arrays do not fit each other or the rows, or there is no such side.
    """

    rows: tuple[ProfileRow, ...]
    histograms: dict[str, npt.NDArray[Any]] = field(compare=False)
    channels: dict[str, npt.NDArray[Any]] = field(compare=False)
    side: str
    quantizer: str
    batches: int
    samples: int
    notes: tuple[str, ...]
    model: str
    environment: Environment

    rendering = Rendering(profile_table, profile_summary, profile_text)

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ReportError(f"side: got {self.side!r}, expected one of {', '.join(SIDES)}")
        values = 1 + max((row.value for row in self.rows), default=-1)
        _check_packed("histograms", self.histograms, HISTOGRAM, values)
        _check_packed("channels", self.channels, CHANNELS, values)
        if self.histograms:
            _check_counted(*(self.histograms[name] for name in HISTOGRAM))

    @property
    def title(self) -> str:
        """Which graph this is about, e.g. ``MobileNetV2, quantized by xnnpack``."""
        if not self.quantizer:
            return f"{self.model}, {self.side}"
        return f"{self.model}, {self.side} {'by' if self.side == 'quantized' else 'for'} {self.quantizer}"

    @property
    def values(self) -> tuple[ProfileRow, ...]:
        """One row for each value, in graph order: that of the op that makes it, else of the first that reads it."""
        made = {row.value: row for row in reversed(self.rows)}
        made |= {row.value: row for row in reversed(self.rows) if row.role == "output"}
        return tuple(row for row in self.rows if made[row.value] is row)

    def find(self, name: str, role: Role = "output", argument: str | None = None) -> ProfileRow:
        """The first row of an op with a role, and with an argument where one is given.

        Raises:
            ReportError: there is none; the message lists near names, or what the op has.
        """
        here = [row for row in self.rows if row.name == name]
        if not here:
            names = list(dict.fromkeys(row.name for row in self.rows))
            near = get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise ReportError(f"the profile has no op {name!r}; near names: {', '.join(near)}")
        for row in here:
            if row.role == role and argument in (None, row.argument):
                return row
        wanted = role if argument is None else f"{role} {argument}"
        raise ReportError(f"{name!r} has no {wanted}; it has {', '.join(row.place for row in here)}")

    def histogram(self, row: ProfileRow, bins: int | Sequence[float] | None = None) -> tuple[Array, Array]:
        """The histogram of a row's finite values, as ``(edges, counts)``.

        Args:
            row: one of the rows.
            bins: None for the bins in which values were counted: exact, and narrow where values are small, with empty
                bins between them; a number for so many equal bins from the smallest to the largest value; or edges,
                such as those of an integer grid.  Counts in these are spread evenly from the counted bins.

        Returns:
            edges, float64, one more than counts; counts, int64 or float64.

        Raises:
            ReportError: the profile was made without histograms.
        """
        counted = self.counted(row)
        if bins is None:
            return counted.contiguous()
        smallest, largest = row.min, row.max
        if not math.isfinite(largest - smallest):
            # Infinities are in no bin: a file that gives them as ends is not to be followed there.
            finite = counted.contiguous()[0]
            smallest, largest = float(finite[0]), float(finite[-1])
        low, high = (smallest, largest) if largest > smallest else (smallest - 0.5, smallest + 0.5)
        edges = np.linspace(low, high, bins + 1) if isinstance(bins, int) else np.asarray(bins, np.float64)
        return edges, counted.spread(edges, smallest, largest)

    def counted(self, row: ProfileRow) -> Histogram:
        """The histogram of a row as it was counted.

        Raises:
            ReportError: the profile was made without histograms.
        """
        if not self.histograms:
            raise ReportError("this profile holds no histograms; make it with histograms=True")
        return Histogram(*_unpacked(self.histograms, HISTOGRAM, row.value))

    def quantile(self, row: ProfileRow, share: float) -> float:
        """The value below which a share of a row's finite values lies, within 1.6 % of it; nan where there is none.

        Raises:
            ReportError: the profile was made without histograms, or the share is not in 0..1.
        """
        if not 0 <= share <= 1:
            raise ReportError(f"share: got {share}, expected 0..1; 0.99 is the 99 % quantile")
        return min(max(self.counted(row).quantile(share), row.min), row.max)

    def channel(self, row: ProfileRow) -> Packed:
        """The numbers of a row by channel: ``count, min, max, mean, variance, zeros``, each an array.

        Raises:
            ReportError: the profile has none for this row.
        """
        if row.channels < 0:
            raise ReportError(
                f"{row.name!r} has no numbers by channel for its {row.place}; profile with per_channel=True"
            )
        return dict(zip(CHANNELS, _unpacked(self.channels, CHANNELS, row.value), strict=True))

    def _headline(self) -> str:
        return f"<Profile of {self.title}: {len(self.rows)} rows, {len(self.values)} values, {self.batches} batches>"


def packed(names: Sequence[str], values: Iterable[Sequence[Array]]) -> Packed:
    """The arrays of many values, each value's of one length, one after the other."""
    rows = [tuple(value) for value in values]
    offsets = np.cumsum([0, *(len(arrays[0]) for arrays in rows)]).astype(np.int64)
    columns = zip(*rows, strict=True)
    return {OFFSETS: offsets, **{name: np.concatenate(column) for name, column in zip(names, columns, strict=True)}}


def _unpacked(arrays: Packed, names: Sequence[str], value: int) -> list[Array]:
    offsets = arrays.get(OFFSETS, ())
    if not 0 <= value < len(offsets) - 1:
        raise ReportError(f"the profile has no arrays for the value number {value}; it has {max(0, len(offsets) - 1)}")
    start, end = offsets[value : value + 2]
    return [arrays[name][start:end] for name in names]


def _check_packed(field_name: str, arrays: Packed, names: Sequence[str], values: int) -> None:
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


def _check_counted(bins: Array, counts: Array) -> None:
    if bins.dtype != np.int32 or counts.dtype != np.int64:
        raise ReportError(f"histograms: bins are {bins.dtype} and counts {counts.dtype}, expected int32 and int64")
    # The sum in floats: that of integers might overflow, and would then look small.
    if np.any(np.abs(bins.astype(np.int64)) > BINS) or np.any(counts < 0) or counts.sum(dtype=np.float64) > MOST:
        raise ReportError(f"histograms: expected bins from {-BINS} to {BINS}, and counts from 0 to {MOST} in all")
