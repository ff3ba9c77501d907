"""Threads: runs that compute numbers, and calls that export, take turns.

While ``torch.export`` traces, it switches oneDNN off for the whole process (``_ignore_backend_decomps`` in
``torch/export/_trace.py``).  A convolution that another thread runs meanwhile takes another kernel and gives other
bits, and two exports side by side may leave oneDNN off for good.  Quantizers export too, when they prepare.  So a call
that may export has the process to itself, and waits for runs that are under way; runs go on side by side.

Exports that a program starts without pt2qa are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class _Turns:
    """Who computes (many) and who exports (one) at the moment; a thread may enter again what it is in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.runs: dict[int, int] = {}
        self.exporter: int | None = None
        self.depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.exporter in (None, me))
            self.runs[me] = self.runs.get(me, 0) + 1
        try:
            yield
        finally:
            with self.changed:
                self.runs[me] -= 1
                if not self.runs[me]:
                    del self.runs[me]
                self.changed.notify_all()

    @contextmanager
    def exporting(self) -> Iterator[None]:
        me = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.exporter in (None, me) and not self.runs.keys() - {me})
            self.exporter = me
            self.depth += 1
        try:
            yield
        finally:
            with self.changed:
                self.depth -= 1
                if not self.depth:
                    self.exporter = None
                self.changed.notify_all()


_turns = _Turns()


def computes(function: Function) -> Function:
    """A function that computes values with torch; it waits while another thread exports."""
    return _turns.running()(function)


def exports(function: Function) -> Function:
    """A function that may export; it waits while other threads compute or export."""
    return _turns.exporting()(function)
