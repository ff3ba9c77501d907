"""The random vectors for projecting outputs: ±1, orthogonal to each other within a sample.

All vectors of a batch are one random vector times rows of a Hadamard matrix that repeats along the elements.  Each is
as random as before, but together they vary less: where K is a power of two that divides the D outputs of a sample, K of
them have (D - K) / (D - 1) of the variance of K independent ones; from a power of two on that is at least D, none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

SEED = 20240
"""Added to the seed of every batch."""


def random_signs(outputs: Sequence[Tensor], samples: int, count: int, seed: int, first: int = 0) -> list[list[Tensor]]:
    """For each output ``count`` vectors of its shape and dtype, numbered from ``first``, orthogonal to those before it.

    An output whose first axis has size ``samples`` holds one row for each.  torch's own generator is not used.
    """
    generator = torch.Generator().manual_seed(SEED + seed)
    rows = samples if all(output.dim() > 0 and output.shape[0] == samples for output in outputs) else 1
    size = sum(output.numel() for output in outputs) // rows
    matrix = _hadamard(first + count)
    period = matrix.shape[1]
    offset, found = 0, []
    for output in outputs:
        signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1).to(output)
        # Counted through all outputs of one sample, then the next: neighbours get different columns.
        own = output.numel() // rows
        position = size * torch.arange(rows)[:, None] + torch.arange(offset, offset + own)
        columns = position.remainder_(period).reshape(signs.shape)
        offset += own
        found.append([signs * matrix[number][columns].to(output) for number in range(first, first + count)])
    return found


def left_to_chance(outputs: Sequence[Tensor], samples: int, count: int, *, apart: bool) -> float:
    """Share of the variance of independent vectors, 0..1; ``apart``: whether each sample is projected separately."""
    return _left(sum(output.numel() for output in outputs) // (samples if apart else 1), count)


@functools.lru_cache(64)
def _left(size: int, count: int) -> float:
    """The variance of ``count`` independent vectors is that of products of two elements, (v·y)² - |y|².

    It is proportional to the squared mean of v_a v_b over the vectors, 1 / count on average; here it is that of two
    columns of the Hadamard matrix.
    """
    if size < 2:
        return 0.0
    rows = _hadamard(count).double()
    period = rows.shape[1]
    elements = torch.full((period,), float(size // period), dtype=torch.float64)
    elements[: size % period] += 1
    # The sum of squared products of columns is that of rows.
    squares = float(((rows * elements) @ rows.T / count).square().sum())
    return max(0.0, count * (squares - size) / (size * (size - 1)))


@functools.lru_cache(64)
def _hadamard(count: int) -> Tensor:
    """The first rows of the Hadamard matrix whose entries are the parities of ``row & column``, as ±1."""
    found = torch.ones(1, 1)
    while len(found) < count:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found[:count]
