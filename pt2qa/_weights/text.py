"""A weight report as text: quantized weights, the worst channel first; dead channels; what stays float."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, Final

from pt2qa._layers.text import LOW_SQNR
from pt2qa._report.formats import cosine, decibel, index, number, whole
from pt2qa._report.prose import by_reason, counted, listed, sections, unpaired_entries, wrap
from pt2qa._report.ranking import order, without_number
from pt2qa._report.rows import UNQUANTIZED, WeightRow
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._weights.report import WeightReport

BY: Final = "worst_channel_sqnr"
"""The column that says which weight is worst."""

VIEWS: Final = (
    View("name", "name", str, 0, shrinks_to=24),
    View("attr", "attr", str, 7),
    View("dtype", "dtype", str, 2),
    View("axis", "axis", index, 1),
    View("sqnr", "SQNR\ndB", decibel, 8),
    View("worst_channel_sqnr", "worst ch.\ndB", decibel, 0),
    View("worst_channel", "worst\nch.", index, 5),
    View("dead_channels", "dead\nch.", whole, 6),
    View("max_lsb", "max err\nLSB", number, 4),
    View("cosine", "cosine", cosine, 3),
)
"""What a table shows, in this order; the least important goes first when the screen is narrow."""


def weight_text(report: WeightReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    quantized = [row for row in report.rows if row.quantized]
    unquantized = [_float_line(row) for row in report.rows if not row.quantized]
    missing = without_number(quantized, BY)
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            weight_table(report, sort, limit, width),
            listed(f"Without a number ({len(missing)})", by_reason((row.name, row.note) for row in missing), width),
            listed(f"Unpaired ({len(report.unpaired)})", unpaired_entries(report.unpaired), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            listed(f"Not quantized ({len(unquantized)})", unquantized, width),
            "\n".join(wrap(line, width, indent="  ") for line in weight_summary(report)),
        ]
    )


def weight_table(report: WeightReport, sort: str, limit: int | None, width: int) -> str:
    """The quantized weights as a table, and below it what it leaves out."""
    quantized = tuple(row for row in report.rows if row.quantized)
    rows = order(WeightRow, quantized, sort, worst=BY)
    views = VIEWS if sort in {"worst", "graph", "name"} else with_column(WeightRow, VIEWS, sort)
    return table(views, rows, {"worst": BY, "graph": None}.get(sort, sort), limit, width)


def weight_summary(report: WeightReport) -> list[str]:
    """What the rows prove, in sentences that state their thresholds; weights are named only where they are low."""
    quantized = [row for row in report.rows if row.quantized]
    found = [_about_broken(quantized), _about_worst(quantized), *_about_dead(quantized), _counts(report, quantized)]
    return [sentence for sentence in found if sentence]


def _title(report: WeightReport, sort: str) -> str:
    how = {"worst": "smallest channel SQNR first", "graph": "in graph order"}.get(sort, f"by {sort}")
    return f"{report.model}, quantized by {report.quantizer}: {counted(len(report.rows), 'weight')}, {how}"


def _float_line(row: WeightRow) -> str:
    why = row.note.removeprefix(UNQUANTIZED).strip(" :;,")
    return f"{row.name}, {row.attr} ({row.dtype})" + (f": {why}" if why else "")


def _about_broken(quantized: list[WeightRow]) -> str:
    """A weight without an SQNR is worse than any that has one."""
    broken = [row for row in quantized if isnan(row.sqnr)]
    if not broken:
        return ""
    first = broken[0]
    where = f", channel {first.worst_channel}" if first.worst_channel >= 0 else ""
    return (
        f"Without an SQNR: {counted(len(broken), 'quantized weight')}, such as {first.name}, {first.attr}{where} "
        f"({first.note or 'nan'})."
    )


def _about_worst(quantized: list[WeightRow]) -> str:
    if not quantized:
        return "No weight is quantized."
    worst = order(WeightRow, quantized, "worst", worst=BY)[0]
    if isnan(worst.worst_channel_sqnr):
        return "No weight has a channel SQNR."
    known = [row for row in quantized if not isnan(row.worst_channel_sqnr)]
    low = sum(row.worst_channel_sqnr < LOW_SQNR for row in known)
    channel = f", channel {worst.worst_channel}" if worst.worst_channel >= 0 else ""
    where = f" ({worst.name}, {worst.attr}{channel})" if low else ""
    return (
        f"Channel SQNR of {counted(len(known), 'quantized weight')}: lowest {decibel(worst.worst_channel_sqnr)} dB"
        f"{where}; {low} below {LOW_SQNR:g} dB."
    )


def _about_dead(quantized: list[WeightRow]) -> list[str]:
    """Dead channels, by what made them: one scale for all, or the smallest scale that their own may be."""
    dead = order(WeightRow, [row for row in quantized if row.dead_channels > 0], "dead_channels", worst=BY)
    causes = (
        ([row for row in dead if row.axis < 0], "one scale serves all channels of these weights"),
        ([row for row in dead if row.axis >= 0], "each has a scale of its own, which is too large for it"),
    )
    return [
        f"{counted(sum(row.dead_channels for row in rows), 'dead channel')}, all zeros once quantized, in "
        f"{counted(len(rows), 'weight')} (most: {rows[0].name}, {rows[0].dead_channels}): {why}. pt2qa.check tells "
        "which of them were worth a step of the output."
        for rows, why in causes
        if rows
    ]


def _counts(report: WeightReport, quantized: list[WeightRow]) -> str:
    return (
        f"Counts: {len(report.rows) - len(quantized)} not quantized, "
        f"{counted(len(without_number(quantized, BY)), 'row')} without a number, {len(report.unpaired)} unpaired, "
        f"{counted(len(report.notes), 'note')}."
    )
