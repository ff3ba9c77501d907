"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable


def return_freed_memory() -> None:
    """Has glibc give pages that are not in use back to the system; other C libraries are left alone.

    Freed values of up to 32 MB stay in the heap between values that are in use, so that a process that quantizes
    a model of such weights would keep the memory of one float copy of them.  Takes some milliseconds.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    return getattr(ctypes.CDLL(None), "malloc_trim", None)
