"""Turns what was seen into the rows and arrays of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pt2qa._profile.channels import ChannelStatistics
from pt2qa._profile.histogram import Histogram
from pt2qa._profile.plan import Plan
from pt2qa._profile.report import CHANNELS, HISTOGRAM, Profile, packed
from pt2qa._profile.rows import BULK, QUANTILES, ProfileRow
from pt2qa._profile.statistics import Statistics
from pt2qa._profile.target import ProfileTarget
from pt2qa._profile.watch import ValueStatistics, Wanted
from pt2qa._simulator.program import QuantParams


def profile_of(
    subject: ProfileTarget,
    plan: Plan,
    seen: Mapping[int, ValueStatistics],
    wanted: Wanted,
    batches: int,
    samples: int,
    notes: Sequence[str],
) -> Profile:
    """The report.  Values that are not tensors, such as sizes, have no rows."""
    numbers = {number: position for position, number in enumerate(sorted(seen))}
    columns = {number: _numbers(seen[number], plan.values[number].params) for number in seen}
    rows = tuple(
        ProfileRow(
            name=place.name.name,
            module=place.name.module,
            op=place.name.op,
            role=place.role,
            argument=place.argument,
            of=place.of,
            source=place.source,
            value=numbers[place.value],
            handle=place.handle,
            **columns[place.value],
        )
        for place in plan.places
        if place.value in seen
    )
    ordered = [seen[number] for number in sorted(seen)]
    histograms = [each.statistics.histogram or Histogram() for each in ordered] if wanted.histograms else []
    channels = [(each.channels or ChannelStatistics.empty(0)).arrays() for each in ordered]
    uneven = [place for place in plan.places if place.value in seen and _is_uneven(seen[place.value])]
    extra = [f"{place.name.name}: no numbers by channel, batches differ in the channel axis" for place in uneven]
    return Profile(
        rows=rows,
        histograms=packed(HISTOGRAM, [(each.bins, each.counts) for each in histograms]) if histograms else {},
        channels=packed(CHANNELS, channels) if wanted.per_channel and channels else {},
        side=subject.side,
        quantizer=subject.quantizer,
        batches=batches,
        samples=samples,
        notes=tuple(dict.fromkeys((*subject.notes, *extra, *notes))),
        model=subject.model,
        environment=subject.environment,
    )


def _numbers(seen: ValueStatistics, params: QuantParams | None) -> dict[str, Any]:
    """The columns of a row that depend on the value alone."""
    of = seen.statistics
    some = of.moments.count > 0
    clamped = seen.clamped
    return {
        "dtype": params.dtype if params is not None else seen.dtype,
        "scheme": _scheme(params),
        "axis": params.axis if params is not None and params.axis is not None else -1,
        "scale": params.largest_scale if params is not None else math.nan,
        "zero_point": params.single_zero_point if params is not None else math.nan,
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
        "range_use": _range_use(of, params),
        "outlier_ratio": _outlier_ratio(of),
        "channels": seen.axis if not _is_uneven(seen) else -1,
    }


def _scheme(params: QuantParams | None) -> Literal["", "per_tensor", "per_channel", "dynamic"]:
    if params is None or not params.dtype.startswith(("int", "uint")):
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


def _range_use(of: Statistics, params: QuantParams | None) -> float:
    """Share of the integer range that the dequantized values span."""
    known = params is not None and isinstance(params.scale, float) and params.quant_max > params.quant_min
    if params is None or not known or not of.moments.count:
        return math.nan
    return round((of.largest - of.smallest) / params.largest_scale) / (params.quant_max - params.quant_min)


def _is_uneven(seen: ValueStatistics) -> bool:
    return seen.channels is not None and seen.channels.uneven
