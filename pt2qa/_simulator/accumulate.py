"""The loop over batches of every analysis: reads them, shows progress, and notes what was excluded and why it ended.

An analysis provides an :class:`Accumulator`, which measures each batch and adds it up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import Tensor

from pt2qa._ranks import NoBatchError, NoNumberError
from pt2qa._report.notes import Note
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import EMPTY, DataHealth, InputRange, SetApart
from pt2qa._simulator import op_rules
from pt2qa._simulator.batches import Batch, count_samples, flat_outputs
from pt2qa._simulator.data import Counted, Data
from pt2qa._simulator.lockstep import Event, Lockstep
from pt2qa._simulator.program import Program, QuantParams
from pt2qa._simulator.simulator import Simulator


class Accumulator(Protocol):
    """The measurements of an analysis so far."""

    @property
    def batches(self) -> int:
        """How many batches are in it."""

    def add(self, batch: Any) -> None:
        """Measures a batch; an interrupted batch leaves no trace."""


class Tally:
    """The health of the data that an analysis has read so far."""

    health = DataHealth(0, 0)

    @property
    def batches(self) -> int:
        return self.health.batches

    def took(self, samples: int, *apart: SetApart | None, ranges: tuple[InputRange, ...] = ()) -> None:
        """Notes one more batch, and why it is set apart, if it is."""
        known = tuple(each for each in apart if each is not None)
        self.health = self.health.merge(DataHealth(1, samples, known, ranges))


def accumulate(into: Accumulator, data: Data, *, title: str, purpose: str) -> list[str]:
    """Adds batch after batch, until the last one or Ctrl-C; the notes say if it was interrupted.

    ``title`` is that of the progress bar; ``purpose`` is the use of a batch, for errors, such as ``compare on``.

    Raises:
        BatchError: there is no batch.
        KeyboardInterrupt: before a batch was finished.
    """
    try:
        for batch in data.bar(title, of=data):
            into.add(batch)
    except KeyboardInterrupt:
        if not into.batches:
            raise
        finished = counted(into.batches, "batch that was", "batches that were")
        return [Note(f"interrupted: covers the {finished} finished", "interrupted")]
    if not into.batches:
        raise _no_batch(purpose)
    return []


def peeked(data: Data, purpose: str) -> tuple[Batch, Data]:
    """The first batch, and all batches with it; a BatchError if there is none."""
    items = iter(data)
    for first in items:
        return first, replace(data, batches=itertools.chain([first], items), inputs_of=None)
    raise _no_batch(purpose)


def _no_batch(purpose: str) -> NoBatchError:
    return NoBatchError(f"no batch to {purpose}. Pass at least one; an iterator that was read before is empty.")


def refuse_empty(batches: int, set_apart: Sequence[SetApart]) -> None:
    if sum(apart.what == EMPTY for apart in set_apart) == batches:
        raise NoNumberError(f"every batch is empty ({batches} read). Pass batches with samples.")


def empty_batch(number: int) -> SetApart:
    return SetApart(number, 0, -1, "batch", EMPTY)


def first_fault(simulator: Simulator, values: Sequence[Any], number: int, samples: int) -> SetApart | None:
    """Runs both models again to find the first value that is not finite in one of them, or NaN in both.

    Infinities that both models have at the same positions do not count, because masks consist of them.
    """
    program, found = simulator.program, list[SetApart]()
    inputs = dict(zip(program.inputs, program.input_names, strict=True))
    origins: dict[int, str] = {}
    """For each slot whose value is not finite, the op or input where that began."""

    def look(slot: int, name: str, reference: Any, quantized: Any, origin: str = "") -> None:
        for ref, quant in zip(flat_outputs(reference), flat_outputs(quantized), strict=True):
            if is_finite(ref) and is_finite(quant):
                continue
            origins.setdefault(slot, origin or name)
            culprit = unlike(ref, quant)
            if culprit is not None:
                what, side, wrong = culprit
                whose = "batch" if slot in inputs else side
                sample, origin = sample_of(wrong, count_samples(list(values))), "" if origin == name else origin
                found.append(SetApart(number, samples, sample, whose, what, name, origin))
                return

    def visit(event: Event) -> None:
        step = event.step
        if found or (step.site is None and op_rules.is_uninitialised(step.function)):
            return
        # At a site, the event compares the value before rounding with the rounded one; the value is its source's.
        slot = step.reads[0] if step.site is not None else step.out
        read = [origins[each] for each in step.reads if each in origins] if step.site is None else []
        look(slot, program.name_of(slot), event.reference, event.quantized, next(iter(read), ""))
        if slot in origins:
            origins[step.out] = origins[slot]

    for (slot, name), value in zip(inputs.items(), values, strict=True):
        look(slot, name, value, value)
    if not found:
        Lockstep(simulator).run(values, visit)
    return found[-1] if found else None


def limits(params: QuantParams) -> tuple[float, float]:
    """The smallest and the largest value that a site can hold; nan if it has no single scale."""
    if not isinstance(params.scale, float) or not isinstance(params.zero_point, int):
        return math.nan, math.nan
    low, high = params.quant_min - params.zero_point, params.quant_max - params.zero_point
    return low * params.scale, high * params.scale


def input_ranges(program: Program, values: Sequence[Any], counted: Counted | None = None) -> tuple[InputRange, ...]:
    """How many values of each input rounding clamps, at the positions that count; no model runs.

    A value within half a step of an end is rounded to it, which is no clamping.
    """
    read = dict(zip(program.inputs, values if counted is None else counted.inputs(values), strict=True))
    names = dict(zip(program.inputs, program.input_names, strict=True))
    found: dict[tuple[str, float, float], InputRange] = {}
    for site in program.sites:
        low, high = limits(site.params)
        value = read.get(site.source)
        if site.params.dynamic or math.isnan(low) or not isinstance(value, Tensor):
            continue
        key, step = (names[site.source], low, high), site.params.largest_scale / 2
        if key not in found:
            smallest, largest = map(float, value.aminmax()) if value.numel() else (math.inf, -math.inf)
            outside = int(((value < low - step) | (value > high + step)).sum())
            found[key] = InputRange(*key, smallest, largest, outside, value.numel())
    return tuple(found.values())


Side = Literal["both", "reference", "quantized"]
What = Literal["NaN", "infinite"]


def sample_of(wrong: Tensor, samples: int) -> int:
    """The first sample with a wrong value; -1 if the value has no samples."""
    if not wrong.dim() or wrong.shape[0] != samples:
        return -1
    return int(wrong.reshape(samples, -1).any(1).nonzero()[0])


def _may_break(value: Any) -> bool:
    # torch cannot test 8-bit float types for NaN.
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def is_finite(value: Any) -> bool:
    return not _may_break(value) or bool(value.isfinite().all())


def is_empty(samples: int, outputs: Any) -> bool:
    """Whether a batch is empty: it has no sample, and none of its outputs has a finite number.

    A batch in which only the first input has no element, such as a cache that starts empty, is not empty.
    """
    return not samples and not any(
        isinstance(value, Tensor) and bool(value.isfinite().any()) for value in flat_outputs(outputs)
    )


def unlike(ref: Any, quant: Any) -> tuple[What, Side, Tensor] | None:
    """What is wrong with a value, in which model, and at which elements; nothing is with infinities that both share."""
    if not (_may_break(ref) and _may_break(quant)) or (is_finite(ref) and is_finite(quant)):
        return None
    nans = [value.isnan() for value in (ref, quant)]
    what: What = "NaN" if any(bool(each.any()) for each in nans) else "infinite"
    alone = ref != quant if ref.shape == quant.shape else True
    places = nans if what == "NaN" else [value.isinf() & alone for value in (ref, quant)]
    sides = [bool(each.any()) for each in places]
    if not any(sides):
        return None
    side: Side = "both" if all(sides) else "reference" if sides[0] else "quantized"
    return what, side, places[sides.index(True)]
