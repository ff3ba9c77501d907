from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, log2
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final

import numpy as np

from pt2qa._printable import near_names
from pt2qa._profile.histogram import (
    BINS,
    CHANNELS,
    HISTOGRAM,
    RELATIVE_ERROR,
    Histogram,
    Packed,
    check_packed,
    unpacked,
)
from pt2qa._profile.rows import ProfileRow, Role, each_once
from pt2qa._report.base import Block, DataReport, Report, data_read
from pt2qa._report.charts import Buckets, Event, Runs
from pt2qa._report.prose import counted, few, number, share
from pt2qa._report.rows import EXACT, column
from pt2qa._report.set_apart import DataHealth
from pt2qa._report.storage import register
from pt2qa._report.sums import Array, Sums
from pt2qa._report.table import ranked
from pt2qa.errors import ReportError

SIDES: Final = ("reference", "quantized", "deployed", "float", "graph")

OUTLIERS: Final = 4.0
"""Outlier ratio above which a value is said to have outliers: two bits of an integer grid serve 0.1 % of the values."""

CLAMPED: Final = 0.01
"""Share of values that the clamp moved, above which a tensor is counted."""

LITTLE_USED: Final = 0.5
"""Share of the integer range below which it is said to be little used: one bit is lost."""

BUCKETS: Final = 128
"""Buckets of a histogram that TensorBoard shows, equally wide."""


@register("profile", schema=4, oldest=3, since={"set_apart": 4, "input_ranges": 4})
@dataclass(frozen=True, slots=True, repr=False)
class Profile(DataReport):
    """What every op of a graph reads and produces.

    Tables and texts show each value once, at the op that produces it; ``to_pandas`` and ``csv`` have every row.

    What :func:`pt2qa.profile` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: one for each value at each op, in graph order: inputs, weights, bias, output.
        histograms: bins and counts of the values, packed; empty where none were made.  :meth:`histogram` reads them.
        channels: numbers by channel, packed; empty where none were made.  :meth:`channel` reads them.
        side: which graph it was: ``reference``, ``quantized``, ``deployed`` (what the backend's kernels write),
            ``float`` (a capture) or ``graph``.
        sums: what :func:`pt2qa.merge` needs besides histograms and channels.
        set_apart: batches that are empty, or with NaN in an input, which the rows count; their other values count.

    Raises:
        ReportError: the arrays do not fit each other or the rows, or there is no such side.
    """

    ties: ClassVar[str] = "name"
    merges_in: ClassVar[str] = "pt2qa._profile.values"
    one_run: ClassVar[tuple[str, ...]] = ("model", "quantizer", "side")

    rows: tuple[ProfileRow, ...]
    histograms: Sums = field(compare=False)
    channels: Sums = field(compare=False)
    side: str
    sums: Annotated[Sums, column(since=3)] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ReportError(f"side: got {self.side!r}, expected one of {', '.join(SIDES)}")
        values = 1 + max((row.value for row in self.rows), default=-1)
        check_packed("histograms", self.histograms, HISTOGRAM, values)
        check_packed("channels", self.channels, CHANNELS, values)
        if self.histograms:
            _check_counted(*(self.histograms[name] for name in HISTOGRAM))

    @property
    def health(self) -> DataHealth:
        return DataHealth(self.batches, self.samples, self.set_apart, self.input_ranges, in_part=True)

    @property
    def title(self) -> str:
        """Which graph this is about, e.g. ``MobileNetV2, quantized by xnnpack``."""
        if not self.quantizer:
            return f"{self.model}, {self.side}"
        how = {"quantized": "quantized by", "deployed": "deployed, quantized by"}.get(self.side, f"{self.side} for")
        return f"{self.model}, {how} {self.quantizer}"

    @property
    def values(self) -> tuple[ProfileRow, ...]:
        """One row for each value, in graph order: at the op that produces it, else at the first that reads it."""
        return each_once(self.rows, attrgetter("value"))

    def find(self, name: str, role: Role = "output", argument: str | None = None) -> ProfileRow:
        """The first row of an op with a role, and with an argument if given.

        Raises:
            ReportError: there is none; the message lists close matches, or what the op has.
        """
        here = [row for row in self.rows if row.name == name]
        if not here:
            names = list(dict.fromkeys(row.name for row in self.rows))
            raise ReportError(f"the profile has no op {name!r}; near names: {near_names(name, names)}")
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
                bins between them; a number of equal bins from the smallest to the largest value; or edges,
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
            # No bin holds infinities: ignore a file that gives them as ends.
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
            raise ReportError("this profile has no histograms; profile with histograms=True")
        return Histogram(*unpacked(self.histograms, HISTOGRAM, row.value))

    def quantile(self, row: ProfileRow, share: float) -> float:
        """The value below which a share of a row's finite values lies, accurate to 1.6 %; nan if there is none.

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
        return dict(zip(CHANNELS, unpacked(self.channels, CHANNELS, row.value), strict=True))

    def subject(self) -> str:
        return f"{Report.subject(self)}, {self.side}"

    def on_page(self, part: str) -> Sequence[Any]:
        return self.values if part == "rows" else Report.on_page(self, part)

    def events(self, step: int, per_channel: bool, others: Sequence[Report]) -> Runs:
        """The histogram of each value that has finite numbers; the numbers by channel, whose steps are the channels.

        Raises:
            ReportError: the profile has no histograms, or no numbers by channel.
        """
        found: list[Event] = [self._buckets(row, step) for row in self.rows if row.count > row.nonfinite]
        # A deployed report is the run "deployed".
        run = "deployed_values" if self.side == "deployed" else self.side
        return {run: [*found, *(self._by_channel() if per_channel else ())]}

    def _buckets(self, row: ProfileRow, step: int) -> Event:
        edges, counts = self.histogram(row, BUCKETS)
        number = row.count - row.nonfinite
        buckets = Buckets(
            min=row.min,
            max=row.max,
            number=number,
            total=number * row.mean,
            squares=number * (row.variance + row.mean * row.mean),
            limits=edges[1:].tolist(),
            counts=counts.tolist(),
        )
        return Event(f"{row.name}/{row.place}", step, buckets)

    def _by_channel(self) -> Iterator[Event]:
        rows = [row for row in self.rows if row.channels >= 0]
        if not rows:
            raise ReportError(f"the profile of {self.title} has no numbers by channel; profile with per_channel=True")
        for row in rows:
            for name, numbers in self.channel(row).items():
                for channel, value in enumerate(numbers.tolist()):
                    if math.isfinite(value):
                        yield Event(f"{row.name}/{row.place}/channel_{name}", channel, float(value))

    def _headline(self) -> str:
        return f"<Profile of {self.title}: {len(self.rows)} rows, {len(self.values)} values, {self.batches} batches>"

    def _title(self, sort: str) -> str:
        worst = "highest outlier ratio first" if self.histograms else "in graph order"
        tensors, read = counted(len(self.values), "tensor"), data_read(self.batches, self.samples)
        return f"Profile of {self.title}: {tensors}, {read}, each once, {self._how(sort, worst)}"

    def _tabled(self) -> tuple[ProfileRow, ...]:
        return self.values

    def _worst_by(self) -> str | None:
        return "outlier_ratio" if self.histograms else None

    def _ordered(self, sort: str) -> tuple[Sequence[ProfileRow], str | None]:
        """With NaN and infinities as worse than any outlier."""
        rows, by = Report._ordered(self, sort)
        return (sorted(rows, key=lambda row: row.nonfinite == 0) if sort == "worst" and by else rows), by

    def _after(self, limit: int | None) -> Iterator[Block]:
        yield from self._set_apart("NaN in the inputs, or empty")
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        said = list(_about_values(self.values, deployed=self.side == "deployed"))
        if not said:
            said = ["Nothing stands out: no NaN, no infinity, no tensor that is all zero, no outliers."]
        if self.histograms:
            said.append(f"Quantiles are read from histograms: within {100 * RELATIVE_ERROR:.1f} % of the value.")
        return said


def _check_counted(bins: Array, counts: Array) -> None:
    if bins.dtype != np.int32 or counts.dtype != np.int64:
        raise ReportError(f"histograms: bins are {bins.dtype} and counts {counts.dtype}, expected int32 and int64")
    # The sum in floats: an integer sum might overflow, and look small.
    if np.any(np.abs(bins.astype(np.int64)) > BINS) or np.any(counts < 0) or counts.sum(dtype=np.float64) > EXACT:
        raise ReportError(f"histograms: expected bins from {-BINS} to {BINS}, and counts from 0 to {EXACT} in all")


def _about_values(rows: Sequence[ProfileRow], deployed: bool) -> Iterator[str]:
    """What to look at, given each value once, and whether they are of a deployed program."""

    def among(found: Sequence[ProfileRow]) -> str:
        return f"{len(found)} of {counted(len(rows), 'tensor')}"

    if nonfinite := [row for row in rows if row.nans]:
        first = nonfinite[0]
        yield (
            f"NaN in {among(nonfinite)}; first in the graph: {first.title}, {first.nans} of {first.count}. "
            "Look there first: what follows inherits them."
        )
    if infinite := [row for row in rows if row.infs]:
        first = infinite[0]
        yield (
            f"Infinite in {among(infinite)}; first in the graph: {first.title}, {first.infs} of {first.count}. A "
            "mask is expected to be; otherwise it is an overflow, or in the data."
        )
    if absent := [row for row in rows if not row.count]:
        yield f"Without a value: {few([row.title for row in absent])}."
    if dead := [row for row in rows if row.zeros == 1.0]:
        yield f"All zero: {few([row.title for row in dead])}."
    if clamped := [row for row in ranked(ProfileRow, rows, "saturation", ties="name") if row.saturation > CLAMPED]:
        which = f"{among(clamped)} (most: {clamped[0].title}, {share(clamped[0].saturation)} %)"
        yield (
            f"At an end of the integer range, clamped or not: more than {100 * CLAMPED:g} % of the values in {which}."
            if deployed
            else f"The clamp moved more than {100 * CLAMPED:g} % of the values in {which}; pt2qa.compare_layers shows "
            "how far, and at what cost."
        )
    if wide := [row for row in ranked(ProfileRow, rows, "outlier_ratio", ties="name") if row.outlier_ratio > OUTLIERS]:
        ratio = wide[0].outlier_ratio
        bits = "" if ratio == inf else f": {log2(ratio):.1f} bits of an integer for 0.1 % of the values"
        yield (
            f"Outliers: {among(wide)} reach {OUTLIERS:g} × the magnitude of 99.9 % of their values (most: "
            f"{wide[0].title}, {number(ratio)} ×{bits})."
        )
    known = [row for row in rows if not isnan(row.range_use)]
    if unused := [row for row in ranked(ProfileRow, known, "range_use", ties="name") if row.range_use < LITTLE_USED]:
        yield (
            f"Less than {100 * LITTLE_USED:g} % of the integer range used by {len(unused)} of "
            f"{counted(len(known), 'quantized tensor')} (least: {unused[0].title}, {share(unused[0].range_use)} %): "
            "this data does not reach the other integers."
        )
