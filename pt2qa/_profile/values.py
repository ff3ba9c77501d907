"""What is seen of each value while a graph runs, the columns and arrays of a report that follow, and reports merged."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._ambient import torch_defaults
from pt2qa._graph.internals.torchao import is_fake_quantize, is_observer, without_observing
from pt2qa._grouping import grouped
from pt2qa._metrics import value_range
from pt2qa._profile.histogram import CHANNELS, HISTOGRAM, Histogram, packed, unpacked
from pt2qa._profile.plan import Plan, Value
from pt2qa._profile.report import BULK, QUANTILES, ProfileRow
from pt2qa._profile.statistics import ChannelStatistics, Statistics, flat_chunks
from pt2qa._report.merging import merged_data
from pt2qa._report.sums import FIRST, MERGED, Mergeable, pack, settings_of, unpack
from pt2qa._simulator import quant_ops
from pt2qa._simulator.data import Inside
from pt2qa._simulator.graph_run import GraphRun
from pt2qa._simulator.program import QuantParams
from pt2qa.errors import ReportError


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
        self, graph: GraphModule, plan: Plan, wanted: Wanted, known: Collection[int], inside: Inside, *, observes: bool
    ) -> None:
        super().__init__(graph)
        self.wanted, self.inside, self.observes = wanted, inside, observes
        self.found: dict[int, ValueStatistics] = {}
        self._values = plan.values
        self._clamped: dict[int, int] = {}
        new = [(n, value) for n, value in enumerate(plan.values) if not (value.constant and n in known)]
        self._after = grouped((value.node, n) for n, value in new if value.reader is None)
        self._before = grouped((value.reader, n) for n, value in new if value.reader is not None)
        self._quantizing = grouped((value.quantize, n) for n, value in new if value.quantize is not None)

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
        return count_clamped(self.inside.zeroed(made.name, source), params)


def measured(value: Value, result: Tensor, wanted: Wanted, clamped: int | None, inside: Inside) -> ValueStatistics:
    """The statistics of a value on one batch, at the positions that count, of which the clamp moved so many."""
    channels, shape, dimensions = None, tuple(result.shape), result.dim()
    axis = result.dim() - 1 if value.channels < 0 else value.channels
    if value.params is not None and value.params.axis is not None:
        axis = value.params.axis % result.dim()
    elif value.constant:
        axis = 0
    has_channels = wanted.per_channel and dimensions > max(axis, 1) and not result.is_complex()
    moved: int | None = axis
    if not value.constant:
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
        if params.axis is None and not params.block:
            return None
        scale, zero_point = params.along(x)
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


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a value before any batch; names are those of :class:`pt2qa.ProfileRow`.

    ``steps`` are integer steps between the ends of its range, 0 without a single scale; no batch changes a constant.
    """

    dtype: str = ""
    scheme: Literal["", "per_tensor", "per_channel", "per_group", "dynamic"] = ""
    axis: int = -1
    scale: float = math.nan
    zero_point: float = math.nan
    steps: int = 0
    constant: bool = False


def described_by(value: Value, seen: ValueStatistics) -> Described:
    params = value.params
    if params is None:
        return Described(seen.dtype, constant=value.constant)
    single = isinstance(params.scale, float) and params.quant_max > params.quant_min
    return Described(
        dtype=params.dtype,
        scheme=_scheme(params),
        axis=params.axis if params.axis is not None else -1,
        scale=params.largest_scale,
        zero_point=params.single_zero_point,
        steps=params.quant_max - params.quant_min if single else 0,
        constant=value.constant,
    )


def packed_values(described: Sequence[Described], seen: Sequence[ValueStatistics], wanted: Wanted) -> dict[str, Any]:
    """The fields of a report that hold arrays: histograms, channels and sums, of all values in order."""
    histograms = [each.statistics.histogram or Histogram() for each in seen] if wanted.histograms else []
    channels = [(each.channels or ChannelStatistics.empty()).arrays() for each in seen] if wanted.per_channel else []
    settings = {"histograms": str(wanted.histograms), "per_channel": str(wanted.per_channel)}
    if wanted.mask:
        settings["mask"] = wanted.mask
    values = [ValueSums(replace(v.statistics, histogram=None), v.dtype, v.shape, v.clamped, v.axis) for v in seen]
    return {
        "histograms": packed(HISTOGRAM, [(each.bins, each.counts) for each in histograms]) if histograms else {},
        "channels": packed(CHANNELS, channels) if channels else {},
        "sums": pack(settings, described=described, values=values),
    }


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first = reports[0]
    described = unpack(first.sums, "described", Described())
    seen = _seen(first)
    for number, report in enumerate(reports[1:], 2):
        if list(map(_identity, report.rows)) != list(map(_identity, first.rows)):
            raise ReportError(
                f"cannot merge: report {number} measures other values than the first one, or quantizes them "
                "differently. Make all reports with the same pair and the same arguments."
            )
        pairs = zip(described, seen, _seen(report), strict=True)
        # What no batch changes was measured once in each run.
        seen = [one if known.constant else one.merge(other) for known, one, other in pairs]
    settings = settings_of(first.sums)
    histograms, per_channel = (settings.get(name) == str(True) for name in ("histograms", "per_channel"))
    wanted = Wanted(histograms, per_channel, settings.get("mask", ""))
    return replace(
        first,
        rows=tuple(replace(row, **numbers_of(described[row.value], seen[row.value])) for row in first.rows),
        **packed_values(described, seen, wanted),
        **merged_data(reports),
    )


def _identity(row: ProfileRow) -> list[str]:
    names = ("name", "role", "argument", "of", "value", "dtype", "scheme", "scale", "zero_point")
    # As text, in which nan equals nan.
    return [str(getattr(row, name)) for name in names]


def _seen(report: Any) -> list[ValueStatistics]:
    found = []
    for number, own in enumerate(unpack(report.sums, "values", ValueSums())):
        histogram = Histogram(*unpacked(report.histograms, HISTOGRAM, number)) if report.histograms else None
        channels = ChannelStatistics(*unpacked(report.channels, CHANNELS, number)) if own.axis >= 0 else None
        statistics = replace(own.statistics, histogram=histogram)
        found.append(ValueStatistics(statistics, own.dtype, own.shape, own.clamped, own.axis, channels))
    return found


def numbers_of(described: Described, seen: ValueStatistics) -> dict[str, Any]:
    """The columns of a row that depend on the value alone."""
    of = seen.statistics
    some = of.moments.count > 0
    steps = described.steps if some and math.isfinite(described.scale) else 0
    spanned = round((of.largest - of.smallest) / described.scale) if steps else 0
    return {
        **{name: getattr(described, name) for name in ("dtype", "scheme", "axis", "scale", "zero_point")},
        "shape": seen.shape,
        "count": of.count,
        "min": of.smallest if some else math.nan,
        "max": of.largest if some else math.nan,
        "mean": of.moments.mean if some else math.nan,
        "variance": of.moments.variance,
        **dict.fromkeys(QUANTILES, math.nan),
        "zeros": of.zeros / of.count if of.count else math.nan,
        "nans": of.nans,
        "infs": of.infs,
        "saturation": seen.clamped / of.count if seen.clamped >= 0 and of.count else math.nan,
        "range_use": spanned / steps if steps else math.nan,
        "outlier_ratio": math.nan,
        "channels": -1 if seen.is_uneven else seen.axis,
        **(_from_histogram(of, of.histogram) if some and of.histogram is not None else {}),
    }


def _scheme(params: QuantParams) -> Literal["", "per_tensor", "per_channel", "per_group", "dynamic"]:
    if not params.dtype.startswith(("int", "uint")):
        return ""
    if params.dynamic:
        return "dynamic"
    return "per_group" if params.block else "per_tensor" if params.axis is None else "per_channel"


def _from_histogram(of: Statistics, held: Histogram) -> dict[str, float]:
    most, largest = held.magnitudes.quantile(BULK), max(abs(of.smallest), abs(of.largest))
    quantiles = {name: min(max(held.quantile(share), of.smallest), of.largest) for name, share in QUANTILES.items()}
    return {**quantiles, "outlier_ratio": max(1.0, largest / most) if most > 0 else math.nan}
