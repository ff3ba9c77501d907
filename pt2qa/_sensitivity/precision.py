"""How far a ranking can be trusted, from the sampling error of its rows, and how many projections that takes.

A ranking drawn anew is made of the same values, each moved by a normal number times its error, in dB.  How alike two
rankings are is Spearman's correlation of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FEWEST = 4
"""Projections of a batch that are made in any case."""

MOST = 64
"""Projections of a batch at most."""

ALIKE = 0.97
"""Spearman's correlation that a ranking drawn anew must reach."""

OFTEN = 0.9
"""How often it must."""

_DRAWS = 50
_SEED = 20241


def reached_by_most(noise: Sequence[float], variance: Sequence[float]) -> float:
    """Spearman's correlation that nine of ten rankings drawn anew reach, from linear noise; 1 for nothing to rank."""
    values, errors = _decibels(noise, variance)
    if len(values) < 2:
        return 1.0
    drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, len(values)))
    ranks = _ranks(values + drawn * errors)
    own = _ranks(values[None])[0]
    # Without ties: 1 - 6 * sum of squared differences of ranks / (n * (n² - 1)).
    differences = ((ranks - own) ** 2).sum(1)
    found = 1 - 6 * differences / (len(values) * (len(values) ** 2 - 1))
    return float(np.quantile(found, 1 - OFTEN))


def needed(noise: Sequence[float], variance: Sequence[float], earlier: Sequence[float], projections: int) -> int:
    """How many projections of the last batch, :data:`MOST` at most, make the ranking fit to be trusted.

    ``noise`` is that of the rows over all batches; its variance is ``variance`` of the last batch, which has
    ``projections`` so far, and ``earlier`` of the batches before.
    """
    count = projections
    while count < MOST:
        total = [before + own * projections / count for before, own in zip(earlier, variance, strict=True)]
        if reached_by_most(noise, total) >= ALIKE:
            break
        count = min(2 * count, MOST)
    return count


def _decibels(noise: Sequence[float], variance: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Values and their errors of rows that have noise; the others share the end of the ranking in any case."""
    pairs = [(own, spread) for own, spread in zip(noise, variance, strict=True) if own > 0 and math.isfinite(own)]
    values = np.array([10 * math.log10(own) for own, _ in pairs])
    errors = np.array([10 / math.log(10) * math.sqrt(spread) / own for own, spread in pairs])
    return values, errors


def _ranks(values: np.ndarray) -> np.ndarray:
    return values.argsort(1).argsort(1)
