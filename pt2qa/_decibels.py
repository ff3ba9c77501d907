"""Power ratios in decibels: the one formula that analyses and reports share.  Does not import torch."""

from __future__ import annotations

from math import inf, isnan, log10, nan
from typing import Final

LOW_SQNR: Final = 20.0
"""dB below which a layer, weight or output counts as low: the noise has more than 1 % of the signal's power."""


def decibels(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio ``10 * log10(signal / noise)`` in dB; the reference is the signal.

    Args:
        signal: sum of the squared reference values.
        noise: sum of the squared differences.

    Returns:
        inf if nothing differs; nan if the reference is all zero (or nothing was seen) and something differs, or if an
        argument is not a valid sum of squares.

    >>> decibels(100.0, 1.0)
    20.0
    >>> decibels(1.0, 0.0)
    inf
    """
    if isnan(signal) or isnan(noise) or signal < 0.0 or noise < 0.0:
        return nan
    if signal == 0.0:
        return nan
    if noise == 0.0:
        return inf
    return 10.0 * (log10(signal) - log10(noise))


def power(level: float) -> float:
    """The power ratio of a level in dB; inf if it overflows a float.

    >>> power(20.0), power(-10.0), power(1e4)
    (100.0, 0.1, inf)
    """
    return inf if level > 3000.0 else 10.0 ** (level / 10.0)
