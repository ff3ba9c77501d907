"""How reliable a ranking is, from the sampling error of its rows, and how many projections that takes.

A redrawn ranking has the same values, each shifted by a normal deviate times its error, in dB. Estimates lie further
apart than what they estimate, so they are first drawn together until their spread is what it was without the errors.
The similarity of two rankings is the Spearman correlation of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FEWEST, MOST = 4, 64
"""Projections per batch."""

ALIKE = 0.97
"""Spearman correlation that a redrawn ranking must reach."""

OFTEN = 0.9
"""How often it must."""

_DRAWS = 50
_SEED = 20241


def reached_by_most(noise: Sequence[float], variance: Sequence[float]) -> float:
    """Spearman correlation that nine of ten redrawn rankings reach, from linear noise; 1 with nothing to rank."""
    values, errors = _decibels(noise, variance)
    if len(values) < 2:
        return 1.0
    drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, len(values)))
    spread = float(values.var())
    without = math.sqrt(max(0.0, 1 - float(np.square(errors).mean()) / spread)) if spread else 0.0
    ranks = _ranks(without * values + drawn * errors)
    own = _ranks(values[None])[0]
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


def _decibels(noise: Sequence[float], variance: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Values and errors of rows with noise; the others tie for the last rank anyway."""
    pairs = [(own, spread) for own, spread in zip(noise, variance, strict=True) if own > 0 and math.isfinite(own)]
    values = np.array([10 * math.log10(own) for own, _ in pairs])
    errors = np.array([error_of(own, spread) for own, spread in pairs])
    return values, errors


def _ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort(1).argsort(1)
