"""The batches of an analysis, and what its user said of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import GraphModule
from tqdm import tqdm

from pt2qa._interrupts import raise_if_interrupted
from pt2qa._simulator.batches import Batch, plain_batch
from pt2qa._simulator.positions import Mask, Positions
from pt2qa._simulator.program import Program
from pt2qa.errors import BatchError


@dataclass(frozen=True, eq=False)
class Data:
    """Batches, made once at the door of an analysis; they start over if what was passed does.

    Attributes:
        name: what they are called in calls.
        batches: a list, a loader or an iterator, as it was passed.
        inputs_of: maps an item of these to a batch.
        mask: which positions count in numbers; None: all do.
        progress: whether to show progress bars; None: if stderr is a terminal.
    """

    name: str
    batches: Iterable[Any] = field(repr=False)
    inputs_of: Callable[[Any], Batch] | None = None
    mask: Mask | None = None
    progress: bool | None = False

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self.batches, (Tensor, Mapping, np.ndarray)):
            raise BatchError(
                f"batches is a single {type(self.batches).__name__}; expected an iterable of batches. "
                "Pass [batch] for one."
            )
        if not isinstance(self.batches, Iterable):
            raise BatchError(
                f"batches is a {type(self.batches).__name__}; expected an iterable of batches, such as a list."
            )
        for item in self.batches:
            raise_if_interrupted()
            yield plain_batch(item) if self.inputs_of is None else self.inputs_of(item)

    def positions(self, quantized: GraphModule, program: Program) -> Positions | None:
        """Where the values of a pair have the axes of the mask; None without one."""
        return None if self.mask is None else Positions(quantized, program, self.mask)

    def bar(self, title: str, unit: str = "batch", *, of: Iterable[Any] | None = None) -> tqdm[Any]:
        """A progress bar, of items that it iterates over or of no known length."""
        return tqdm(
            of, desc=title, unit=unit, disable=None if self.progress is None else not self.progress, leave=False
        )
