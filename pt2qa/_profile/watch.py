"""Runs a graph and measures its values as they are produced; keeps only statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import torch_defaults
from pt2qa._graph.internals.torchao import is_fake_quantize, is_observer, without_observing
from pt2qa._metrics import value_range
from pt2qa._profile.plan import Plan, Value
from pt2qa._profile.statistics import ChannelStatistics, Statistics, flat_chunks
from pt2qa._report.sums import FIRST, MERGED, Mergeable
from pt2qa._simulator import quant_ops
from pt2qa._simulator.graph_run import GraphRun
from pt2qa._simulator.positions import Inside
from pt2qa._simulator.program import QuantParams


@dataclass(frozen=True, slots=True)
class ValueSums(Mergeable):
    """What a file keeps of :class:`ValueStatistics`; ``clamped`` is -1 if unknown, ``axis`` -1 without channels."""

    statistics: Statistics = field(default_factory=Statistics, metadata=MERGED)
    dtype: str = field(default="", metadata=FIRST)
    shape: tuple[int, ...] = field(default=(), metadata=FIRST)
    clamped: int = field(default=-1, metadata={"merge": lambda one, other: one + other if min(one, other) >= 0 else -1})
    axis: int = field(default=-1, metadata=FIRST)


@dataclass(frozen=True, slots=True)
class ValueStatistics(ValueSums):
    """What is known about one value after some batches; ``channels`` is None if not requested, or it has none."""

    channels: ChannelStatistics | None = field(
        default=None, metadata={"merge": lambda one, other: one and other and one.merge(other)}
    )

    @property
    def is_uneven(self) -> bool:
        return self.channels is not None and self.channels.uneven


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure of each value beyond its moments: histograms, numbers by channel; and the name of a mask."""

    histograms: bool
    per_channel: bool
    mask: str = ""


class Watch(GraphRun):
    """One run of a graph; ``found`` holds what was seen, by value number.

    Constants that are ``known`` are not measured again; ``observes``: whether observers see the values.
    """

    def __init__(
        self,
        graph: GraphModule,
        plan: Plan,
        wanted: Wanted,
        known: Collection[int],
        inside: Inside | None,
        *,
        observes: bool,
    ) -> None:
        super().__init__(graph)
        self.wanted, self.inside, self.observes = wanted, inside, observes
        self.found: dict[int, ValueStatistics] = {}
        self._values = plan.values
        self._before: dict[Node, list[int]] = defaultdict(list)
        self._after: dict[Node, list[int]] = defaultdict(list)
        self._quantizing: dict[Node, list[int]] = defaultdict(list)
        self._clamped: dict[int, int] = {}
        for number, value in enumerate(plan.values):
            if value.constant and number in known:
                continue
            if value.reader is None:
                self._after[value.node].append(number)
            else:
                self._before[value.reader].append(number)
            if value.quantize is not None:
                self._quantizing[value.quantize].append(number)

    def run_node(self, node: Node) -> Any:
        for number in self._before.get(node, ()):
            self._measure(number, self.env[self._values[number].node])
        for number in self._quantizing.get(node, ()):
            count = self._count_clamped(self._values[number], node)
            if count is not None:
                self._clamped[number] = count
        result = super().run_node(node)
        for number in self._after.get(node, ()):
            self._measure(number, result)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module; an observer that must not see the values passes them on."""
        module = self.fetch_attr(target)
        if self.observes or not is_observer(module):
            return module(*args, **kwargs)
        return without_observing(module)(*args, **kwargs) if is_fake_quantize(module) else args[0]

    @torch_defaults
    def _measure(self, number: int, result: Any) -> None:
        if not isinstance(result, Tensor):
            return
        clamped = self._clamped.get(number)
        self.found[number] = measured(self._values[number], result, self.wanted, clamped, self.inside)

    @torch_defaults
    def _count_clamped(self, value: Value, node: Node) -> int | None:
        """How many values the clamp of a quantize node is about to move; None if its parameters are not plain."""
        made: Node = node.args[0]  # type: ignore[assignment]
        source = self.env[made]
        params = value.params
        if params is None or params.dynamic:
            params = quant_ops.read_params(node, self.env.get)
        if not isinstance(source, Tensor):
            return None
        # Zero is in every range, so what is zeroed is not clamped.
        return count_clamped(source if self.inside is None else self.inside.zeroed(made.name, source), params)


def measured(
    value: Value, result: Tensor, wanted: Wanted, clamped: int | None, inside: Inside | None
) -> ValueStatistics:
    """The statistics of a value on one batch, at the positions that count, of which the clamp moved so many."""
    channels, shape, dimensions = None, tuple(result.shape), result.dim()
    axis = result.dim() - 1 if value.channels < 0 else value.channels
    if value.params is not None and value.params.axis is not None:
        axis = value.params.axis % result.dim()
    elif value.constant:
        axis = 0
    has_channels = wanted.per_channel and dimensions > max(axis, 1) and not result.is_complex()
    moved: int | None = axis
    if inside is not None and not value.constant:
        moved = inside.axis(value.node.name, axis, dimensions)
        result = inside.of(value.node.name, result)
    if has_channels and moved is not None:
        channels = ChannelStatistics.of(result, moved)
    return ValueStatistics(
        Statistics.of(result, histogram=wanted.histograms),
        str(result.dtype).removeprefix("torch."),
        shape,
        -1 if clamped is None else clamped,
        axis if channels is not None else -1,
        channels,
    )


def count_clamped(x: Tensor, params: QuantParams) -> int | None:
    """How many values lie outside the integer range after rounding; None if the parameters do not say."""
    x = x.detach()
    scale, zero_point = params.scale, params.zero_point
    if scale is None or zero_point is None or params.quant_min >= params.quant_max:
        return None
    if isinstance(scale, Tensor) and scale.numel() > 1:
        if params.axis is None or scale.dim() != 1:
            return None
        shape = [-1 if axis == params.axis % x.dim() else 1 for axis in range(x.dim())]
        scale, zero_point = (torch.as_tensor(each).to(x.device).reshape(shape) for each in (scale, zero_point))
        return _count_outside(x, 1.0 / scale, params.quant_min - zero_point, params.quant_max - zero_point)
    inverse, zero_point = 1.0 / float(scale), int(zero_point)
    low, high = params.quant_min - zero_point, params.quant_max - zero_point
    return sum(_count_outside(chunk, inverse, low, high) for chunk in flat_chunks(x))


def _count_outside(x: Tensor, inverse: Any, low: Any, high: Any) -> int:
    if isinstance(inverse, float) and x.is_floating_point():
        # Rounding is monotonic, so the range suffices for most tensors.
        ends = torch.mul(x.new_tensor(value_range(x)), inverse).round_()
        if ends[0] >= low and ends[1] <= high:
            return 0
    steps = torch.mul(x, inverse).round_()
    return int(((steps < low) | (steps > high)).sum())
