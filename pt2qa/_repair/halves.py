"""The data that repairs are fitted to, in two halves, so that a fit to one is measured on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import quantize_again
from pt2qa._ranks import active, everywhere
from pt2qa._sensitivity.metrics import detached
from pt2qa._simulator.batches import Batch, count_samples, read_batches
from pt2qa._simulator.outputs import nbytes_of
from pt2qa._simulator.positions import Counted, Mask, Positions
from pt2qa._simulator.verification import digest_of
from pt2qa.overrides import OverridePlan
from pt2qa.overrides.plan import Edit
from pt2qa.plugins import describe

Item = tuple[int, list[Any]]
"""The half of a batch, 0 or 1, and its flat values."""

KEPT_BYTES = 1 << 28
"""Size of the float model's outputs that are kept, for each repair that is tried."""


@dataclass(frozen=True, slots=True)
class Halves:
    """Every second batch is in the second half; one that is repeated counts once, one without samples not at all.

    ``half_of`` has those of this rank by digest, and ``distinct`` is how many all ranks have; ``outputs`` those of the
    float model by digest, as long as they are small; ``made`` the pairs that were quantized on all of them, by edits.
    """

    pair: QuantizedPair
    batches: Iterable[Any]
    inputs_of: Callable[[Any], Batch] | None
    half_of: dict[str, int]
    distinct: int
    positions: Positions | None
    outputs: dict[str, Any] = field(default_factory=dict)
    made: dict[tuple[Edit, ...], QuantizedPair] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pair: QuantizedPair,
        batches: Iterable[Any],
        inputs_of: Callable[[Any], Batch] | None,
        mask: Mask | None = None,
    ) -> Halves:
        """Reads the batches once; they must start over.  ``mask``: which positions count where a fit is measured."""
        own = [digest_of(values) for _, values in _read(pair, batches, inputs_of)]
        found, ranks = everywhere(own), active()
        distinct = dict.fromkeys(digest for each in found for digest in each)
        # A batch that several ranks have counts for the first of them.
        before = {digest for each in found[: 0 if ranks is None else ranks.rank] for digest in each}
        mine = set(own) - before
        half_of = {digest: number % 2 for number, digest in enumerate(distinct) if digest in mine}
        positions = None if mask is None else Positions(pair.quantized, pair.program, mask)
        return cls(pair, batches, inputs_of, half_of, len(distinct), positions)

    def __iter__(self) -> Iterator[Item]:
        """The batches of this rank."""
        for half, _, values, _ in self._own():
            yield half, values

    def with_outputs(self) -> Iterator[tuple[int, list[Any], Counted | None, Any]]:
        """The batches of this rank, each with which of its positions count, None for all, and the float outputs."""
        for half, batch, values, digest in self._own():
            counted = None if self.positions is None else self.positions.of(batch, values)
            yield half, values, counted, self.returned(values, digest)

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
            self.made[plan.edits] = quantize_again(pair, self.batches, self.inputs_of, overrides=plan)
        return self.made[plan.edits]

    def _own(self) -> Iterator[tuple[int, Batch, list[Any], str]]:
        left = dict(self.half_of)
        for batch, values in _read(self.pair, self.batches, self.inputs_of):
            digest = digest_of(values)
            half = left.pop(digest, None)
            if half is not None:
                yield half, batch, values, digest


def _read(
    pair: QuantizedPair, batches: Iterable[Any], inputs_of: Callable[[Any], Batch] | None
) -> Iterator[tuple[Batch, list[Any]]]:
    for batch in read_batches(batches, inputs_of):
        values = pair.values(batch)
        if count_samples(values):
            yield batch, values
