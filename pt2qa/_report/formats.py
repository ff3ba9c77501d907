"""Values as text.  This is the only place where pt2qa rounds."""

from __future__ import annotations

from math import isfinite
from typing import Final

_ELLIPSIS: Final = "…"


def decibel(value: float) -> str:
    """One decimal: a different calibration batch changes more than 0.1 dB."""
    return _rounded(value, 1)


def share(value: float) -> str:
    """A fraction of 0..1 as percent; a nonzero value never reads as zero.

    >>> share(0.0421), share(1e-9)
    ('4.21', '<0.01')
    """
    return "<0.01" if 0 < value < 0.00005 else _rounded(100 * value, 2)


def cosine(value: float) -> str:
    """Five decimals: healthy int8 layers differ in the fourth."""
    return _rounded(value, 5)


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}" if isfinite(value) else str(value)


def megabytes(size: int) -> str:
    """Bytes as megabytes.

    >>> megabytes(3_500_000)
    '3.5'
    """
    return number(size / 1e6)


def whole(value: int) -> str:
    """A count or a handle."""
    return str(value)


def index(value: int) -> str:
    """An index or axis; -1 is none."""
    return str(value) if value >= 0 else "-"


def shape(value: tuple[int, ...]) -> str:
    """A shape as usually written.

    >>> shape((1, 3, 8, 8)), shape(())
    ('1x3x8x8', 'scalar')
    """
    return "x".join(map(str, value)) if value else "scalar"


def exact(value: float, unit: str = "") -> str:
    """Six digits and the unit, for a number compared with a limit: 19.96 dB is not 20 dB."""
    return f"{value:.6g} {unit}".rstrip()


def absent(_: float) -> str:
    """Of a column without a number in any row: tables leave it out."""
    return "nan"


def shorten(text: str, width: int) -> str:
    """Text shortened in the middle to a width, since names differ at both ends.

    >>> shorten("features.17.conv.1.0/conv2d", 16)
    'feature…0/conv2d'
    """
    if len(text) <= width:
        return text
    tail = width // 2
    return text[: width - tail - 1] + _ELLIPSIS + text[len(text) - tail :]


def _rounded(value: float, digits: int) -> str:
    if not abs(value) < 1e6:
        return number(value)
    # Adding zero turns -0.0 into 0.0.
    return f"{round(value, digits) + 0.0:.{digits}f}"
