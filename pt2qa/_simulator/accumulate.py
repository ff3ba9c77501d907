"""The loop over batches of every analysis: reads them, shows progress, and notes what was excluded and why it ended.

An analysis provides an :class:`Accumulator`, which measures each batch and adds it up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from pt2qa._ranks import NoBatchError, NoNumberError
from pt2qa._report.notes import Note
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import EMPTY, DataHealth, InputRange, SetApart
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.nonfinite import first_nonfinite
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
    """The first batch, and all batches with it.

    Raises:
        BatchError: there is none.
    """
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
    """Runs both models again to find the first value that is not finite in one of them, or NaN in both."""
    found = first_nonfinite(simulator, values)
    if found is None:
        return None
    return SetApart(number, samples, found.sample, found.side, found.what, found.name, found.origin)
