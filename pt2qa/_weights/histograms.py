"""How many values of a weight lie in each of equally wide bins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._metrics import WITHOUT_FLOAT64
from pt2qa._simulator.stored import Integers
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
        bins: number of bins, at most 100.
        finite: whether every value is.

    Returns:
        Shape (2, bins).
    """
    both = Sides.of(reference, quantized)
    bins_per_unit = bins / (covered[1] - covered[0])
    near = finite and abs(covered[0]) * bins_per_unit < _FARTHEST
    device = "cpu" if both.memory.device.type in WITHOUT_FLOAT64 else both.memory.device
    # A value on an edge, such as 0 in a range around it, belongs to the bin above, wherever rounding leaves it.
    first = torch.tensor([_ON_EDGE - covered[0] * bins_per_unit], dtype=torch.float64, device=device)
    # Written again and again: fresh memory takes longer than what is done in it.
    memory = torch.empty(len(both.memory), dtype=torch.float64, device=device)
    numbers = torch.empty(len(both.memory), dtype=torch.int8, device=device)
    counts = np.zeros((2, bins), dtype=np.int64)
    for start in both.starts:
        for line, block in zip(counts, both.block(start), strict=True):
            values = memory[: block.numel()].copy_(block.flatten())
            if near:
                places = torch.add(first, values, alpha=bins_per_unit, out=values)
                line += _counts(numbers[: len(places)].copy_(places), bins)
            else:
                line += torch.histc(values, bins, *covered).long().cpu().numpy()
    return counts


def _counts(numbers: Tensor, bins: int) -> npt.NDArray[np.int64]:
    """How often each bin is among ``numbers``, which are bytes; the one beyond the last has the end of the range."""
    pairs, last = numbers.tensor_split([len(numbers) // 2 * 2])
    sides = bins + 1
    # Two values are counted at a time, which takes half as long: one gives the row of a table, the other the column.
    table = torch.bincount(pairs.view(torch.int16), minlength=sides << 8).view(sides, 1 << 8)
    counts = table.sum(1) + table.sum(0)[:sides] + torch.bincount(last, minlength=sides)
    counts[bins - 1] += counts[bins]
    return counts[:bins].cpu().numpy()
