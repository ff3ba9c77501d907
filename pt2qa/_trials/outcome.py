"""The quality of a configuration on the evaluation data: the number that decides, and others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._capture.inputs import detached
from pt2qa._decibels import decibels
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import ErrorSums, float64
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import NoBatchError, active, batches_before, everywhere, first_anywhere
from pt2qa._report.prose import few
from pt2qa._report.set_apart import DataHealth, SetApart, about_faults
from pt2qa._report.sums import EACH, SMALLEST, Mergeable
from pt2qa._sensitivity.gradients import WithoutGradient
from pt2qa._sensitivity.metrics import as_real, is_measured
from pt2qa._simulator.accumulate import Tally, empty_batch, first_fault, input_ranges
from pt2qa._simulator.batches import Batch, count_samples, nbytes_of, output_names, plain
from pt2qa._simulator.data import Data
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.verification import digest_of
from pt2qa._trials.evidence import Gain, interval, is_steady
from pt2qa.errors import BatchError, SelectionError

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

    def __init__(self, pair: QuantizedPair, data: Data, run: Callable[[list[Any], str], Any] | None = None) -> None:
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
                ranges = input_ranges(pair.program, values, self._positions.of(batch, values))
                read.took(count_samples(values), ranges=ranges)
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
        return [*found, *self._positions.note(slots_in(self.pair.program.outputs), "outputs")]

    @property
    def first(self) -> Item:
        """The first batch that was not set apart, of the first rank that has one."""
        found = first_anywhere(next(iter(self), None))
        assert found is not None, "at least one batch is usable"
        return found

    def floating(self, outputs: Any, batch: Batch, values: list[Any]) -> tuple[Tensor, ...]:
        """The compared outputs among those that a graph returned for a batch, zero at positions that do not count."""
        counted = self._positions.of(batch, values)
        leaves = pytree.tree_leaves(counted.zeroed_result(plain(outputs), processed=False))
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


def _nothing() -> Tensor:
    return torch.zeros(0, 0, dtype=torch.float64)


@dataclass(frozen=True)
class Outcome:
    """The quality of one configuration; SQNR is in dB.

    Attributes:
        value: what decides: the user's metric, else the SQNR of the worst output; nan if there is none.
        outputs: SQNR by output.
        missing: which outputs have no number, and why.
        worst_sample: index of the one with the lowest SQNR at the worst output; -1 if outputs have no axis of samples.
        worst_sample_share: its share of the noise of all samples, 0..1.
        labels: share of samples whose largest score is at the same class as in the float model; nan without classes.
        signal: sums of squares by output and sample, float64 of shape (outputs, samples); by batch if outputs have no
            axis of samples.
        noise: the same of the errors.
        of_metric: whether the value is the user's metric.
        unseen: the same on batches that were kept apart; None where there are none.
    """

    value: float
    outputs: tuple[tuple[str, float], ...]
    missing: tuple[str, ...] = ()
    samples: int = 0
    worst_sample: int = -1
    worst_sample_sqnr: float = math.nan
    worst_sample_share: float = math.nan
    labels: float = math.nan
    signal: Tensor = field(default_factory=_nothing, repr=False, compare=False)
    noise: Tensor = field(default_factory=_nothing, repr=False, compare=False)
    of_metric: bool = False
    unseen: Outcome | None = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> float:
        """The value for comparisons: nan ranks below any number."""
        return -math.inf if math.isnan(self.value) else self.value

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.outputs, key=lambda each: -math.inf if math.isnan(each[1]) else each[1], default=("", math.nan))

    @property
    def by_quality(self) -> list[str]:
        """The outputs, the worst first."""
        return [name for name, _ in sorted(self.outputs, key=lambda each: (not math.isnan(each[1]), each[1]))]

    @property
    def parts(self) -> tuple[Outcome, ...]:
        """This one, and that of the batches that were kept apart."""
        return (self,) if self.unseen is None else (self, self.unseen)

    @property
    def lowest(self) -> float:
        """dB of the worst output that other data have in 95 of 100 cases, or more; nan if nothing tells."""
        names = [name for name, _ in self.outputs]
        if self.worst[0] not in names or not self.noise.numel():
            return math.nan
        number = names.index(self.worst[0])
        return interval(self.signal[number], self.noise[number])[0]

    def gain_over(self, other: Outcome, output: str = "", but: int = -1) -> Gain:
        """How much better this is, at an output or at the one that was worst; value is inf if only this has a number.

        With the user's metric, the value is in its unit.  ``but`` is a sample that is left out.
        """
        output = output or other.worst[0]
        found = self._of_output(other, output, but)
        return replace(found, value=_difference(other.value, self.value)) if self.of_metric else found

    def _of_output(self, other: Outcome, output: str, but: int) -> Gain:
        names = [name for name, _ in self.outputs]
        if output not in names:
            return Gain(_difference(other.value, self.value))
        number = names.index(output)
        value = _difference(other.outputs[number][1], self.outputs[number][1])
        if not math.isfinite(value) or self.noise.shape != other.noise.shape or not self.noise.numel():
            return (
                Gain(value, output=output, low=value, high=value) if value == math.inf else Gain(value, output=output)
            )
        before, after = other.noise[number], self.noise[number]
        if but >= 0:
            rest = torch.arange(len(before)) != but
            before, after = before[rest], after[rest]
            value = _difference(decibels(1.0, float(before.sum())), decibels(1.0, float(after.sum())))
        return Gain(value, *interval(before, after), output, is_steady(before, after))


def _difference(before: float, after: float) -> float:
    if math.isnan(after):
        return math.nan
    if math.isnan(before):
        return math.inf
    return 0.0 if before == after else after - before


def outcome_of(
    reference: Reference,
    run: Callable[[Item], Any],
    metric: Callable[[], float] | None = None,
    unseen: Collection[str] = (),
) -> Outcome:
    """The quality of the configuration that ``run`` runs; without a metric, the SQNR of the worst output decides.

    That of the batches with digests in ``unseen`` is apart, for who does not search on them.
    """
    names = reference.names
    own, held = (_Sums((ErrorSums(),) * len(names)) for _ in range(2))
    for item in reference:
        part = held if item.key in unseen else own
        part.add(item, reference.floating(run(item), item.batch, item.values), names)
    whole, kept = (functools.reduce(_Sums.merge, each) for each in zip(*everywhere((own, held)), strict=True))
    found = _outcome(whole, names, metric)
    return replace(found, unseen=_outcome(kept, names, None)) if kept.samples else found


def _outcome(whole: _Sums, names: Sequence[str], metric: Callable[[], float] | None) -> Outcome:
    found = tuple((name, each.sqnr) for name, each in zip(names, whole.outputs, strict=True))
    absent = ((name, each) for name, each in zip(names, whole.outputs, strict=True) if math.isnan(each.sqnr))
    missing = tuple(f"{name} has no SQNR: {each.reason}" for name, each in absent)
    least = math.nan if missing else min((value for _, value in found), default=math.nan)
    signal, noise = whole.by_unit()
    apart = whole.apart and signal.shape[1] > 1
    order = [-math.inf if math.isnan(value) else value for _, value in found]
    number = order.index(min(order, default=0.0)) if order else 0
    worst = _worst_sample(signal[number], noise[number]) if apart else (-1, math.nan, math.nan)
    value = least if metric is None else metric()
    labels = whole.same / whole.counted if whole.counted else math.nan
    return Outcome(value, found, missing, whole.samples, *worst, labels, signal, noise, metric is not None)


@dataclass(slots=True)
class _Sums(Mergeable):
    """Signal and noise by output; and by batch, of shape (2, outputs, samples), as long as outputs have samples."""

    outputs: tuple[ErrorSums, ...] = field(metadata=EACH)
    batches: list[Tensor] = field(default_factory=list)
    apart: bool = field(default=True, metadata=SMALLEST)
    same: int = 0
    counted: int = 0
    samples: int = 0

    def add(self, item: Item, outputs: Sequence[Tensor], names: Sequence[str]) -> None:
        count = count_samples(item.values)
        self.samples += count
        for name, ref, quant in zip(names, item.outputs, outputs, strict=True):
            if ref.shape != quant.shape:
                raise SelectionError(
                    f"{name} has shape {tuple(ref.shape)} in float and {tuple(quant.shape)} quantized, so it has no "
                    "SQNR. Pass target=pt2qa.Target(at_least, metric=a function of a model)."
                )
            if ref.dim() == 2 and ref.shape[0] == count and ref.shape[1] > 1:
                self.same += int((ref.argmax(1) == quant.argmax(1)).sum())
                self.counted += count
        both = zip(item.outputs, outputs, strict=True)
        self.outputs = tuple(own.update(*each) for own, each in zip(self.outputs, both, strict=True))
        self.apart = self.apart and all(each.dim() and each.shape[0] == count for each in item.outputs)
        if item.outputs:
            rows = count if self.apart else 1
            sums = [squares_by_row(ref, quant, rows) for ref, quant in zip(item.outputs, outputs, strict=True)]
            self.batches.append(torch.stack(sums, 1))

    def by_unit(self) -> tuple[Tensor, Tensor]:
        """Signal and noise of shape (outputs, samples); or by batch."""
        if not self.batches:
            return _nothing(), _nothing()
        units = self.batches if self.apart else [each.sum(2, keepdim=True) for each in self.batches]
        signal, noise = torch.cat(units, 2)
        return signal, noise


def squares_by_row(ref: Tensor, quant: Tensor, rows: int) -> Tensor:
    """Sums of squares of an output and of its error, for each of so many parts: float64 of shape (2, rows)."""
    wide = float64(ref).reshape(rows, -1)
    return torch.stack([wide.square().sum(1), (wide - float64(quant).reshape(rows, -1)).square().sum(1)]).cpu()


def _worst_sample(signal: Tensor, noise: Tensor) -> tuple[int, float, float]:
    """Position, SQNR and share of the noise of the worst sample."""
    pairs = zip(signal.tolist(), noise.tolist(), strict=True)
    known = [(decibels(*each), number) for number, each in enumerate(pairs)]
    sqnr, number = min((each for each in known if not math.isnan(each[0])), default=(math.nan, -1))
    if number < 0:
        return -1, math.nan, math.nan
    whole = float(noise.sum())
    return number, sqnr, float(noise[number]) / whole if whole else math.nan


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
