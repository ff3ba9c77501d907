"""Arrays of many values, one after the other, as a profile keeps histograms and numbers by channel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pt2qa.errors import ReportError

Array = npt.NDArray[Any]
Packed = dict[str, Array]
"""Arrays by name; those of value i are ``offsets[i]`` to ``offsets[i + 1]``."""

OFFSETS: Final = "offsets"
HISTOGRAM: Final = ("bins", "counts")
CHANNELS: Final = ("count", "min", "max", "mean", "variance", "zeros")


def packed(names: Sequence[str], values: Iterable[Sequence[Array]]) -> Packed:
    """The arrays of many values, concatenated; each value's have one length."""
    rows = [tuple(value) for value in values]
    offsets = np.cumsum([0, *(len(arrays[0]) for arrays in rows)]).astype(np.int64)
    columns = zip(*rows, strict=True)
    return {OFFSETS: offsets, **{name: np.concatenate(column) for name, column in zip(names, columns, strict=True)}}


def unpacked(arrays: Packed, names: Sequence[str], value: int) -> list[Array]:
    """The arrays of one value; a ReportError if there are none."""
    offsets = arrays.get(OFFSETS, ())
    if not 0 <= value < len(offsets) - 1:
        raise ReportError(f"the profile has no arrays for the value number {value}; it has {max(0, len(offsets) - 1)}")
    start, end = offsets[value : value + 2]
    return [arrays[name][start:end] for name in names]


def check_packed(field_name: str, arrays: Packed, names: Sequence[str], values: int) -> None:
    """Raises a ReportError if arrays do not fit each other, and as many values."""
    if not arrays:
        return
    if set(arrays) != {OFFSETS, *names}:
        raise ReportError(f"{field_name}: got arrays {sorted(arrays)}, expected {sorted([OFFSETS, *names])}, or none")
    offsets, lengths = arrays[OFFSETS], {arrays[name].shape for name in names}
    fits = (
        offsets.dtype.kind == "i"
        and offsets.ndim == 1
        and len(offsets) > values
        and not np.any(offsets[1:] < offsets[:-1])
    )
    if not fits or offsets[0] != 0 or lengths != {(int(offsets[-1]),)}:
        raise ReportError(
            f"{field_name}: the arrays do not fit {values} values: offsets {offsets.shape} end at "
            f"{offsets.reshape(-1)[-1:].tolist()}, and the arrays have the shapes {sorted(lengths)}"
        )
