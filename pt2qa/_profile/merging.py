"""Profiles of parts of the data, merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pt2qa._profile.channels import ChannelStatistics
from pt2qa._profile.histogram import Histogram
from pt2qa._profile.packing import CHANNELS, HISTOGRAM, unpacked
from pt2qa._profile.rows import ProfileRow
from pt2qa._profile.sums import Described, ValueSums, numbers_of, packed_values
from pt2qa._profile.watch import ValueStatistics, Wanted
from pt2qa._report.merging import numbered_on
from pt2qa._report.notes import joined_notes
from pt2qa._report.set_apart import added
from pt2qa._report.sums import settings_of, unpack
from pt2qa.errors import ReportError


def merged(reports: Sequence[Any]) -> Any:
    """One profile of several; see :func:`pt2qa.merge`."""
    first = reports[0]
    described = unpack(first.sums, "described", Described())
    seen = _seen(first)
    for number, report in enumerate(reports[1:], 2):
        if list(map(_identity, report.rows)) != list(map(_identity, first.rows)):
            raise ReportError(
                f"cannot merge: report {number} measures other values than the first one, or values quantized "
                "otherwise. Shards of one run are made with the same pair and the same arguments."
            )
        pairs = zip(described, seen, _seen(report), strict=True)
        # What no batch changes was measured once in each run.
        seen = [one if known.constant else one.merge(other) for known, one, other in pairs]
    settings = settings_of(first.sums)
    wanted = Wanted(
        settings.get("histograms") == str(True), settings.get("per_channel") == str(True), settings.get("mask", "")
    )
    return replace(
        first,
        rows=tuple(replace(row, **numbers_of(described[row.value], seen[row.value])) for row in first.rows),
        **packed_values(described, seen, wanted),
        batches=sum(report.batches for report in reports),
        samples=sum(report.samples for report in reports),
        set_apart=numbered_on([report.set_apart for report in reports], [report.batches for report in reports]),
        input_ranges=added(report.input_ranges for report in reports),
        notes=joined_notes([report.notes for report in reports]),
    )


def _identity(row: ProfileRow) -> tuple[object, ...]:
    # As text, in which nan equals nan.
    return (
        row.name,
        row.role,
        row.argument,
        row.of,
        row.value,
        row.dtype,
        row.scheme,
        str(row.scale),
        str(row.zero_point),
    )


def _seen(report: Any) -> list[ValueStatistics]:
    """What a report knows about each of its values."""
    return [_value(report, number, own) for number, own in enumerate(unpack(report.sums, "values", ValueSums()))]


def _value(report: Any, number: int, own: ValueSums) -> ValueStatistics:
    histogram = Histogram(*unpacked(report.histograms, HISTOGRAM, number)) if report.histograms else None
    return ValueStatistics(
        statistics=replace(own.statistics, histogram=histogram),
        dtype=own.dtype,
        shape=own.shape,
        clamped=None if own.clamped < 0 else own.clamped,
        channels=_channels(report, number) if own.axis >= 0 else None,
        axis=own.axis,
    )


def _channels(report: Any, number: int) -> ChannelStatistics:
    count, low, high, mean, variance, zeros = unpacked(report.channels, CHANNELS, number)
    if not len(count):
        return ChannelStatistics.empty(0, uneven=True)
    seen = count > 0
    return ChannelStatistics(
        count,
        np.where(seen, low, np.inf),
        np.where(seen, high, -np.inf),
        np.where(seen, mean, 0.0),
        np.where(seen, variance * count, 0.0),
        np.rint(zeros * np.maximum(count, 1)).astype(np.int64),
    )
