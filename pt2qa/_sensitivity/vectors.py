"""The random vectors for projecting outputs: ±1, orthogonal to each other within a sample.

All vectors of a batch are one random vector times rows of a Hadamard matrix that repeats along the elements.  Each is
as random as before, but together they vary less: with D outputs per sample, K of them have (D - K) / (D - 1) of the
variance of K independent ones, none at all from K = D on.
"""

from __future__ import annotations

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
    period = 1 << (first + count - 1).bit_length()
    offset, found = 0, []
    for output in outputs:
        signs = torch.randint(0, 2, output.shape, generator=generator).mul_(2).sub_(1).to(output)
        # Counted through all outputs of one sample, then the next: neighbours get different columns.
        own = output.numel() // rows
        position = size * torch.arange(rows)[:, None] + torch.arange(offset, offset + own)
        columns = position.remainder_(period).reshape(signs.shape)
        offset += own
        found.append(
            [signs * _hadamard_row(number, period)[columns].to(output) for number in range(first, first + count)]
        )
    return found


def left_to_chance(outputs: Sequence[Tensor], samples: int, count: int, *, apart: bool) -> float:
    """Share of the variance of independent vectors, 0..1; ``apart``: whether each sample is projected separately."""
    size = sum(output.numel() for output in outputs) // (samples if apart else 1)
    return max(0.0, (size - count) / (size - 1)) if size > 1 else 0.0


def _hadamard_row(number: int, period: int) -> Tensor:
    """A row of the Hadamard matrix whose entries are the parities of ``row & column``, repeated to a longer period."""
    return torch.tensor([(-1) ** (number & column).bit_count() for column in range(period)])
