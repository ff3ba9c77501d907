"""Reports as TensorBoard events: numbers by layer as scalars, profiles as histograms.  Does not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pt2qa._printable import clean
from pt2qa._report.base import Report
from pt2qa._report.charts import Buckets, Drawing, Event
from pt2qa._report.plot import imported_extra, png
from pt2qa._report.selection import select
from pt2qa.errors import ReportError


def write_tensorboard(
    reports: Report | Sequence[Report],
    folder: str | os.PathLike[str],
    *,
    step: int = 0,
    prefixes: Sequence[str] = (),
    ops: Sequence[str] = (),
    per_channel: bool = False,
) -> None:
    """Write layer, weight and deployed reports and profiles as event files for ``tensorboard --logdir <folder>``.

    Runs that share a tag share a card.  A layer report gives each metric as ``<metric>/<layer>`` in the run ``layers``,
    and the ends and means of both sides as ``min/<layer>`` and so on in the runs ``reference`` and ``quantized``.  A
    weight report (``weights``) and a deployed report (``deployed``) give their numbers likewise, and its stages as
    ``stages/sqnr/<stage>``.  Each number is a curve as well, ``along_the_graph/<report>/<metric>``, whose steps are the
    rows in graph order, the outputs last, in a run for each ``step``: ``layers/step_0``.  The charts of the page are
    pictures ``charts/<title>``, with the names of the layers, and with both sides in one histogram: of the 20 worst
    weights, and of the worst layers if profiles are written along.
    A profile gives the histogram of each input, output, weight and bias as ``<op>/<value>`` in the run of its side,
    such as ``reference``, ``quantized`` and ``deployed_values``.  Nan and infinite values are left out.

    Args:
        reports: layer, weight and deployed reports and profiles with histograms, at most one per run.
        folder: created if missing; events are added to existing ones.
        step: position of the reports on the axis of a training or a series of builds.
        prefixes: module paths (``layer1``) or op names; only ops under them are written.
        ops: op types (``conv2d``); only these are written.
        per_channel: also write a profile's per-channel numbers, if it has them, as
            ``<op>/<value>/channel_<number>``, whose steps are the channels.

    Raises:
        ReportError: tensorboard or matplotlib is not installed, two reports share a run, another kind of report was
                given, a profile has no histograms or no channels, or the folder cannot be written.
        SelectionError: a prefix or op type matches nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pt2qa.write_tensorboard([pt2qa.compare_layers(pair, [x], progress=False)], folder)
    """
    given = [reports] if isinstance(reports, Report) else list(reports)
    if prefixes or ops:
        given = _selected(given, prefixes, ops)
    runs: dict[str, list[Event]] = {}
    written: set[tuple[str, str]] = set()
    # Everything is read before anything is written: an incomplete report leaves no partial run.
    for report in given:
        found = report.events(step, per_channel, given)
        tags = {(run, each.tag) for run, events in found.items() for each in events}
        if both := written & tags:
            run = min(both)[0]
            raise ReportError(f"two reports would be written as the run {run!r}; write them to separate folders")
        written |= tags
        for run, events in found.items():
            runs.setdefault(run, []).extend(events)
    packed = {run: [_packed(event) for event in events] for run, events in runs.items()}
    writer_type = imported_extra("tensorboard.summary.writer.event_file_writer", "tensorboard").EventFileWriter
    try:
        for run, events in packed.items():
            writer = writer_type(str(Path(folder) / run))
            for event in events:
                writer.add_event(event)
            writer.close()
    except OSError as error:
        raise ReportError(f"cannot write events to {folder}: {error.strerror or error}") from error


def _selected(reports: Sequence[Report], prefixes: Sequence[str], ops: Sequence[str]) -> list[Report]:
    """The reports with the selected rows alone; a selector need not match in each of them."""
    chosen = select([row for report in reports for row in report.rows], prefixes, ops)
    kept, position = [], count()
    for report in reports:
        kept.append(report.with_rows([row for row in report.rows if next(position) in chosen]))
    return kept


def _packed(event: Event) -> Any:
    """As a TensorFlow event, whose histograms hold each bucket's upper edge, and sums of the values."""
    event_type: Any = imported_extra("tensorboard.compat.proto.event_pb2", "tensorboard").Event
    packed = event_type(wall_time=time.time(), step=event.step)
    shown = packed.summary.value.add(tag=clean(event.tag))
    value = event.value
    if isinstance(value, Drawing):
        shown.image.encoded_image_string, shown.image.width, shown.image.height = png(value)
        shown.image.colorspace = 3
    elif isinstance(value, Buckets):
        histogram = shown.histo
        histogram.min, histogram.max, histogram.num = value.min, value.max, value.number
        histogram.sum, histogram.sum_squares = value.total, value.squares
        histogram.bucket_limit.extend(value.limits)
        histogram.bucket.extend(value.counts)
    else:
        shown.simple_value = value
    return packed
