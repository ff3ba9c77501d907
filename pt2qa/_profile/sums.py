"""From what was seen of each value to the columns and arrays of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pt2qa._profile.channels import ChannelStatistics
from pt2qa._profile.histogram import Histogram
from pt2qa._profile.packing import CHANNELS, HISTOGRAM, packed
from pt2qa._profile.plan import Value
from pt2qa._profile.rows import BULK, QUANTILES
from pt2qa._profile.statistics import Statistics
from pt2qa._profile.watch import ValueStatistics, Wanted
from pt2qa._report.sums import pack
from pt2qa._simulator.program import QuantParams


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a value before any batch; names without a comment are those of :class:`pt2qa.ProfileRow`.

    Attributes:
        steps: integer steps between the ends of its range; 0 without a single scale.
        constant: whether no batch changes it, so that it is measured once.
    """

    dtype: str = ""
    scheme: Literal["", "per_tensor", "per_channel", "dynamic"] = ""
    axis: int = -1
    scale: float = math.nan
    zero_point: float = math.nan
    steps: int = 0
    constant: bool = False


@dataclass(frozen=True, slots=True)
class ValueSums:
    """What a file keeps of :class:`ValueStatistics` besides histogram and channels; ``clamped`` is -1 if unknown."""

    statistics: Statistics = field(default_factory=Statistics)
    dtype: str = ""
    shape: tuple[int, ...] = ()
    clamped: int = -1
    axis: int = -1


def described_by(value: Value, seen: ValueStatistics) -> Described:
    """What is known of a value of a plan."""
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
    channels = [(each.channels or ChannelStatistics.empty(0)).arrays() for each in seen] if wanted.per_channel else []
    settings = {"histograms": str(wanted.histograms), "per_channel": str(wanted.per_channel)}
    if wanted.mask:
        settings["mask"] = wanted.mask
    return {
        "histograms": packed(HISTOGRAM, [(each.bins, each.counts) for each in histograms]) if histograms else {},
        "channels": packed(CHANNELS, channels) if channels else {},
        "sums": pack(
            settings,
            described=described,
            values=[
                ValueSums(
                    replace(each.statistics, histogram=None),
                    each.dtype,
                    each.shape,
                    -1 if each.clamped is None else each.clamped,
                    each.axis,
                )
                for each in seen
            ],
        ),
    }


def numbers_of(described: Described, seen: ValueStatistics) -> dict[str, Any]:
    """The columns of a row that depend on the value alone."""
    of = seen.statistics
    some = of.moments.count > 0
    clamped = seen.clamped
    spanned = round((of.largest - of.smallest) / described.scale) if some and described.steps else 0
    return {
        "dtype": described.dtype,
        "scheme": described.scheme,
        "axis": described.axis,
        "scale": described.scale,
        "zero_point": described.zero_point,
        "shape": seen.shape,
        "count": of.count,
        "min": of.smallest if some else math.nan,
        "max": of.largest if some else math.nan,
        "mean": of.moments.mean if some else math.nan,
        "variance": of.moments.variance,
        **{column: _quantile(of, share) for column, share in QUANTILES.items()},
        "zeros": of.zeros / of.count if of.count else math.nan,
        "nans": of.nans,
        "infs": of.infs,
        "saturation": clamped / of.count if clamped is not None and of.count else math.nan,
        "range_use": spanned / described.steps if some and described.steps else math.nan,
        "outlier_ratio": _outlier_ratio(of),
        "channels": seen.axis if not is_uneven(seen) else -1,
    }


def is_uneven(seen: ValueStatistics) -> bool:
    """Whether batches differed in the number of channels."""
    return seen.channels is not None and seen.channels.uneven


def _scheme(params: QuantParams) -> Literal["", "per_tensor", "per_channel", "dynamic"]:
    if not params.dtype.startswith(("int", "uint")):
        return ""
    if params.dynamic:
        return "dynamic"
    return "per_tensor" if params.axis is None else "per_channel"


def _quantile(of: Statistics, share: float) -> float:
    if of.histogram is None or not of.moments.count:
        return math.nan
    return min(max(of.histogram.quantile(share), of.smallest), of.largest)


def _outlier_ratio(of: Statistics) -> float:
    """The largest magnitude over the one within which 99.9 % of the nonzero values lie."""
    if of.histogram is None or not of.moments.count:
        return math.nan
    most = of.histogram.magnitudes.quantile(BULK)
    largest = max(abs(of.smallest), abs(of.largest))
    return max(1.0, largest / most) if most > 0 else math.nan
