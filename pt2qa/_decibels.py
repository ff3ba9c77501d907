"""Power ratios in decibels: the one formula that analyses and reports share.  Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum, inf, isnan, log10, nan
from typing import Final

LOW_SQNR: Final = 20.0
"""dB below which a layer, weight or output counts as low: the noise has more than 1 % of the signal's power."""

_DIGITS: Final = {"bfloat16": 7, "float16": 10}
"""The bits that follow the point in the dtypes that have fewer than the 23 of float32."""


def summed(values: Iterable[float]) -> float:
    """The sum, rounded once; inf or nan where no float holds it."""
    held = list(values)
    try:
        return fsum(held)
    except (OverflowError, ValueError):
        return sum(held)


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


def agreement(least: float, dtypes: Iterable[str]) -> float:
    """The SQNR in dB by which two computations of one thing must agree, if it is ``least`` in float32.

    In a coarser dtype it is at most what errors of four times its eps leave.  Fifty convolutions whose batch norms are
    folded in bfloat16 agree to 38 dB.

    >>> [round(agreement(60.0, [dtype])) for dtype in ("float64", "float32", "float16", "bfloat16")]
    [60, 60, 48, 30]
    """
    digits = min((_DIGITS.get(dtype, 23) for dtype in dtypes), default=23)
    return min(least, 20.0 * log10(2.0 ** (digits - 2)))


def power(level: float) -> float:
    """The power ratio of a level in dB; inf if it overflows a float.

    >>> power(20.0), power(-10.0), power(1e4)
    (100.0, 0.1, inf)
    """
    return inf if level > 3000.0 else 10.0 ** (level / 10.0)
