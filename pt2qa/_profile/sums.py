"""From what was seen of each value to the columns and arrays of a report, and back, to merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pt2qa._profile.histogram import CHANNELS, HISTOGRAM, Histogram, packed, unpacked
from pt2qa._profile.plan import Value
from pt2qa._profile.rows import BULK, QUANTILES, ProfileRow
from pt2qa._profile.statistics import ChannelStatistics, Statistics
from pt2qa._profile.watch import ValueStatistics, ValueSums, Wanted
from pt2qa._report.merging import merged_data
from pt2qa._report.sums import pack, settings_of, unpack
from pt2qa._simulator.program import QuantParams
from pt2qa.errors import ReportError


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a value before any batch; names are those of :class:`pt2qa.ProfileRow`.

    ``steps`` are integer steps between the ends of its range, 0 without a single scale; no batch changes a constant.
    """

    dtype: str = ""
    scheme: Literal["", "per_tensor", "per_channel", "dynamic"] = ""
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


def _scheme(params: QuantParams) -> Literal["", "per_tensor", "per_channel", "dynamic"]:
    if not params.dtype.startswith(("int", "uint")):
        return ""
    if params.dynamic:
        return "dynamic"
    return "per_tensor" if params.axis is None else "per_channel"


def _from_histogram(of: Statistics, held: Histogram) -> dict[str, float]:
    most, largest = held.magnitudes.quantile(BULK), max(abs(of.smallest), abs(of.largest))
    quantiles = {name: min(max(held.quantile(share), of.smallest), of.largest) for name, share in QUANTILES.items()}
    return {**quantiles, "outlier_ratio": max(1.0, largest / most) if most > 0 else math.nan}
