"""The ranges of all values that are rounded, batch by batch, from one run of the float model."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._sensitivity.roundings import with_roundings
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.data import Counted
from pt2qa._simulator.program import Site, Step
from pt2qa._simulator.simulator import Simulator

CONVOLUTIONS = ("conv", "batch_norm", "max_pool", "avg_pool", "adaptive_avg_pool")


@dataclass(slots=True)
class Observed:
    """The ranges of one site's float values by batch, and by channel over all batches, two of shape (channels,).

    An axis of several sizes, such as one of tokens, is ``uneven``: it has no channels.
    """

    lowest: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)
    axis: int | None = None
    channels: tuple[Tensor, Tensor] | None = None
    uneven: bool = False

    @property
    def whole(self) -> tuple[float, float]:
        """The range over all batches; non-finite values do not count."""
        return min(self.lowest, default=math.nan), max(self.highest, default=math.nan)

    def extend(self, other: Observed) -> None:
        self.lowest += other.lowest
        self.highest += other.highest
        if other.uneven:
            self._drop_channels()
        elif other.channels is not None:
            self.add_channels(other.axis, *other.channels)

    def add_channels(self, axis: int | None, lowest: Tensor, highest: Tensor) -> None:
        """Adds ranges by channel, if they are along the same axis."""
        if self.uneven or self.axis not in (None, axis):
            return
        if self.channels is None:
            self.axis, self.channels = axis, (lowest, highest)
        elif self.channels[0].shape == lowest.shape:
            self.channels = torch.minimum(self.channels[0], lowest), torch.maximum(self.channels[1], highest)
        else:
            self._drop_channels()

    def _drop_channels(self) -> None:
        self.axis, self.channels, self.uneven = None, None, True

    def close(self, batch: int) -> None:
        """Makes what was seen since the batch before the range of this one: nothing, where no branch came by."""
        self.lowest[batch:] = [min(self.lowest[batch:], default=math.inf)]
        self.highest[batch:] = [max(self.highest[batch:], default=-math.inf)]

    def left_without(self, batches: Collection[int]) -> Observed:
        left = [number for number in range(len(self.lowest)) if number not in batches]
        return Observed([self.lowest[number] for number in left], [self.highest[number] for number in left])

    def without(self, batch: int) -> tuple[float, float]:
        return self.left_without({batch}).whole


def observe(pair: QuantizedPair, batches: Iterable[tuple[Sequence[Any], Counted]]) -> dict[int, Observed]:
    """The ranges at each activation site on flat batches, each with which of its positions count."""
    sites = pair.sites
    found = {site.index: Observed() for site in sites if site.kind == "activation"}
    nested = {index: functools.partial(_look, found[index], sites[index]) for index in found if sites[index].nested}
    simulator = pair.simulator
    if nested:  # they look at each value, and leave it as it is
        simulator = Simulator(with_roundings(pair.program, nested), fused=simulator.fused)

    def visit(step: Step, value: Any, counted: Counted) -> None:
        if step.site is not None:
            _add(found[step.site], sites[step.site], counted.filled(step.out, value))

    for number, (values, counted) in enumerate(batches):
        simulator.run(values, on=nested.keys(), visit=functools.partial(visit, counted=counted))
        for index in nested:
            found[index].close(number)
    first, *others = everywhere(found)
    for other in others:
        for site, observed in other.items():
            first[site].extend(observed)
    return first


def _look(into: Observed, site: Site, value: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The rounding that changes nothing: adds the ranges of a value in a nested graph."""
    _add(into, site, value)
    return value


def _add(into: Observed, site: Site, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return
    axis = into.axis if into.axis is not None else channel_axis(site, value)
    low, high = _range(value, axis)
    if not bool((low.isfinite() & high.isfinite()).all()):
        _add(into, site, value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return
    if axis is not None:
        into.add_channels(axis, low, high)
    into.lowest.append(float(low.min()))
    into.highest.append(float(high.max()))


def _range(value: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value, by channel if there is an axis; NaN where a value is NaN."""
    if axis is None:
        return value.aminmax()
    others = [each for each in range(value.dim()) if each != axis]
    return (value.amin(others), value.amax(others)) if others else (value, value)


def channel_axis(site: Site, value: Tensor) -> int | None:
    """The axis of a value's channels: 1 for what convolutions write or read, else the last, unless the ranges along
    another one, such as the heads and tokens of attention, are clearly less equal.
    """
    dimensions = value.dim()
    if dimensions < 2:
        return None
    ops = (site.op, *(reader.rpartition("/")[2] for reader in site.readers))
    if any(op.startswith(CONVOLUTIONS) for op in ops):
        return 1

    def inequality(axis: int) -> float:
        largest = value.abs().amax([each for each in range(dimensions) if each != axis])
        ratio = float(largest.max() / largest.median().clamp(min=torch.finfo(largest.dtype).tiny))
        return 2 * ratio if axis == dimensions - 1 else ratio

    return max(range(1, dimensions), key=inequality)


def use_of(site: Site, lowest: float, highest: float) -> tuple[float, float]:
    """The width of a range, and how far it lies outside what a static site can hold, as shares of what it can hold."""
    low, high = limits(site.params)
    width = high - low
    if site.params.dynamic or math.isnan(lowest + width) or not width:
        return math.nan, math.nan
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    beyond = max(low - lowest, 0.0) + max(highest - high, 0.0)
    return (highest - lowest) / width, beyond / width
