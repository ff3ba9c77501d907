"""Threads: runs that compute numbers, and calls that export, take turns.

While ``torch.export`` traces, it switches oneDNN off for the whole process (``_ignore_backend_decomps`` in
``torch/export/_trace.py``).  A convolution that another thread runs meanwhile takes another kernel and gives other
bits, and two exports side by side may leave oneDNN off for good.  Quantizers export too, when they prepare.  So a call
that may export has the process to itself, and waits for runs that are under way; runs go on side by side.

Exports that a program starts without pt2qa are not seen.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class _Turns:
    """Who computes (many) and who exports (one) at the moment; a thread may enter again what it is in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.runs: Counter[int] = Counter()
        self.exports: Counter[int] = Counter()

    @contextmanager
    def taken(self, turns: Counter[int], *others: Counter[int]) -> Iterator[None]:
        """Takes a turn when no other thread has one of the others."""
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: not any(other.keys() - {me} for other in others))
            turns[me] += 1
        try:
            yield
        finally:
            with self.changed:
                turns[me] -= 1
                if not turns[me]:
                    del turns[me]
                self.changed.notify_all()


_turns = _Turns()


def computes(function: Function) -> Function:
    """A function that computes values with torch; it waits while another thread exports."""
    return _turns.taken(_turns.runs, _turns.exports)(function)


def exports(function: Function) -> Function:
    """A function that may export; it waits while other threads compute or export."""
    return _turns.taken(_turns.exports, _turns.exports, _turns.runs)(function)
