"""A measured ratio and the bar it is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One line of the benchmark's table.

    Attributes:
        what: what was measured.
        value: the ratio or the time.
        unit: shown after it, such as ``x``.
        bar: the largest value that is allowed; None where it is shown for comparison alone.
        at_least: whether the bar is the smallest value that is allowed instead.
    """

    what: str
    value: float
    unit: str = "×"
    bar: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    @property
    def shown(self) -> str:
        return f"{self.value:.3g} {self.unit}".rstrip()

    @property
    def bar_shown(self) -> str:
        return "" if self.bar is None else f"{'≥' if self.at_least else '≤'} {self.bar:g} {self.unit}".rstrip()


def best_of(rounds: int, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the fastest round of each function; a round runs each of them once, after one round that warms up."""
    best = dict.fromkeys(functions, float("inf"))
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            taken = time.perf_counter() - start
            if number:
                best[name] = min(best[name], taken)
    return best
