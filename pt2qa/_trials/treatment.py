"""What changes a quantized model, what it must reach then, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.gating.verdict import parsed
from pt2qa._sensitivity.roundings import Rounding, rounding
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit

Ranges = Literal["fitted", "by channel"]
"""Parameters for all sites that are tried: those that fit the data, per tensor or by channel."""

Place = tuple[str, str, int]
"""A site in any pair of the model: its kind, its name, and its number among those of that kind and name."""


def places_of(pair: QuantizedPair) -> dict[int, Place]:
    seen: dict[tuple[str, str], int] = {}
    found: dict[int, Place] = {}
    for site in pair.sites:
        key = (site.kind, site.name)
        found[site.index] = (*key, seen.get(key, 0))
        seen[key] = seen.get(key, 0) + 1
    return found


@dataclass(frozen=True, eq=False)
class Substitute:
    """What rounds at a place instead, and its parameters if it is plain quantize-dequantize.

    ``apart`` is what was fitted in its place without the batches of each fold of the evaluation data, on which that is
    judged; empty if it was not fitted to them, or cannot be without.
    """

    value: Rounding = field(repr=False)
    params: QuantParams | None = None
    apart: tuple[Rounding, ...] = field(default=(), repr=False)


def with_params(params: QuantParams, apart: Sequence[QuantParams] = ()) -> Substitute:
    return Substitute(rounding(params), params, tuple(rounding(each) for each in apart))


@dataclass(frozen=True)
class Treatment:
    """All that remedies change; the empty one is the pair as it was given.

    Attributes:
        options: of the quantizer, by name.
        edits: of its annotations, for which the model is quantized again.
        floats: edits that take ops out of int8, simulated by switching off the sites that they remove.
        data: to calibrate on; None: the pair's own.
        exact: places that are kept in float without an edit.
        readers: places with the names of the ops that still read what is rounded there; others read the value itself.
        played: by place, what rounds there instead.
        restored: constants that are the float model's again, by their reader and the number of its argument.
        as_deployed: whether dynamic scales are computed as the kernels do.
    """

    options: tuple[tuple[str, object], ...] = ()
    edits: tuple[Edit, ...] = ()
    floats: tuple[Edit, ...] = ()
    data: Data | None = None
    exact: frozenset[Place] = frozenset()
    readers: frozenset[tuple[Place, frozenset[str]]] = frozenset()
    played: tuple[tuple[Place, Substitute], ...] = ()
    restored: frozenset[tuple[str, int]] = frozenset()
    as_deployed: bool = False

    def then(self, other: Treatment) -> Treatment:
        return Treatment(
            options=tuple(dict((*self.options, *other.options)).items()),
            edits=tuple(dict.fromkeys((*self.edits, *other.edits))),
            floats=tuple(dict.fromkeys((*self.floats, *other.floats))),
            data=self.data if other.data is None else other.data,
            exact=self.exact | other.exact,
            readers=self.readers | other.readers,
            played=tuple(dict((*self.played, *other.played)).items()),
            restored=self.restored | other.restored,
            as_deployed=self.as_deployed or other.as_deployed,
        )

    @property
    def without_advice(self) -> Treatment:
        """What quantizing again applies."""
        return replace(self, exact=frozenset(), readers=frozenset(), played=(), restored=frozenset(), as_deployed=False)

    @property
    def kept_edits(self) -> tuple[Edit, ...]:
        """Without those fitted to ops in int8 that are now in float."""
        left = {op for edit in self.floats if edit.kind == "float" for op in edit.ops}
        return tuple(edit for edit in self.edits if edit.kind not in ("bias", "round") or edit.ops[0] not in left)

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        return (*self.kept_edits, *self.floats)

    @property
    def requantizes(self) -> bool:
        return bool(self.options or self.edits or self.data is not None)

    @property
    def made_of_edits(self) -> bool:
        """Whether quantizing again applies all of it; else it takes a change of the model or quantizer."""
        return not (self.exact or self.readers or self.played or self.restored or self.as_deployed)


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
