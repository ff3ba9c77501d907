"""The float model's outputs on the data: computed once, and reused for all configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import NoBatchError, batches_before, everywhere, first_anywhere
from pt2qa._report.prose import few
from pt2qa._report.set_apart import DataHealth, SetApart, about_faults
from pt2qa._sensitivity.metrics import as_real, is_measured
from pt2qa._simulator.accumulate import Tally, empty_batch, first_fault, input_ranges
from pt2qa._simulator.batches import Batch, count_samples, output_names, plain
from pt2qa._simulator.data import Data
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.verification import digest_of
from pt2qa.errors import BatchError

KEPT_BYTES = 1 << 28
"""Memory for the float model's outputs, 256 MiB; for batches beyond it the float model is rerun each time."""


@dataclass(frozen=True)
class Item:
    """A batch as the model takes it, the same flattened, its digest, and the float model's floating-point outputs."""

    batch: Batch
    values: list[Any]
    key: str
    outputs: tuple[Tensor, ...]


class Reference:
    """The data, and the floating-point outputs of a pair's float model on each.

    Batches without samples, or on which the float model itself returns NaN, are set apart, and nothing measured without
    the latter meets a target.  ``health`` is that of all ranks' data.  ``positions`` are those of the outputs with
    ``names`` among all flattened model outputs, ``uncounted`` the names of those that are integers or booleans;
    ``runs`` is how often the float model ran.  ``run`` runs it on flat inputs with this digest; None: the simulator.
    ``keys`` are the digests of this rank's batches; ``fold_of`` has those of all ranks, each with its fold, 0 or 1 in
    turns.
    """

    def __init__(
        self,
        pair: QuantizedPair,
        data: Data,
        run: Callable[[list[Any], str], Any] | None = None,
    ) -> None:
        self.pair, self.data = pair, data
        self._run = run or (lambda values, key: pair.simulator.run(values, on=False))
        self._positions = data.positions(pair.quantized, pair.program)
        self.names = tuple[str, ...]()
        self.positions = tuple[int, ...]()
        self.uncounted = tuple[str, ...]()
        self.runs = 0
        self._digests: dict[int, str] = {}
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._skipped: set[str] = set()
        self._free = KEPT_BYTES
        self.keys: list[str] = []
        read = Tally()
        before = batches_before(lambda: sum(1 for _ in self._read()))
        for number, (batch, values, key) in enumerate(self._read(), before):
            fault = self._fault(number, batch, values, key)
            if fault is None:
                self.keys.append(key)
                counted = None if self._positions is None else self._positions.of(batch, values)
                read.took(count_samples(values), ranges=input_ranges(pair.program, values, counted))
            else:
                read.took(0, fault)
                self._skipped.add(key)
                self._kept.pop(key, None)
        shared = first_anywhere((self.names, self.positions, self.uncounted) if self.runs else None)
        self.names, self.positions, self.uncounted = shared or ((), (), ())
        distinct = dict.fromkeys(key for each in everywhere(self.keys) for key in each)
        self.fold_of = {key: number % 2 for number, key in enumerate(distinct)}
        self.health = functools.reduce(DataHealth.merge, everywhere(read.health))
        if len(self.health.set_apart) == self.health.batches:
            if not self.health.faults:
                raise NoBatchError(
                    "no batch with samples to measure on. Pass a list or a loader that starts over, not an iterator."
                )
            raise BatchError(
                "the float model returns NaN on every batch, so there is nothing to compare with. "
                f"{' '.join(about_faults(self.health.set_apart, self.health.batches))} "
                "Pass batches on which it returns numbers."
            )

    def __iter__(self) -> Iterator[Item]:
        for batch, values, key in self._read():
            if key not in self._skipped:
                yield Item(batch, values, key, self._outputs(key, batch, values))

    def _fault(self, number: int, batch: Batch, values: list[Any], key: str) -> SetApart | None:
        """Why a batch is set apart; None if it is not."""
        samples = count_samples(values)
        if not samples:
            return empty_batch(number)
        outputs = self._outputs(key, batch, values)
        broken = [name for name, leaf in zip(self.names, outputs, strict=True) if bool(leaf.isnan().any())]
        if not broken:
            return None
        found = first_fault(self.pair.simulator, values, number, samples)
        return found or SetApart(number, samples, -1, "reference", "NaN", broken[0])

    def of(self, pair: QuantizedPair) -> Reference:
        trained = pair.recipe is not None and pair.recipe.qat
        return Reference(pair, self.data) if trained and pair is not self.pair else self

    @property
    def notes(self) -> list[str]:
        """Which outputs do not count, and what the mask does not reach."""
        found = []
        if self.uncounted:
            found.append(f"integer and boolean outputs are not measured: {few(self.uncounted)}")
        if self._positions is not None and self._positions.layouts is not None:
            found += self._positions.note(slots_in(self.pair.program.outputs), "outputs")
        return found

    @property
    def first(self) -> Item:
        """The first batch that was not set apart, of the first rank that has one."""
        found = first_anywhere(next(iter(self), None))
        assert found is not None, "at least one batch is usable"
        return found

    def floating(self, outputs: Any, batch: Batch, values: list[Any]) -> tuple[Tensor, ...]:
        """The compared outputs among those that a graph returned for a batch, zero at positions that do not count."""
        outputs = plain(outputs)
        if self._positions is not None:
            outputs = self._positions.of(batch, values).zeroed_result(outputs, processed=False)
        leaves = pytree.tree_leaves(outputs)
        return tuple(as_real(leaves[position]) for position in self.positions)

    def _read(self) -> Iterator[tuple[Batch, list[Any], str]]:
        stays = isinstance(self.data.batches, list | tuple) and self.data.inputs_of is None
        for number, batch in enumerate(self.data):
            values = self.pair.values(batch)
            key = self._digests.get(number) if stays else None
            self._digests[number] = key or digest_of(values)
            yield batch, values, self._digests[number]

    def _outputs(self, key: str, batch: Batch, values: list[Any]) -> tuple[Tensor, ...]:
        known = self._kept.get(key)
        if known is not None:
            return known
        outputs = self._run(values, key)
        if not self.runs:
            leaves = pytree.tree_leaves(outputs)
            names = output_names(self.pair.quantized, len(leaves))
            self.positions = tuple(position for position, leaf in enumerate(leaves) if is_measured(leaf))
            self.names = tuple(names[position] for position in self.positions)
            self.uncounted = tuple(
                name
                for name, leaf in zip(names, leaves, strict=True)
                if isinstance(leaf, Tensor) and not is_measured(leaf)
            )
        self.runs += 1
        # Clones: an output may be a view of an input, or of a larger value that would be kept alive.
        found = tuple(leaf.clone() for leaf in self.floating(outputs, batch, values))
        size = sum(leaf.numel() * leaf.element_size() for leaf in found)
        if size <= self._free:
            self._free -= size
            self._kept[key] = found
        return found
