"""How many values of a weight lie in each of equally wide bins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._metrics import WITHOUT_FLOAT64
from pt2qa._weights.sums import BLOCK

_ON_EDGE = 1e-12
"""In bins: rounding in float64 moves a value by less, and other float32 values are further from an edge."""

_FARTHEST = 1e3
"""In bins, from zero to the range: further away, rounding moves values by more than :data:`_ON_EDGE`."""


def histogram(value: Tensor, covered: tuple[float, float], bins: int, *, finite: bool) -> npt.NDArray[np.int64]:
    """Counts of the finite values of a tensor in equally wide bins; the last one holds its upper end, too.

    Args:
        value: of any shape and floating-point dtype, within ``covered`` where it is finite.
        covered: where the first bin begins and the last one ends.
        bins: number of bins, at most 100.
        finite: whether every value is.
    """
    if value.device.type in WITHOUT_FLOAT64:
        value = value.cpu()
    blocks = value.flatten().split(BLOCK)
    bins_per_unit = bins / (covered[1] - covered[0])
    # A value on an edge, such as 0 in a range around it, belongs to the bin above, whatever its place is rounded to.
    low = covered[0] - _ON_EDGE / bins_per_unit
    if not finite or not abs(covered[0]) * bins_per_unit < _FARTHEST:
        counts = torch.stack([torch.histc(block.double(), bins, *covered) for block in blocks]).sum(0)
        return counts.long().cpu().numpy()
    # Two values are counted at a time, which takes half as long: one gives the row of a table, the other the column.
    sides = bins + 1
    table = torch.zeros(sides, sides, dtype=torch.int64, device=value.device)
    last = torch.zeros(sides, dtype=torch.int64, device=value.device)
    memory = torch.empty(len(blocks[0]), dtype=torch.float64, device=value.device)
    for block in blocks:
        numbers = memory[: len(block)].copy_(block).sub_(low).mul_(bins_per_unit).short()
        half = len(numbers) // 2
        pairs = numbers[:half].mul_(sides).add_(numbers[half : 2 * half])
        table += torch.bincount(pairs, minlength=sides**2).view_as(table)
        last += torch.bincount(numbers[2 * half :], minlength=sides)
    counts = table.sum(0) + table.sum(1) + last
    # The bin beyond the last one holds the values at the end of the range.
    counts[bins - 1] += counts[bins]
    return counts[:bins].cpu().numpy()
