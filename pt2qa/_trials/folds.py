"""The data that repairs are fitted to, in two folds, so that a fit to one is measured on the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import active, everywhere
from pt2qa._sensitivity.gradients import WithoutGradient
from pt2qa._sensitivity.metrics import detached
from pt2qa._simulator.data import Data
from pt2qa._simulator.outputs import nbytes_of
from pt2qa._trials.outcome import Outcome, outcome_of
from pt2qa._trials.reference import KEPT_BYTES, Item, Reference
from pt2qa.errors import SelectionError

Sums = Mapping[Any, Tensor]
"""Sums by key; one to which nothing was added is missing."""

Add = Callable[[Hashable, Tensor], None]
"""Adds a new tensor, which may be written to later, to the sum of a key."""


class Folds(Reference):
    """Batches of which each counts once, with its fold, for what is fitted to one and measured on the other."""

    def __init__(self, pair: QuantizedPair, data: Data) -> None:
        """Runs the float model; the mask of the data says which positions count where a fit is measured."""
        super().__init__(pair, data)
        ranks = active()
        # A batch that several ranks have counts for the first of them.
        before = everywhere(self.keys)[: 0 if ranks is None else ranks.rank]
        self._mine = set(self.keys).difference(*before)
        self._last: QuantizedPair | None = None
        self._returned: dict[str, Any] = {}
        self._quality: Outcome | None = None

    def __iter__(self) -> Iterator[Item]:
        left = set(self._mine)
        for item in super().__iter__():
            if item.key in left:
                left.remove(item.key)
                yield item

    def summed(self, add_batch: Callable[[Item, Add], None]) -> tuple[Sums, Sums]:
        """The sums over each fold, on all ranks, of what batches add; a SelectionError if an op has no gradient."""
        own: tuple[dict[Any, Tensor], ...] = ({}, {})
        reason = ""

        def add(fold: int, key: Hashable, term: Tensor) -> None:
            own[fold][key] = own[fold][key].add_(term) if key in own[fold] else term

        try:
            for item in self:
                add_batch(item, functools.partial(add, self.fold_of[item.key]))
        except WithoutGradient as error:
            reason = error.reason
        found = everywhere((own, reason))
        for _, why in found:
            if why:
                raise SelectionError(why)
        one, other = (total([sums[fold] for sums, _ in found], range(len(found))) for fold in (0, 1))
        return one, other

    def returned(self, pair: QuantizedPair, item: Item) -> Any:
        """What the simulator of a pair returns; kept for the pair whose quality was asked for last, up to a limit."""
        if pair is self._last and item.key in self._returned:
            return self._returned[item.key]
        found = detached(pair.simulator.run(item.values, on=True))
        if pair is self._last and nbytes_of([found, *self._returned.values()]) <= KEPT_BYTES:
            self._returned[item.key] = found
        return found

    def quality(self, pair: QuantizedPair) -> Outcome:
        """That of a pair on both folds; that of the last pair is known."""
        if pair is not self._last or self._quality is None:
            self._last, self._returned = pair, {}  # on all ranks, also one without a batch
            self._quality = outcome_of(self, lambda item: self.returned(pair, item))
        return self._quality


def total(sums: Sequence[Sums], which: Collection[int]) -> dict[Any, Tensor]:
    """Some of the sums added up, such as those of both folds."""
    found: dict[Any, Tensor] = {}
    for number in which:
        for key, each in sums[number].items():
            found[key] = found[key] + each if key in found else each
    return found
