"""What a configuration is worth on the evaluation data: the number that decides, and those beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._diagnosis.rows import FigureRow
from pt2qa._metrics import NoiseSums, noise_sums
from pt2qa._reconfigure.reference import Item, Reference
from pt2qa._simulator.batches import count_samples


@dataclass(frozen=True)
class Figures:
    """The quality of one configuration.

    Attributes:
        value: what decides: the user's metric, else the SQNR of the worst output in dB; nan if there is none.
        outputs: SQNR in dB by output.
        samples: how many samples.
        worst_sample: index of the one with the lowest SQNR; -1 if outputs have no axis of samples.
        worst_sample_sqnr: its SQNR in dB.
        worst_sample_share: its share of the noise of all samples, 0..1.
        without_worst: SQNR in dB over all samples but that one.
        labels: share of samples whose largest score is at the same class as in the float model; nan without classes.
    """

    value: float
    outputs: tuple[tuple[str, float], ...]
    samples: int = 0
    worst_sample: int = -1
    worst_sample_sqnr: float = math.nan
    worst_sample_share: float = math.nan
    without_worst: float = math.nan
    labels: float = math.nan

    @property
    def worst(self) -> tuple[str, float]:
        """The worst output and its SQNR."""
        return min(self.outputs, key=lambda each: -math.inf if math.isnan(each[1]) else each[1], default=("", math.nan))

    def gain_over(self, other: Figures) -> float:
        """How much better this is; inf if only this one has a number."""
        if math.isnan(self.value):
            return math.nan
        if math.isnan(other.value):
            return math.inf
        return 0.0 if self.value == other.value else self.value - other.value

    def row(self, name: str) -> FigureRow:
        """The figures as a row of the report."""
        output, sqnr = self.worst
        return FigureRow(
            name, self.value, output, sqnr, self.worst_sample, self.worst_sample_sqnr, self.labels, self.samples
        )


def figures_of(reference: Reference, run: Callable[[Item], Any], metric: Callable[[], float] | None = None) -> Figures:
    """The figures of a configuration.

    Args:
        reference: the float model's outputs on the data.
        run: what the configuration returns for an item.
        metric: the user's metric of it; None: the SQNR of the worst output decides.
    """
    sums = [NoiseSums() for _ in reference.names]
    by_sample: list[tuple[float, float]] = []
    same = counted = 0
    apart = True
    samples = 0
    for item in reference:
        outputs = reference.floating(run(item))
        count = count_samples(item.values)
        samples += count
        for number, (ref, quant) in enumerate(zip(item.outputs, outputs, strict=True)):
            [found] = noise_sums((ref, quant), ((0, 1),))
            sums[number] = sums[number].merge(found)
        apart = apart and all(each.dim() and each.shape[0] == count for each in item.outputs)
        if apart:
            by_sample += _by_sample(item.outputs, outputs, count)
        for ref, quant in zip(item.outputs, outputs, strict=True):
            if ref.dim() == 2 and ref.shape[0] == count and ref.shape[1] > 1:
                same += int((ref.argmax(1) == quant.argmax(1)).sum())
                counted += count
    found_outputs = tuple((name, each.sqnr) for name, each in zip(reference.names, sums, strict=True))
    missing = any(math.isnan(value) for _, value in found_outputs)
    least = math.nan if missing else min((value for _, value in found_outputs), default=math.nan)
    worst = _worst_sample(by_sample) if apart and len(by_sample) > 1 else (-1, math.nan, math.nan, math.nan)
    value = least if metric is None else float(metric())
    labels = same / counted if counted else math.nan
    return Figures(value, found_outputs, samples, *worst, labels)


def _by_sample(refs: Iterable[Tensor], quants: Iterable[Tensor], count: int) -> list[tuple[float, float]]:
    """Signal and noise of each sample, over all outputs."""
    signal, noise = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for ref, quant in zip(refs, quants, strict=True):
        wide = ref.reshape(count, -1).double()
        signal += wide.square().sum(1)
        noise += (wide - quant.reshape(count, -1)).square().sum(1)
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
