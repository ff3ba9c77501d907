"""The data that repairs are fitted to, in two folds, so that a fit to one is measured on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import active, everywhere
from pt2qa._sensitivity.gradients import WithoutGradient
from pt2qa._sensitivity.metrics import detached
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Data
from pt2qa._simulator.outputs import nbytes_of
from pt2qa._simulator.positions import Counted, Positions
from pt2qa._simulator.verification import digest_of
from pt2qa.errors import SelectionError

T = TypeVar("T")

KEPT_BYTES = 1 << 28
"""Memory for the float model's outputs, 256 MiB."""


@dataclass(frozen=True, slots=True)
class Folds:
    """Every second batch is in the second fold; one that is repeated counts once, one without samples not at all.

    ``fold_of`` has those of this rank by digest, ``distinct`` is how many all ranks have, ``outputs`` keeps what the
    float model returns by digest.
    """

    pair: QuantizedPair
    data: Data
    fold_of: dict[str, int]
    distinct: int
    positions: Positions | None
    outputs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, pair: QuantizedPair, data: Data) -> Folds:
        """Reads the batches once; the mask says which positions count where a fit is measured."""
        own = [digest_of(values) for _, values in _read(pair, data)]
        found, ranks = everywhere(own), active()
        distinct = dict.fromkeys(digest for each in found for digest in each)
        # A batch that several ranks have counts for the first of them.
        before = {digest for each in found[: 0 if ranks is None else ranks.rank] for digest in each}
        mine = set(own) - before
        fold_of = {digest: number % 2 for number, digest in enumerate(distinct) if digest in mine}
        return cls(pair, data, fold_of, len(distinct), data.positions(pair.quantized, pair.program))

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        """The batches of this rank: the fold of each, 0 or 1, and its flat values."""
        for fold, _, values, _ in self._own():
            yield fold, values

    def added_up(self, add: Callable[[int, list[Any]], None], sums: Callable[[], T]) -> list[T]:
        """The sums of each rank, once all of its batches have been added; a SelectionError if an op has no gradient."""
        reason = ""
        try:
            for fold, values in self:
                add(fold, values)
        except WithoutGradient as error:
            reason = error.reason
        found = everywhere((sums(), reason))
        for _, why in found:
            if why:
                raise SelectionError(why)
        return [own for own, _ in found]

    def with_outputs(self) -> Iterator[tuple[int, list[Any], Counted | None, Any]]:
        """The batches of this rank, with the positions that count (None: all) and the float outputs."""
        for fold, batch, values, digest in self._own():
            counted = None if self.positions is None else self.positions.of(batch, values)
            yield fold, values, counted, self.returned(values, digest)

    def returned(self, values: list[Any], digest: str) -> Any:
        known = self.outputs.get(digest)
        if known is None:
            known = detached(self.pair.simulator.run(values, on=False))
            if nbytes_of([known, *self.outputs.values()]) <= KEPT_BYTES:
                self.outputs[digest] = known
        return known

    def _own(self) -> Iterator[tuple[int, Batch, list[Any], str]]:
        left = dict(self.fold_of)
        for batch, values in _read(self.pair, self.data):
            digest = digest_of(values)
            fold = left.pop(digest, None)
            if fold is not None:
                yield fold, batch, values, digest


def _read(pair: QuantizedPair, data: Data) -> Iterator[tuple[Batch, list[Any]]]:
    for batch in data:
        values = pair.values(batch)
        if count_samples(values):
            yield batch, values
