"""The random vectors for projecting outputs, and how reliable the ranking is that they give.

The vectors are ±1, orthogonal to each other within a sample. All vectors of a batch are one random vector times rows of
a Hadamard matrix that repeats along the elements.  Each is as random as before, but together they vary less: where K is
a power of two that divides the D outputs of a sample, K of them have (D - K) / (D - 1) of the variance of K independent
ones; from a power of two on that is at least D, none.

A redrawn ranking has the same values, each shifted by a normal deviate times its error, in dB. Estimates lie further
apart than what they estimate, so they are first drawn together until their spread is what it was without the errors.
The similarity of two rankings is the Spearman correlation of their ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FEWEST, MOST = 4, 64
"""Projections per batch."""

ALIKE = 0.97
"""Spearman correlation that a redrawn ranking must reach."""

OFTEN = 0.9
"""How often it must."""


def reached_by_most(noise: Sequence[float], variance: Sequence[float]) -> float:
    """Spearman correlation that nine of ten redrawn rankings reach, from linear noise; 1 with nothing to rank."""
    # Rows without noise tie for the last rank anyway.
    pairs = [(own, spread) for own, spread in zip(noise, variance, strict=True) if own > 0 and math.isfinite(own)]
    values = np.array([10 * math.log10(own) for own, _ in pairs])
    errors = np.array([error_of(own, spread) for own, spread in pairs])
    if len(values) < 2:
        return 1.0
    drawn = np.random.default_rng(20241).standard_normal((50, len(values)))
    spread = float(values.var())
    without = math.sqrt(max(0.0, 1 - float(np.square(errors).mean()) / spread)) if spread else 0.0
    ranks = (without * values + drawn * errors).argsort(1).argsort(1)
    own = values.argsort().argsort()
    # Without ties: 1 - 6 * sum of squared differences of ranks / (n * (n² - 1)).
    differences = ((ranks - own) ** 2).sum(1)
    found = 1 - 6 * differences / (len(values) * (len(values) ** 2 - 1))
    return float(np.quantile(found, 1 - OFTEN))


def error_of(noise: float, variance: float) -> float:
    """One sigma, in dB, of an estimated noise; ``variance`` is linear.

    A noise with n degrees of freedom, a sum of n squares, is estimated with the variance 2 noise² / (n + 2), see
    :class:`pt2qa._sensitivity.projection.ProjectedBatch`.  Its logarithm has the variance of that of a chi-squared
    variable, the trigamma function of n / 2: of few squares more than the derivative of the logarithm tells.
    """
    if variance == 0.0 or not noise > 0:
        return 0.0
    half = max(noise * noise / variance - 1, 0.5)
    return 10 / math.log(10) * math.sqrt(1 / half + 1 / (2 * half**2) + 1 / (6 * half**3))


def needed(noise: Sequence[float], variance: Sequence[float], earlier: Sequence[float], projections: int) -> int | None:
    """How many projections of the last batch make the ranking reliable; None if :data:`MOST` do not.

    ``noise`` is that of the rows over all batches; its variance is ``variance`` for the last batch, which has
    ``projections`` so far, and ``earlier`` for the batches before it.
    """
    count = projections
    while True:
        total = [before + own * projections / count for before, own in zip(earlier, variance, strict=True)]
        if reached_by_most(noise, total) >= ALIKE:
            return count
        if count >= MOST:
            return None
        count = min(2 * count, MOST)


def random_signs(outputs: Sequence[Tensor], samples: int, count: int, seed: int, first: int = 0) -> list[list[Tensor]]:
    """For each output ``count`` vectors of its shape and dtype, numbered from ``first``, orthogonal to those before it.

    An output whose first axis has size ``samples`` holds one row for each.  torch's own generator is not used.
    """
    generator = torch.Generator().manual_seed(20240 + seed)
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
