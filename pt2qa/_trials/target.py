"""What a reconfigured model must reach, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pt2qa._report.gating.requirement import parsed
from pt2qa.errors import SelectionError


@dataclass(frozen=True, slots=True)
class Target:
    """The quality that a configuration must have.

    Args:
        at_least: the smallest acceptable value: dB for the output SQNR, else in the unit of ``metric``.
        metric: a function of a model, larger is better, such as top-1 accuracy on your own data.  The model is called
            like the captured one.  None: the SQNR of the worst output on the batches.
        name: its name in reports; by default, that of the function.
        of_float: ``at_least`` is a share of what ``metric`` gives for the float model.

    >>> Target(30.0)
    Target(at_least=30.0, metric=None, name='sqnr', of_float=False)
    """

    at_least: float
    metric: Callable[[Callable[..., Any]], float] | None = None
    name: str = ""
    of_float: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", "sqnr" if self.metric is None else metric_name(self.metric))


def metric_name(metric: Callable[..., Any]) -> str:
    """What reports call a metric by default."""
    return getattr(metric, "__name__", "metric")


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be left out of int8, as shares of the whole model; None: no limit.

    Args:
        macs: share of the multiply-accumulates, 0..1.
        bytes: share of the bytes of all weights, counted in float, 0..1.

    Raises:
        SelectionError: a share is not from 0 to 1.

    >>> Budget(macs=0.2)
    Budget(macs=0.2, bytes=None)
    """

    macs: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("macs", self.macs), ("bytes", self.bytes)):
            if value is not None and not 0 <= value <= 1:
                raise SelectionError(f"budget: {name}: got {value!r}, expected a share from 0 to 1.")


def read_target(target: Target | float | str) -> Target:
    """A user's target: ``30``, ``"sqnr>=30"`` or a :class:`Target`.

    Raises:
        SelectionError: it is anything else.

    >>> read_target("sqnr >= 30 dB").at_least
    30.0
    """
    if isinstance(target, Target):
        if not isfinite(target.at_least):
            raise SelectionError(f"target: at_least: got {target.at_least!r}, expected a finite number.")
        return target
    if isinstance(target, (int, float)) and not isinstance(target, bool) and isfinite(target):
        return Target(float(target))
    wanted = parsed(target) if isinstance(target, str) else None
    if wanted is None or (wanted.subject, wanted.sign) != ("sqnr", ">=") or not isfinite(wanted.value):
        raise SelectionError(
            f"target: got {target!r}, expected decibels such as 30, 'sqnr>=30', or "
            "pt2qa.Target(at_least, metric=function of a model)."
        )
    return Target(wanted.value)
