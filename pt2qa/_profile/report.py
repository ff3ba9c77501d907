from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, log2, nan, sqrt
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

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
from pt2qa._report.base import Block, DataReport, Report, data_read
from pt2qa._report.charts import Buckets, Event, Runs
from pt2qa._report.prose import counted, few, number, share
from pt2qa._report.rows import EXACT, Row, column, derived
from pt2qa._report.set_apart import DataHealth
from pt2qa._report.storage import register
from pt2qa._report.sums import Array, Sums
from pt2qa._report.table import ranked
from pt2qa.errors import ReportError

Role = Literal["input", "output", "weight", "bias", "constant"]

QUANTILES: Final = {"q0_1": 0.001, "q1": 0.01, "q50": 0.5, "q99": 0.99, "q99_9": 0.999}
"""The quantiles that a row holds, by column."""

BULK: Final = 0.999
"""Share of the values that :attr:`ProfileRow.outlier_ratio` compares the largest with."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueRow(Row):
    """A row of one value at one op, whose fields :class:`ProfileRow` describes."""

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    role: Annotated[Role, column(key=True)]
    argument: Annotated[str, column(key=True)]

    @derived("value", importance=0, shrinks_to=6)
    def place(self) -> str:
        """What a table calls the value: ``output``, ``weight``, ``input`` with the argument where that says more."""
        return place_of(self.role, self.argument)

    @property
    def title(self) -> str:
        """The op of an output; else the op and the place."""
        return self.name if self.role == "output" else f"{self.name}, {self.place}"


@dataclass(frozen=True, slots=True, eq=False)
class ProfileRow(ValueRow):
    """One value at one op, over all batches.  All rows of a value, at its producer and its readers, agree.

    NaN and infinities are counted, and left out of every other number::

        variance = mean((x - mean)**2)
        outlier_ratio = max(|x|) / (magnitude that 99.9 % of the values ≠ 0 stay within)

    Quantiles are the middle of the histogram bin that holds the value of rank ``ceil(share * count)``: within 1.6 % of
    it.  ``nan`` means "not defined" or "not measured".

    A row of what :func:`pt2qa.profile` returns.

    Args:
        name: the op, e.g. ``layer1.0.conv1/conv2d``; of an input of the model its name.
        module: the op's module path; empty at the top of the model.
        op: the op's kind, e.g. ``conv2d``; ``input`` for an input of the model.
        role: what the value is to the op; ``constant`` is a buffer or a literal that it reads.
        argument: the op's argument that reads the value, e.g. ``input``, ``other``, ``tensors[1]``; empty for outputs.
        of: where the value comes from: the op that makes it, or the parameter's name.
        dtype: the integer type that it is quantized to; the tensor's own type where it is not quantized.
        scheme: ``per_tensor``, ``per_channel``, ``per_group`` or ``dynamic``; empty where it is not quantized.
        axis: channel axis of per-channel quantization; -1 without one.
        scale: real value of one integer step, the largest of several; nan without one.
        zero_point: the integer that stands for 0.0, a whole number; nan without one or with several.
        shape: of the first batch's value.
        count: values in all batches.
        min, max, mean, variance: of the values as the op reads or makes them, dequantized where they are quantized.
        q0_1, q1, q50, q99, q99_9: quantiles 0.1 %, 1 %, 50 %, 99 %, 99.9 %.
        zeros: share of values that are zero, 0..1.
        nans, infs: how many values are NaN or infinite.
        saturation: share of values, 0..1, that the clamp moved: outside the integer range after rounding. Of deployed
            values only the integers are known: the share at or beyond an end of the range, unless that end is 0.0.
        range_use: share of the integer range, 0..1, that the values span.
        outlier_ratio: as above; 1 without outliers, and every doubling leaves one bit less to all but 0.1 % of the
            values.
        source: where the model's code calls the op, as ``file:line: code``; empty unless it was asked for.
        value: number of the value in the report's histograms and channels; rows of one value share it.
        handle: the op's handle; -1 where it carries none.
        channels: the axis of the numbers by channel; -1 without them.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "place", "op", "dtype", "nonfinite", "min", "max", "mean", "std", "q50", "q99_9", "outlier_ratio"),
        *("zeros", "saturation", "range_use"),
    )

    of: str
    dtype: Annotated[str, column(importance=4)]
    scheme: Literal["", "per_tensor", "per_channel", "per_group", "dynamic"]
    axis: int
    scale: float
    zero_point: float
    shape: tuple[int, ...]
    count: int
    min: Annotated[float, column(worse="smaller", importance=7)]
    max: Annotated[float, column(importance=8)]
    mean: Annotated[float, column(importance=5)]
    variance: float
    q0_1: Annotated[float, column(worse="smaller")]
    q1: Annotated[float, column(worse="smaller")]
    q50: Annotated[float, column("50 %", importance=2)]
    q99: float
    q99_9: Annotated[float, column("99.9 %", importance=4)]
    zeros: Annotated[float, column("zero\n%", show=share, importance=3)]
    nans: int
    infs: int
    saturation: Annotated[float, column("saturation\n%", show=share, importance=8)]
    range_use: Annotated[float, column("range\nused %", show=share, worse="smaller", importance=7)]
    outlier_ratio: Annotated[float, column("outlier\nratio ×", importance=9)]
    source: str
    value: Annotated[int, column(extended=True)] = -1
    handle: Annotated[int, column(worse="smaller", extended=True)] = -1
    channels: Annotated[int, column(extended=True)] = -1

    @derived(importance=6)
    def std(self) -> float:
        """Standard deviation, the root of ``variance``."""
        return sqrt(self.variance) if self.variance >= 0 else nan

    @derived("NaN\ninf", importance=9, optional=True)
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return self.nans + self.infs


@dataclass(frozen=True, slots=True, eq=False)
class ProfileShift(ValueRow):
    """One value in two profiles, ``a`` and ``b``.

    Shifts are in units of the range of a::

        min_shift = (b.min - a.min) / (a.max - a.min)          and so for max, mean and std

    Args:
        name, module, op, role, argument: as in :class:`ProfileRow`.
        a_dtype, b_dtype: of the values.
        distance: how far the values of a have to move on average to become those of b, in standard deviations of a:
            the Wasserstein-1 distance of the histograms over ``a_std``; nan without histograms.
        outside: share of the values of b, 0..1, outside the range of a; from the histogram where that is not clear
            from the range, and nan where there is none.
        min_shift, max_shift, mean_shift, std_shift: as above; nan where a has no range.
        largest_shift: the largest of these, without its sign.
        range_ratio: the range of b over that of a; nan where a has no range.
        a_min, b_min, a_max, b_max, a_mean, b_mean, a_std, b_std: of the two sides.
        a_nonfinite, b_nonfinite: values that are NaN or infinite.
        a_value, b_value: numbers of the values in the two profiles.
        handle: the op's handle in a.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "place", "op", "b_dtype", "b_nonfinite", "distance", "outside", "a_min", "b_min", "a_max", "b_max"),
        *("a_mean", "b_mean", "a_std", "b_std", "range_ratio"),
    )

    a_dtype: str
    b_dtype: Annotated[str, column("dtype\nb", importance=2)]
    distance: Annotated[float, column("moved\nσ", importance=9)]
    outside: Annotated[float, column("outside\n%", show=share, importance=8)]
    min_shift: float
    max_shift: float
    mean_shift: float
    std_shift: float
    largest_shift: float
    range_ratio: Annotated[float, column("range\nb/a", importance=8)]
    a_min: Annotated[float, column("min\na", importance=6)]
    b_min: Annotated[float, column("min\nb", importance=6)]
    a_max: Annotated[float, column("max\na", importance=7)]
    b_max: Annotated[float, column("max\nb", importance=7)]
    a_mean: Annotated[float, column("mean\na", importance=4)]
    b_mean: Annotated[float, column("mean\nb", importance=4)]
    a_std: Annotated[float, column("std\na", importance=5)]
    b_std: Annotated[float, column("std\nb", importance=5)]
    a_nonfinite: int
    b_nonfinite: Annotated[int, column("NaN, inf\nb", importance=9, optional=True)]
    a_value: Annotated[int, column(extended=True)] = -1
    b_value: Annotated[int, column(extended=True)] = -1
    handle: Annotated[int, column(worse="smaller", extended=True)] = -1


@dataclass(frozen=True, slots=True, eq=False)
class ProfileOnly(Row):
    """A value that only one of two profiles has.

    Args:
        side: the profile that has it.
        name, role, argument: as in :class:`ProfileRow`.
    """

    side: Literal["a", "b"]
    name: Annotated[str, column(key=True)]
    role: Annotated[Role, column(key=True)]
    argument: Annotated[str, column(key=True)]


_Row = TypeVar("_Row", ProfileRow, ProfileShift)


def each_once(rows: Sequence[_Row], value: Callable[[_Row], object]) -> tuple[_Row, ...]:
    """Each value's row at the op that produces it, else at the first that reads it, in graph order."""
    made = {value(row): row for row in reversed(rows)}
    made |= {value(row): row for row in reversed(rows) if row.role == "output"}
    return tuple(row for row in rows if made[value(row)] is row)


def place_of(role: str, argument: str) -> str:
    """A role, with the argument if that says more.

    >>> place_of("input", "input"), place_of("input", "other"), place_of("output", "")
    ('input', 'input other', 'output')
    """
    return role if argument in ("", role, "self") else f"{role} {argument}"


SIDES: Final = ("reference", "quantized", "deployed", "before", "float", "graph")

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
            ``before`` (the quantized one before edits), ``float`` (a capture) or ``graph``.
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
