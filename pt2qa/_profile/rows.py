from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pt2qa._report.prose import share
from pt2qa._report.rows import Row, column, derived

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
