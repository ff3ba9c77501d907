"""What the data of a report are worth: which batches are in no number and why, and which values no range holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any, Final, Literal

from pt2qa._report.prose import counted, number, share
from pt2qa._report.sums import FIRST, LARGEST, SMALLEST, Mergeable

EMPTY: Final = "no samples"
"""What is wrong with an empty batch."""

BEYOND: Final = 0.05
"""Share of an input's values outside its calibrated range above which the data do not fit it; observers cut off 1 %."""

_FAULTS: Final = {
    "quantized": "in {} alone, first at",
    "isolated": "in {} where run by itself, first at",
    "deployed": "in the deployed program alone, first at",
    "both": "in both models, first at",
    "reference": "in the reference alone, first at",
    "batch": "in the input",
    "a": "in graph a alone, first at",
    "b": "in graph b alone, first at",
    "graphs": "in both graphs, first at",
}
"""Whose fault it is, by side; ``{}`` stands for the quantized model."""

_SENTENCES: Final = {
    ("quantized", "isolated"): "Quantization fails on {}",
    ("deployed",): "The deployed program fails on {}",
    ("both", "reference"): "The float model itself gives NaN or infinities in {}",
    ("a", "b"): "Only one of the graphs gives finite values in {}",
    ("graphs",): "Both graphs give NaN or infinities in {}",
    ("batch",): "The input data contain NaN or infinities in {}",
}


@dataclass(frozen=True, slots=True)
class SetApart:
    """A batch excluded from its report's numbers.  If all batches are set apart, the rows are computed from them.

    Equal infinities on both sides, such as a mask's, do not set a batch apart, nor does a value that is rounded to a
    finite number before any op reads it: that number counts.

    Args:
        batch: its number in the order given, from 0.
        samples: its size.
        sample: the first with a non-finite value, from 0 in its batch; -1 if unknown.
        side: whose fault it is: ``quantized`` and ``isolated`` (a region run quantized on the reference's inputs) are
            failures of quantization, ``deployed`` of the backend; ``reference`` and ``both`` come from the float
            model; ``batch``: the batch is empty, or its inputs contain the value.  Of two graphs that
            :func:`pt2qa.compare_graphs` compared: ``a``, ``b`` or both ``graphs``.
        what: ``NaN``, ``infinite`` or ``no samples``.
        name: the op or input with the first such value; empty for an empty batch.
        origin: where the infinities that this op reads originate, such as a mask; empty if it produces them itself.
        candidate: with several quantized models, the one whose value it is; else empty.
    """

    batch: int
    samples: int
    sample: int
    side: Literal["quantized", "isolated", "deployed", "both", "reference", "batch", "a", "b", "graphs"]
    what: str
    name: str = ""
    origin: str = ""
    candidate: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether quantization or the backend alone produces the value."""
        return self.side in ("quantized", "isolated", "deployed")

    @property
    def fault(self) -> str:
        """What is wrong, and where.

        >>> SetApart(1, 8, 3, "quantized", "NaN", "log").fault
        'NaN in the quantized model alone, first at log'
        """
        if self.what == EMPTY:
            return EMPTY
        whose = _FAULTS[self.side].format(self.candidate or "the quantized model")
        origin = f", which reads infinities of {self.origin}" if self.origin else ""
        return f"{self.what} {whose} {self.name}{origin}"

    @property
    def place(self) -> str:
        """Batch, and sample if known.

        >>> SetApart(1, 8, 3, "batch", "NaN", "x").place
        'batch 1, sample 3'
        """
        return f"batch {self.batch}" + (f", sample {self.sample}" if self.sample >= 0 else "")


@dataclass(frozen=True, slots=True)
class InputRange(Mergeable):
    """How many values of a model input lie outside the range that calibration gave it, in the batches that count.

    Args:
        name: the input.
        low, high: the smallest and the largest value that its integers stand for.
        smallest, largest: of the values; inf and -inf without any.
        outside: how many values rounding clamps.
        values: how many there are.
    """

    name: str = field(metadata=FIRST)
    low: float = field(metadata=FIRST)
    high: float = field(metadata=FIRST)
    smallest: float = field(metadata=SMALLEST)
    largest: float = field(metadata=LARGEST)
    outside: int
    values: int


@dataclass(frozen=True, slots=True)
class DataHealth(Mergeable):
    """The data behind a report; those of ranks merge, whose batches are numbered on.

    Args:
        batches: how many were read, those set apart included.
        samples: how many the batches that count have.
        set_apart: the batches that are in no number, and why.
        input_ranges: of the inputs that are rounded with one fixed scale; empty where there is none, or where a report
            of an earlier version does not say.
        in_part: whether what is finite in the batches set apart counts, as where samples are ranked one by one.
    """

    batches: int
    samples: int
    set_apart: tuple[SetApart, ...] = ()
    input_ranges: tuple[InputRange, ...] = field(default=(), metadata={"merge": lambda *both: added(both)})
    in_part: bool = field(default=False, metadata=FIRST)

    @property
    def faults(self) -> tuple[SetApart, ...]:
        """The batches set apart that are not just empty."""
        return tuple(each for each in self.set_apart if each.what != EMPTY)

    @property
    def outside(self) -> float:
        """The share of the input values that lie outside the calibrated ranges, 0..1; nan if not known."""
        values = sum(each.values for each in self.input_ranges)
        return sum(each.outside for each in self.input_ranges) / values if values else nan

    @property
    def beyond(self) -> tuple[InputRange, ...]:
        """The inputs with more than :data:`BEYOND` of their values outside."""
        return tuple(each for each in self.input_ranges if each.outside > BEYOND * each.values)

    @property
    def all_zero(self) -> bool:
        """Whether nothing but zeros was read."""
        return bool(self.input_ranges) and all(each.smallest == each.largest == 0.0 for each in self.input_ranges)

    @property
    def is_sound(self) -> bool:
        """Whether every batch counts, the ranges hold the inputs, and they are not all zero."""
        return not self.set_apart and not self.beyond and not self.all_zero

    def before(self, verdict: str) -> str:
        """A verdict of one line, after what is wrong with its data."""
        said = about_data(self)
        return " ".join([*(said if self.set_apart else said[:-1]), verdict])


def as_fields(health: DataHealth) -> dict[str, Any]:
    """Those of a :class:`pt2qa.report.DataReport` that ran on the data."""
    return {name: getattr(health, name) for name in ("batches", "samples", "set_apart", "input_ranges")}


def added(ranges: Iterable[Sequence[InputRange]]) -> tuple[InputRange, ...]:
    """The ranges of the same inputs in several batches, shards or ranks, with their counts added up."""
    found: dict[tuple[str, float, float], InputRange] = {}
    for each in (each for own in ranges for each in own):
        key = each.name, each.low, each.high
        found[key] = found[key].merge(each) if key in found else each
    return tuple(found.values())


def failures(found: Sequence[SetApart]) -> tuple[SetApart, ...]:
    return tuple(each for each in found if each.is_failure)


def apart_entries(found: Sequence[SetApart]) -> list[str]:
    """One line for each batch, failures of quantization first."""
    ordered = sorted(found, key=lambda each: not each.is_failure)
    return [f"{each.place}: {each.fault}" for each in ordered]


def about_data(health: DataHealth) -> list[str]:
    """The health of data in sentences: whose fault the batches set apart are, what no range holds, what was used.

    >>> about_data(DataHealth(8, 64, (), (InputRange("x", -1.0, 1.0, -0.9, 0.8, 0, 640),)))
    ['Data: 8 batches, 64 samples, all used; 0.00 % of the input values outside the calibrated range.']
    """
    lines = about_faults(health.set_apart, health.batches)
    lines += [
        f"{share(each.outside / each.values)} % of the values of {each.name}, which are {number(each.smallest)} to "
        f"{number(each.largest)}, lie outside the calibrated range, {number(each.low)} to {number(each.high)}."
        for each in health.beyond
    ]
    if health.all_zero:
        lines.append("Every input value is zero: the numbers say nothing about real data.")
    outside = "" if health.beyond or health.outside != health.outside else share(health.outside)
    outside = outside and f"; {outside} % of the input values outside the calibrated range"
    samples = counted(health.samples, "sample")
    used = health.batches - len({each.batch for each in health.set_apart})
    if health.faults and health.in_part:
        return [*lines, f"All finite values count: {samples} in all{outside}."]
    if not used:
        return [*lines, "No other batch is left: rows whose values are not finite have no number."]
    if health.set_apart:
        other = counted(used, "batch", "batches") if used > 1 else "batch"
        return [*lines, f"The numbers are of the other {other}, {samples}{outside}."]
    return [*lines, f"Data: {counted(health.batches, 'batch', 'batches')}, {samples}, all used{outside}."]


def about_faults(found: Sequence[SetApart], batches: int) -> list[str]:
    """A sentence each for failures of quantization, then the float model's and the data's faults, and empty batches.

    >>> about_faults([SetApart(1, 8, 3, "quantized", "NaN", "log")], 4)[0]
    'Quantization fails on 1 of 4 batches: NaN in the quantized model alone, first at log (batch 1, sample 3).'
    """
    total = counted(batches, "batch", "batches")
    faulty = [each for each in found if each.what != EMPTY]
    lines = []
    for sides, sentence in _SENTENCES.items():
        if those := [each for each in faulty if each.side in sides]:
            which = f"{len(those)} of {total}"
            lines.append(f"{sentence.format(which)}: {those[0].fault} ({those[0].place}).")
    if empty := [each for each in found if each.what == EMPTY]:
        lines.append(f"No samples in {len(empty)} of {total}: {empty[0].place}.")
    return lines
