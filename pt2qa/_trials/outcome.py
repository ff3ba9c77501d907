"""The quality of a configuration on the evaluation data: the number that decides, and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._metrics import ErrorSums, float64
from pt2qa._ranks import everywhere
from pt2qa._simulator.batches import count_samples
from pt2qa._trials.reference import Item, Reference
from pt2qa.errors import SelectionError


@dataclass(frozen=True)
class Outcome:
    """The quality of one configuration; SQNR is in dB.

    Attributes:
        value: what decides: the user's metric, else the SQNR of the worst output; nan if there is none.
        outputs: SQNR by output.
        missing: which outputs have no number, and why.
        worst_sample: index of the one with the lowest SQNR; -1 if outputs have no axis of samples.
        worst_sample_share: its share of the noise of all samples, 0..1.
        without_worst: SQNR over all samples but that one.
        labels: share of samples whose largest score is at the same class as in the float model; nan without classes.
    """

    value: float
    outputs: tuple[tuple[str, float], ...]
    missing: tuple[str, ...] = ()
    samples: int = 0
    worst_sample: int = -1
    worst_sample_sqnr: float = math.nan
    worst_sample_share: float = math.nan
    without_worst: float = math.nan
    labels: float = math.nan

    @property
    def rank(self) -> float:
        """The value for comparisons: nan ranks below any number."""
        return -math.inf if math.isnan(self.value) else self.value

    @property
    def worst(self) -> tuple[str, float]:
        return min(self.outputs, key=lambda each: -math.inf if math.isnan(each[1]) else each[1], default=("", math.nan))

    def gain_over(self, other: Outcome) -> float:
        """How much better this is; inf if only this one has a number."""
        if math.isnan(self.value):
            return math.nan
        if math.isnan(other.value):
            return math.inf
        return 0.0 if self.value == other.value else self.value - other.value


def outcome_of(reference: Reference, run: Callable[[Item], Any], metric: Callable[[], float] | None = None) -> Outcome:
    """The quality of the configuration that ``run`` runs; without a metric, the SQNR of the worst output decides."""
    names = reference.names
    own = _Sums([ErrorSums() for _ in names])
    for item in reference:
        own.add(item, reference.floating(run(item), item.batch, item.values), names)
    whole, *others = everywhere(own)
    for other in others:
        whole.extend(other)
    found = tuple((name, each.sqnr) for name, each in zip(names, whole.outputs, strict=True))
    absent = ((name, each) for name, each in zip(names, whole.outputs, strict=True) if math.isnan(each.sqnr))
    missing = tuple(f"{name} has no SQNR: {each.reason}" for name, each in absent)
    least = math.nan if missing else min((value for _, value in found), default=math.nan)
    apart = whole.apart and len(whole.by_sample) > 1
    worst = _worst_sample(whole.by_sample) if apart else (-1, math.nan, math.nan, math.nan)
    value = least if metric is None else metric()
    labels = whole.same / whole.counted if whole.counted else math.nan
    return Outcome(value, found, missing, whole.samples, *worst, labels)


@dataclass(slots=True)
class _Sums:
    """Signal and noise by output, and by sample if outputs have an axis of samples."""

    outputs: list[ErrorSums]
    by_sample: list[tuple[float, float]] = field(default_factory=list)
    apart: bool = True
    same: int = 0
    counted: int = 0
    samples: int = 0

    def add(self, item: Item, outputs: Sequence[Tensor], names: Sequence[str]) -> None:
        count = count_samples(item.values)
        self.samples += count
        for number, (name, ref, quant) in enumerate(zip(names, item.outputs, outputs, strict=True)):
            if ref.shape != quant.shape:
                raise SelectionError(
                    f"{name} has shape {tuple(ref.shape)} in float and {tuple(quant.shape)} quantized, so it has no "
                    "SQNR. Pass target=pt2qa.Target(at_least, metric=a function of a model)."
                )
            self.outputs[number] = self.outputs[number].update(ref, quant)
            if ref.dim() == 2 and ref.shape[0] == count and ref.shape[1] > 1:
                self.same += int((ref.argmax(1) == quant.argmax(1)).sum())
                self.counted += count
        self.apart = self.apart and all(each.dim() and each.shape[0] == count for each in item.outputs)
        if self.apart:
            self.by_sample += _by_sample(item.outputs, outputs, count)

    def extend(self, other: _Sums) -> None:
        self.outputs = [own.merge(further) for own, further in zip(self.outputs, other.outputs, strict=True)]
        self.by_sample += other.by_sample
        self.apart = self.apart and other.apart
        self.same += other.same
        self.counted += other.counted
        self.samples += other.samples


def _by_sample(refs: Iterable[Tensor], quants: Iterable[Tensor], count: int) -> list[tuple[float, float]]:
    signal, noise = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for ref, quant in zip(refs, quants, strict=True):
        wide = float64(ref).reshape(count, -1)
        signal += wide.square().sum(1).cpu()
        noise += (wide - float64(quant).reshape(count, -1)).square().sum(1).cpu()
    return list(zip(signal.tolist(), noise.tolist(), strict=True))


def _worst_sample(sums: list[tuple[float, float]]) -> tuple[int, float, float, float]:
    """Position, SQNR and share of the noise of the worst sample, and the SQNR of all others together."""
    known = [(decibels(signal, noise), number) for number, (signal, noise) in enumerate(sums)]
    known = [each for each in known if not math.isnan(each[0])]
    if not known:
        return -1, math.nan, math.nan, math.nan
    sqnr, number = min(known)
    signal, noise = (sum(each[part] for each in sums) for part in (0, 1))
    own_signal, own_noise = sums[number]
    share = own_noise / noise if noise else math.nan
    return number, sqnr, share, decibels(signal - own_signal, noise - own_noise)
