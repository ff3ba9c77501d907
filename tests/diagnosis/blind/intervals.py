"""``python -m tests.diagnosis.blind.intervals``: how often the interval of a gain holds other samples of one kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from pt2qa._trials.evidence import Gain, interval, is_steady
from pt2qa._trials.outcome import squares_by_row
from tests.diagnosis.blind.bed import Bed, UnfitError
from tests.diagnosis.blind.faults import KINDS

NETS = ("cnn", "encoder", "words", "lstm", "tabular")
FAULTS = (
    *("faint-calibration", "noise-calibration", "reduced-range"),
    *("one-class", "loud-channels", "per-tensor-weights"),
)
SIZES = ((24, 24), (32, 32), (48, 96))
"""How many samples give an interval, and on how many others the gain is measured."""

BATCHES, DRAWS = 250, 100


def squared_errors(pair: Any, batches: Sequence[Tensor]) -> Tensor:
    """Of the first output by sample, float64."""
    found = []
    for batch in batches:
        reference, quantized = (graph(batch) for graph in (pair.reference, pair.quantized))
        if isinstance(reference, list | tuple):
            reference, quantized = reference[0], quantized[0]
        found.append(squares_by_row(reference, quantized, len(batch))[1])
    return torch.cat(found)


def errors_of(net: str, fault: str, seed: int) -> tuple[Tensor, Tensor]:
    """With the fault and without it, where both have an error."""
    kind, found = KINDS[fault], []
    for sick in (True, False):
        bed = Bed.made(net, seed, "x86")
        kind.plant(bed, random.Random(seed), sick)
        found.append(squared_errors(bed.pair(), bed.net.batches(99, BATCHES)))
    known = (found[0] > 0) & (found[1] > 0)
    return found[0][known], found[1][known]


def share(draw: Callable[[torch.Generator], bool]) -> float:
    """Of draws that hold."""
    generator = torch.Generator().manual_seed(3)
    return mean(draw(generator) for _ in range(DRAWS))


def gain_of(before: Tensor, after: Tensor) -> Gain:
    value = float(10 * (before.sum() / after.sum()).log10())
    return Gain(value, *interval(before, after), "", is_steady(before, after))


def measured(before: Tensor, after: Tensor, size: int, others: int) -> tuple[float, ...]:
    """Shares of draws: others within the interval; gains that are certain, or hold; these where chance swaps both."""

    def drawn(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(before), generator=generator)
        return order[:size], order[size : size + others]

    def within(generator: torch.Generator) -> bool:
        own, rest = drawn(generator)
        found = gain_of(before[own], after[own])
        return found.low <= gain_of(before[rest], after[rest]).value <= found.high

    def gain(generator: torch.Generator) -> Gain:
        own, _ = drawn(generator)
        return gain_of(before[own], after[own])

    def by_chance(generator: torch.Generator) -> Gain:
        own, _ = drawn(generator)
        swap = torch.rand(size, generator=generator) < 0.5
        return gain_of(torch.where(swap, after[own], before[own]), torch.where(swap, before[own], after[own]))

    return (
        share(within),
        share(lambda generator: gain(generator).is_certain),
        share(lambda generator: gain(generator).holds),
        share(lambda generator: by_chance(generator).is_certain),
        share(lambda generator: by_chance(generator).holds),
    )


def main() -> None:
    cases = []
    for net, fault, seed in ((net, fault, seed) for net in NETS for fault in FAULTS for seed in (1, 2)):
        if net in KINDS[fault].nets:
            try:
                cases.append(errors_of(net, fault, seed))
            except UnfitError:
                continue
    rows = []
    for size, others in SIZES:
        found = [measured(*case, size, others) for case in cases]
        held, *gains, certain, holds = zip(*found, strict=True)
        rows.append((size, others, mean(held), min(held), *map(mean, gains), mean(certain), mean(holds), max(holds)))
    headers = ["samples", "others", "held", "least", "certain", "holds", "certain by chance", "holds by chance", "most"]
    print(f"{len(cases)} nets with a fault")
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main()
