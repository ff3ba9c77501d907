"""How many values of a weight lie in each of equally wide bins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._simulator.stored import Integers
from pt2qa._weights.report import SIDES
from pt2qa._weights.sums import Sides

_ON_EDGE = 1e-12
"""In bins: rounding in float64 moves a value by less, and other float32 values are further from an edge."""

_FARTHEST = 1e3
"""In bins, from zero to the range: further away, rounding moves values by more than :data:`_ON_EDGE`."""


def histograms(
    reference: Tensor, quantized: Tensor | Integers, covered: tuple[float, float], bins: int, *, finite: bool
) -> npt.NDArray[np.int64]:
    """Counts of the finite values of both sides in equally wide bins; the last one holds its upper end, too.

    Args:
        reference: float values of any shape and floating-point dtype, within ``covered`` where they are finite.
        quantized: the dequantized ones, or what they are made from.
        covered: where the first bin begins and the last one ends.
        bins: number of bins, at most 41.
        finite: whether every value is.

    Returns:
        Shape (2, bins).
    """
    both = Sides.of(reference, quantized)
    bins_per_unit = bins / (covered[1] - covered[0])
    near = finite and abs(covered[0]) * bins_per_unit < _FARTHEST
    # A value on an edge, such as 0 in a range around it, belongs to the bin above, wherever rounding leaves it.
    first = torch.tensor([_ON_EDGE - covered[0] * bins_per_unit], dtype=torch.float64)
    # Written again and again: fresh memory takes longer than what is done in it.
    memory = torch.empty(len(both.memory), dtype=torch.float64)
    # Two values are counted at a time, so each line begins at an even place.
    numbers = torch.empty(len(SIDES), len(both.memory) + len(both.memory) % 2, dtype=torch.int8)
    counts = np.zeros((len(SIDES), bins), dtype=np.int64)
    for start in both.starts:
        blocks = [block.flatten() for block in both.block(start)]
        if not near:
            counts += [torch.histc(block.double(), bins, *covered).long().numpy() for block in blocks]
            continue
        for number, block in zip(numbers, blocks, strict=True):
            places = memory[: len(block)].copy_(block)
            number[: len(block)].copy_(torch.add(first, places, alpha=bins_per_unit, out=places))
        found = _frequencies(numbers[:, : len(blocks[0])], bins + 1)
        # Only the end of the range is beyond the last bin.
        found[:, bins - 1] += found[:, bins]
        counts += found[:, :bins]
    return counts


def _frequencies(numbers: Tensor, kinds: int) -> npt.NDArray[np.int64]:
    """How often each number from 0 to ``kinds`` - 1 is in either line of bytes; the first line is overwritten."""
    first, second = numbers
    moved = second - first
    if not len(moved) or moved.amin() < -1 or moved.amax() > 1:
        return np.stack([_counts(line, kinds) for line in numbers])
    # Rounding moves a value by one bin at most, so that counting the moves with the numbers counts both lines.
    moves = _counts(first.add_(moved.add_(1), alpha=kinds), 3 * kinds).reshape(3, kinds)
    return np.stack((moves.sum(0), np.roll(moves[0], -1) + moves[1] + np.roll(moves[2], 1)))


def _counts(numbers: Tensor, kinds: int) -> npt.NDArray[np.int64]:
    """How often each number from 0 to ``kinds`` - 1 is among bytes."""
    pairs, last = numbers.tensor_split([len(numbers) // 2 * 2])
    # Two values are counted at a time, which takes half as long: one gives the row of a table, the other the column.
    table = torch.bincount(pairs.view(torch.int16), minlength=kinds << 8).view(kinds, 1 << 8)
    counts: npt.NDArray[np.int64] = (
        table.sum(1) + table.sum(0)[:kinds] + torch.bincount(last, minlength=kinds)
    ).numpy()
    return counts
