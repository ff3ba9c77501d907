"""The data that repairs are fitted to, in two folds, so that a fit to one is measured on the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import quantize_again
from pt2qa._ranks import active, everywhere
from pt2qa._sensitivity.metrics import detached
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Data
from pt2qa._simulator.outputs import nbytes_of
from pt2qa._simulator.positions import Counted, Positions
from pt2qa._simulator.verification import digest_of
from pt2qa.overrides import OverridePlan
from pt2qa.overrides.plan import Edit
from pt2qa.plugins import describe

Item = tuple[int, list[Any]]
"""The fold of a batch, 0 or 1, and its flat values."""

KEPT_BYTES = 1 << 28
"""Size of the float model's outputs that are kept, for each repair that is tried."""


@dataclass(frozen=True, slots=True)
class Folds:
    """Every second batch is in the second fold; one that is repeated counts once, one without samples not at all.

    ``fold_of`` has those of this rank by digest, and ``distinct`` is how many all ranks have; ``outputs`` those of the
    float model by digest, as long as they are small; ``made`` the pairs that were quantized on all of them, by edits.
    """

    pair: QuantizedPair
    data: Data
    fold_of: dict[str, int]
    distinct: int
    positions: Positions | None
    outputs: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[Edit, ...], QuantizedPair] = field(default_factory=dict)

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

    def __iter__(self) -> Iterator[Item]:
        """The batches of this rank."""
        for fold, _, values, _ in self._own():
            yield fold, values

    def with_outputs(self) -> Iterator[tuple[int, list[Any], Counted | None, Any]]:
        """The batches of this rank, each with which of its positions count, None for all, and the float outputs."""
        for fold, batch, values, digest in self._own():
            counted = None if self.positions is None else self.positions.of(batch, values)
            yield fold, values, counted, self.returned(values, digest)

    def returned(self, values: list[Any], digest: str) -> Any:
        """What the float model returns on flat inputs with this digest."""
        known = self.outputs.get(digest)
        if known is None:
            known = detached(self.pair.simulator.run(values, on=False))
            if nbytes_of([known, *self.outputs.values()]) <= KEPT_BYTES:
                self.outputs[digest] = known
        return known

    def quantized(self, pair: QuantizedPair, edits: Iterable[Edit]) -> QuantizedPair:
        """A pair quantized with more edits, calibrated on the batches; made once."""
        recipe = pair.recipe
        assert recipe is not None, "what is repaired is quantized again"
        plan = OverridePlan((*recipe.edits, *edits), describe(recipe.plugin), pair.model)
        if plan.edits not in self.made:
            self.made[plan.edits] = quantize_again(pair, self.data, overrides=plan)
        return self.made[plan.edits]

    def quantized_with(self, pair: QuantizedPair, edits: Iterable[Edit]) -> QuantizedPair | None:
        """The same if it was made already; else None."""
        assert pair.recipe is not None, "what is repaired is quantized again"
        return self.made.get((*pair.recipe.edits, *edits))

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
