"""Reports as TensorBoard events: numbers by layer as scalars, profiles as histograms.  Free of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

from pt2qa._layers.report import LayerReport
from pt2qa._printable import clean
from pt2qa._profile.report import CHANNELS, Profile
from pt2qa._profile.rows import ProfileRow
from pt2qa._report.columns import cell, custom_names
from pt2qa.errors import ReportError

BUCKETS: Final = 128
"""Buckets of one histogram, equally wide."""

METRICS: Final = (
    *("sqnr", "isolated_sqnr", "rounding_sqnr", "mse", "cosine", "l1", "atol", "max_lsb", "saturation", "range_use"),
)
"""The columns of a layer report that become scalars, beside the user's metrics."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One point of a curve."""

    tag: str
    step: int
    value: float


def write_tensorboard(
    reports: LayerReport | Profile | Sequence[LayerReport | Profile],
    folder: str | os.PathLike[str],
    *,
    step: int = 0,
    per_channel: bool = False,
) -> None:
    """Write layer reports and profiles as event files for ``tensorboard --logdir <folder>``.

    Each report is a run of its own: ``layers``, and for a profile its side, such as ``reference`` and ``quantized``, so
    that TensorBoard shows both sides of a value in one chart.  A layer report gives each metric as
    ``<metric>/<layer>`` at the step, and as ``along_graph/<metric>``, whose steps are the layers in graph order.  A
    profile gives the histogram of each input, output, weight and bias as ``<op>/<value>``.  What is nan or infinite is
    left out.

    Args:
        reports: layer reports and profiles with histograms, no two of one run.
        folder: made where it does not exist; events are added to those that it holds.
        step: where on the axis of a training or a series of builds the reports stand.
        per_channel: also the numbers by channel of a profile that has them, as
            ``<op>/<value>/channel_<number>``, whose steps are the channels.

    Raises:
        ReportError: tensorboard is not installed, two reports would be one run, another kind of report was given, a
            profile has no histograms or no channels, or the folder cannot be written.
    """
    given = [reports] if isinstance(reports, (LayerReport, Profile)) else list(reports)
    runs: dict[str, LayerReport | Profile] = {}
    for report in given:
        run = _run(report)
        if run in runs:
            raise ReportError(f"two reports would be the run {run!r}; write them into folders of their own")
        runs[run] = report
    # All is read before anything is written: a report that lacks something leaves no half of a run.
    summaries = {run: _summaries(report, step, per_channel) for run, report in runs.items()}
    writer_type = _event_writer()
    try:
        for run, events in summaries.items():
            writer = writer_type(str(Path(folder) / run))
            for event in events:
                writer.add_event(event)
            writer.close()
    except OSError as error:
        raise ReportError(f"cannot write events to {folder}: {error.strerror or error}") from error


def layer_scalars(report: LayerReport, step: int) -> Iterator[Scalar]:
    """Each metric of each layer and output at the step, and along the graph; what is not finite is left out."""
    for metric in (*METRICS, *custom_names(report.rows + report.outputs)):
        seen: dict[str, int] = {}
        for row in report.rows + report.outputs:
            # A value that is quantized in two ways has two rows of one name.
            seen[row.name] = ordinal = seen.get(row.name, 0) + 1
            name = row.name if ordinal == 1 else f"{row.name} ({ordinal})"
            yield from _finite(Scalar(f"{metric}/{name}", step, float(cell(row, metric))))
        for place, row in enumerate(report.rows):
            yield from _finite(Scalar(f"along_graph/{metric}", place, float(cell(row, metric))))


def channel_scalars(profile: Profile) -> Iterator[Scalar]:
    """The numbers of each value by channel; the steps are the channels.

    Raises:
        ReportError: the profile has none.
    """
    rows = [row for row in profile.rows if row.channels >= 0]
    if not rows:
        raise ReportError(f"the profile of {profile.title} has no numbers by channel; profile with per_channel=True")
    for row in rows:
        numbers = profile.channel(row)
        for name in CHANNELS:
            for channel, value in enumerate(numbers[name].tolist()):
                yield from _finite(Scalar(f"{row.name}/{row.place}/channel_{name}", channel, float(value)))


def _finite(scalar: Scalar) -> Iterator[Scalar]:
    if isfinite(scalar.value):
        yield scalar


def _run(report: object) -> str:
    if isinstance(report, LayerReport):
        return "layers"
    if isinstance(report, Profile):
        return report.side
    raise ReportError(f"got a {type(report).__name__}; TensorBoard shows layer reports and profiles")


def _summaries(report: LayerReport | Profile, step: int, per_channel: bool) -> list[Any]:
    if isinstance(report, LayerReport):
        return [_scalar_event(scalar) for scalar in layer_scalars(report, step)]
    counted = [row for row in report.rows if row.count > row.broken]
    events = [_histogram_event(report, row, step) for row in counted]
    if per_channel:
        events += [_scalar_event(scalar) for scalar in channel_scalars(report)]
    return events


def _scalar_event(scalar: Scalar) -> Any:
    event = _new_event(scalar.step)
    event.summary.value.add(tag=clean(scalar.tag), simple_value=scalar.value)
    return event


def _histogram_event(profile: Profile, row: ProfileRow, step: int) -> Any:
    """The histogram in the form of TensorFlow's: every bucket with its upper edge, and the sums of the values."""
    edges, counts = profile.histogram(row, BUCKETS)
    number = row.count - row.broken
    event = _new_event(step)
    histogram = event.summary.value.add(tag=clean(f"{row.name}/{row.place}")).histo
    histogram.min, histogram.max, histogram.num = row.min, row.max, number
    histogram.sum = number * row.mean
    histogram.sum_squares = number * (row.variance + row.mean**2)
    histogram.bucket_limit.extend(edges[1:].tolist())
    histogram.bucket.extend(counts.tolist())
    return event


def _new_event(step: int) -> Any:
    event_type: Any = _tensorboard("compat.proto.event_pb2").Event
    return event_type(wall_time=time.time(), step=step)


def _event_writer() -> Any:
    return _tensorboard("summary.writer.event_file_writer").EventFileWriter


def _tensorboard(module: str) -> Any:
    """A module of TensorBoard, which is an extra.

    Raises:
        ReportError: it is not installed.
    """
    from importlib import import_module

    try:
        return import_module(f"tensorboard.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "tensorboard":
            raise
        raise ReportError("TensorBoard is not installed: pip install 'pt2qa[tensorboard]'") from error
