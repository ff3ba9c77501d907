"""Batches excluded from a report's numbers because they are empty or contain NaN or infinities, and what to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pt2qa._report.prose import counted

EMPTY: Final = "no samples"
"""What is wrong with an empty batch."""

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
"""What to do next, by side; ``{}`` stands for the quantized model."""


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


def failures(found: Sequence[SetApart]) -> tuple[SetApart, ...]:
    """The batches on which quantization alone produces non-finite values."""
    return tuple(each for each in found if each.is_failure)


def apart_entries(found: Sequence[SetApart]) -> list[str]:
    """One line for each batch, failures of quantization first."""
    ordered = sorted(found, key=lambda each: not each.is_failure)
    return [f"{each.place}: {each.fault}" for each in ordered]


def about_set_apart(found: Sequence[SetApart], batches: int) -> list[str]:
    """What to say about them first: whose fault they are, and what the numbers cover.

    Args:
        found: the batches.
        batches: how many were run, these included.
    """
    left = batches - len(found)
    if not found:
        return []
    if not left:
        return [
            *about_faults(found, batches),
            "No other batch is left: rows whose values are not finite have no number.",
        ]
    other = counted(left, "batch", "batches") if left > 1 else "batch"
    return [*about_faults(found, batches), f"The numbers are of the other {other}."]


def about_faults(found: Sequence[SetApart], batches: int) -> list[str]:
    """A sentence each for failures of quantization, then the float model's and the data's faults, and empty batches.

    Args:
        found: the batches.
        batches: how many were run, these included.

    >>> about_faults([SetApart(1, 8, 3, "quantized", "NaN", "log")], 4)[0]
    'Quantization fails on 1 of 4 batches: NaN in the quantized model alone, first at log (batch 1, sample 3).'
    """
    empty = [each for each in found if each.what == EMPTY]
    kinds = (
        ("Quantization fails on {}: {}.", [e for e in failures(found) if e.side != "deployed"]),
        ("The deployed program fails on {}: {}.", [e for e in found if e.side == "deployed"]),
        (
            "The float model itself gives values that are not finite in {}: {}.",
            [e for e in found if e.side in ("both", "reference")],
        ),
        ("Only one of the graphs gives finite values in {}: {}.", [e for e in found if e.side in ("a", "b")]),
        ("Both graphs give values that are not finite in {}: {}.", [e for e in found if e.side == "graphs"]),
        ("The data of {} is at fault: {}.", [e for e in found if e.side == "batch" and e not in empty]),
        ("No samples in {}: {}.", empty),
    )
    total = counted(batches, "batch", "batches")
    lines = []
    for sentence, those in kinds:
        if those:
            first = those[0].place if those[0] in empty else f"{those[0].fault} ({those[0].place})"
            lines.append(sentence.format(f"{len(those)} of {total}", first))
    return lines
