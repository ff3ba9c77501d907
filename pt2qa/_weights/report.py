"""The report of a weight-by-weight comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Annotated, Any, ClassVar, Final

import numpy as np

from pt2qa._decibels import LOW_SQNR
from pt2qa._report.base import Block, Listing, ModelReport, Report
from pt2qa._report.charts import LONGEST, Runs, of_rows, pictures, scalars
from pt2qa._report.prose import by_reason, counted, decibel, index
from pt2qa._report.prose import cosine as five_digits
from pt2qa._report.rows import Row, Unpaired, column
from pt2qa._report.storage import register
from pt2qa._report.sums import Array, Sums
from pt2qa._report.table import without_number
from pt2qa.errors import ReportError

UNQUANTIZED: Final = "not quantized"
"""The note of a :class:`WeightRow` whose weight stays in float."""


def _was_quantized(cells: Mapping[str, Any]) -> bool:
    """What files before schema 4 say in the note alone, in these words."""
    return not cells["note"].startswith("not quantized")


@dataclass(frozen=True, slots=True, eq=False)
class WeightRow(Row):
    """The error of one parameter: float against dequantized.  Formulas as in :class:`pt2qa.LayerRow`.

    A row of what :func:`pt2qa.compare_weights` returns.

    Args:
        handle: handle of the op that reads the weight.
        name: name of that op, e.g. ``layer1.0.conv1/conv2d``.
        module: its module path.
        op: the op, e.g. ``conv2d``.
        attr: which parameter: ``weight``, ``bias`` and so on.
        dtype: integer type; ``float32`` for a weight that is not quantized.
        scale: the largest of its channel scales; nan without one.
        axis: the channel axis of per-channel quantization, -1 for per-tensor.
        shape: the weight's shape.
        sqnr: dB over the whole weight.
        worst_channel: index of the channel with the smallest SQNR; -1 without channels.
        worst_channel_sqnr: that channel's SQNR in dB; 0 for a dead channel.
        dead_channels: number of channels that are non-zero in float but all zeros when quantized.
        mse, cosine, l1, atol, max_lsb: as for layers.
        ref_min, quant_min, ref_max, quant_max: of both sides.
        note: ``not quantized``, or anything special about the row.
        quantized: whether it is rounded; False for a weight that stays in float.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "attr", "dtype", "axis", "sqnr", "worst_channel_sqnr", "worst_channel", "dead_channels"),
        *("max_lsb", "cosine"),
    )

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: str
    attr: Annotated[str, column(key=True, importance=7)]
    dtype: Annotated[str, column(importance=2)]
    scale: float
    axis: Annotated[int, column(show=index, importance=1)]
    shape: tuple[int, ...]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=8)]
    worst_channel: Annotated[int, column("worst\nch.", show=index, importance=5)]
    worst_channel_sqnr: Annotated[float, column("worst ch.\ndB", unit="dB", importance=0)]
    dead_channels: Annotated[int, column("dead\nch.", importance=6)]
    mse: float
    cosine: Annotated[float, column(show=five_digits, worse="smaller", importance=3)]
    l1: float
    atol: float
    max_lsb: Annotated[float, column("max err\nLSB", importance=4)]
    ref_min: float
    quant_min: float
    ref_max: float
    quant_max: float
    note: str = ""
    quantized: Annotated[bool, column(extended=True, since=4, earlier=_was_quantized)] = False


BY: Final = "worst_channel_sqnr"
"""The column that says which weight is worst."""

BINS: Final = 32
"""Bins of a weight's histogram."""
PICTURED: Final = 20
"""Weights of which TensorBoard gets a picture: each takes tenths of a second."""

SIDES: Final = ("float", "dequantized")


@register("weights", schema=4, oldest=2)
@dataclass(frozen=True, slots=True, repr=False)
class WeightReport(ModelReport):
    """How far each dequantized weight is from the float one, overall and in its worst channel.

    Tables show the quantized weights; ``to_pandas`` and ``csv`` have every weight.

    What :func:`pt2qa.compare_weights` returns.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: one per parameter in graph order, including those that stay in float (``WeightRow.quantized``).
        unpaired: parameters of one graph without a counterpart in the other, with the reason.
        histograms: counts of the finite values of each quantized weight in :data:`BINS` equal bins, two arrays
            ``float`` and ``dequantized`` with one line for each; empty in files of older versions.
    """

    instead_of_merging: ClassVar[str] = "Weights do not depend on batches: run it once."
    usual_measures: ClassVar[tuple[str, ...]] = (BY,)

    rows: tuple[WeightRow, ...]
    unpaired: tuple[Unpaired, ...]
    histograms: Annotated[Sums, column(since=2)] = field(default_factory=dict, compare=False)

    def histogram(self, row: WeightRow) -> tuple[Array, Array, Array]:
        """The histogram of a quantized weight, as ``(edges, float counts, dequantized counts)``.

        Bins are equally wide, from the smallest value of both sides to the largest.

        Raises:
            ReportError: the report has none of this row.
        """
        quantized = self._tabled()
        index = next((i for i, each in enumerate(quantized) if each is row), -1)
        covered = span(row)
        if covered is None or index < 0 or len(self.histograms.get(SIDES[0], ())) != len(quantized):
            raise ReportError(f"{row.name!r}: the report holds no histogram of its {row.attr}")
        counts = [self.histograms[side][index] for side in SIDES]
        return np.linspace(*covered, BINS + 1), counts[0], counts[1]

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        """The histogram of each quantized weight, for the row's own place."""
        if not self.histograms:
            return []
        return [self._chart(index, row) for index, row in enumerate(self.rows) if row.quantized and span(row)]

    def _chart(self, index: int, row: WeightRow) -> dict[str, Any]:
        edges, *counts = self.histogram(row)
        return {
            "kind": "histogram",
            "title": f"{row.name}, {row.attr}",
            "about": f"{row.dtype}, {decibel(row.sqnr)} dB over all values",
            "table": "rows",
            "row": index,
            "edges": edges.tolist(),
            "series": [{"side": side, "counts": each.tolist()} for side, each in zip(SIDES, counts, strict=True)],
            "grid": None,
        }

    def with_rows(self, rows: Sequence[WeightRow]) -> WeightReport:
        """The same report with some of its rows and their histograms alone, to be shown."""
        kept = [index for index, row in enumerate(self._tabled()) if any(row is each for each in rows)]
        return replace(self, rows=tuple(rows), histograms={side: all_[kept] for side, all_ in self.histograms.items()})

    def events(self, step: int, per_channel: bool, others: Sequence[Report]) -> Runs:
        """SQNR of each quantized weight; of the worst, a picture of the histogram too, both sides in one."""
        rows = [replace(row, name=f"{row.name}/{row.attr}") for row in self._tabled()]
        worst = self.worst(PICTURED)
        drawn = [each for row, each in of_rows(self) if any(row is one for one in worst)]
        found = scalars("weights", rows, ("sqnr", BY, "dead_channels"), step)
        found["weights"] += pictures(drawn, step)
        return found

    def worst(self, k: int, by: str = BY) -> tuple[WeightRow, ...]:
        """The k worst rows by a column, ties by ``sqnr``; rows where it is nan come last.

        Raises:
            ReportError: there is no such column.
        """
        return self.ranked(self.rows, by)[:k]

    def _headline(self) -> str:
        return f"<WeightReport of {self.model}, {self.quantizer}: {len(self.rows)} weights>"

    def _title(self, sort: str) -> str:
        how = self._how(sort, "smallest channel SQNR first")
        return f"{self.model}, quantized by {self.quantizer}: {counted(len(self.rows), 'weight')}, {how}"

    def _tabled(self) -> list[WeightRow]:
        return [row for row in self.rows if row.quantized]

    def _after(self, limit: int | None) -> Iterator[Block]:
        missing = without_number(self._tabled(), BY)
        yield Listing(f"Without a number ({len(missing)})", by_reason((row.name, row.note) for row in missing))
        yield from self._unpaired()
        yield from self._notes()
        unquantized = [_float_line(row) for row in self.rows if not row.quantized]
        yield Listing(f"Not quantized ({len(unquantized)})", unquantized)

    def _summary(self) -> Sequence[str]:
        quantized = self._tabled()
        counts = (
            f"Counts: {len(self.rows) - len(quantized)} not quantized, "
            f"{counted(len(without_number(quantized, BY)), 'row')} without a number, {len(self.unpaired)} unpaired, "
            f"{counted(len(self.notes), 'note')}."
        )
        sentences = [_about_nan(quantized), _about_worst(self.ranked(quantized, BY))]
        dead = _about_dead(self.ranked([row for row in quantized if row.dead_channels > 0], "dead_channels"))
        return [*filter(None, sentences), *dead, counts]


def span(row: WeightRow) -> tuple[float, float] | None:
    """The values that a weight's histogram covers, those of both sides; None with NaN, or beyond what can be drawn."""
    low, high = min(row.ref_min, row.quant_min), max(row.ref_max, row.quant_max)
    if not max(abs(low), abs(high)) <= LONGEST:
        return None
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _float_line(row: WeightRow) -> str:
    why = row.note.removeprefix(UNQUANTIZED).strip(" :;,")
    return f"{row.name}, {row.attr} ({row.dtype})" + (f": {why}" if why else "")


def _about_nan(quantized: Sequence[WeightRow]) -> str:
    """A weight without an SQNR is worse than any that has one."""
    missing = [row for row in quantized if isnan(row.sqnr)]
    if not missing:
        return ""
    first = missing[0]
    where = f", channel {first.worst_channel}" if first.worst_channel >= 0 else ""
    return (
        f"Without an SQNR: {counted(len(missing), 'quantized weight')}, such as {first.name}, {first.attr}{where} "
        f"({first.note or 'nan'})."
    )


def _about_worst(ranked: Sequence[WeightRow]) -> str:
    if not ranked:
        return "No weight is quantized."
    worst = ranked[0]
    if isnan(worst.worst_channel_sqnr):
        return "No weight has a channel SQNR."
    known = [row for row in ranked if not isnan(row.worst_channel_sqnr)]
    low = sum(row.worst_channel_sqnr < LOW_SQNR for row in known)
    channel = f", channel {worst.worst_channel}" if worst.worst_channel >= 0 else ""
    where = f" ({worst.name}, {worst.attr}{channel})" if low else ""
    return (
        f"Channel SQNR of {counted(len(known), 'quantized weight')}: lowest {decibel(worst.worst_channel_sqnr)} dB"
        f"{where}; {low} below {LOW_SQNR:g} dB."
    )


def _about_dead(dead: Sequence[WeightRow]) -> list[str]:
    """Dead channels, by cause: one scale for all, or a per-channel scale at its lower limit."""
    causes = (
        ([row for row in dead if row.axis < 0], "these weights have one scale for all channels"),
        ([row for row in dead if row.axis >= 0], "their per-channel scales are too large"),
    )
    return [
        f"{counted(sum(row.dead_channels for row in rows), 'dead channel')}, all zeros once quantized, in "
        f"{counted(len(rows), 'weight')} (most: {rows[0].name}, {rows[0].dead_channels}): {why}. pt2qa.check lists "
        "those that contributed at least one LSB to the output."
        for rows, why in causes
        if rows
    ]
