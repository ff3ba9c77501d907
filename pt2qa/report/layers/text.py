"""A layer report as text: outputs, the worst layers, what is missing, and last what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite, isnan
from typing import TYPE_CHECKING, Final

from pt2qa.report.columns import custom_names
from pt2qa.report.formats import cosine, decibel, number, share
from pt2qa.report.layers.steps import folded
from pt2qa.report.prose import by_reason, counted, listed, sections, unpaired_entries, wrap
from pt2qa.report.ranking import order, ranked, without_number
from pt2qa.report.rows import NONFINITE_ALONE, LayerRow
from pt2qa.report.set_apart import about_set_apart, apart_entries, failures
from pt2qa.report.table import View, custom_view, table, with_column

if TYPE_CHECKING:
    from pt2qa.report.layers.report import LayerReport

LOW_SQNR: Final = 20.0
"""dB below which a layer, weight or output is called low: the noise has more than 1 % of the signal's power."""

CLAMPED: Final = 0.01
"""Share of clamped values above which a layer is counted: calibration did not see the range."""

VIEWS: Final = (
    View("name", "name", str, 0, shrinks_to=24),
    View("op", "op", str, 1, shrinks_to=12),
    View("observed_at", "at", str, 3),
    View("dtype", "dtype", str, 2),
    View("sqnr", "SQNR\ndB", decibel, 8),
    View("isolated_sqnr", "isolated\ndB", decibel, 0),
    View("rounding_sqnr", "rounding\ndB", decibel, 5),
    View("max_lsb", "max err\nLSB", number, 6),
    View("saturation", "clamped\n%", share, 7),
    View("cosine", "cosine", cosine, 4),
)
"""What a table shows, in this order; the least important goes first when the screen is narrow."""

_MODULE_COLUMNS: Final = frozenset({"name", "op", "sqnr", "isolated_sqnr", "max_lsb", "cosine"})


def layer_text(report: LayerReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    missing = without_number(report.rows, ranked_by(report.rows))
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            listed("Outputs", [_output_line(row) for row in report.outputs], width),
            layer_table(report, sort, limit, width),
            _module_table(report.modules, limit, width),
            listed(f"Set apart ({len(report.set_apart)})", apart_entries(report.set_apart), width),
            listed(f"Without a number ({len(missing)})", by_reason((row.name, row.note) for row in missing), width),
            listed(f"Unpaired ({len(report.unpaired)})", unpaired_entries(report.unpaired), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in layer_summary(report)),
        ]
    )


def layer_table(report: LayerReport, sort: str, limit: int | None, width: int) -> str:
    """The rows as a table, and below it what it leaves out; the steps of a recurrent op are one row."""
    worst = ranked_by(report.rows)
    by_number = sort not in {"worst", "graph", "name"}
    ordered = order(LayerRow, report.rows, sort, worst=worst, smallest=report.smaller_is_worse)
    rows, stand_for = folded(ordered, sort if by_number else worst, report.smaller_is_worse)
    views = VIEWS + tuple(map(custom_view, custom_names(rows)))
    if by_number:
        views = with_column(LayerRow, views, sort)
    drawn = table(views, rows, {"worst": worst, "graph": None}.get(sort, sort), limit, width)
    return "\n".join([drawn, *(wrap(line, width, indent="  ") for line in stand_for)])


def layer_summary(report: LayerReport) -> list[str]:
    """What to look at, in sentences that state their thresholds."""
    found = [_about_output(report), _about_isolated(report), _about_drop(report.rows), _counts(report), _advice(report)]
    return [*about_set_apart(report.set_apart, report.batches), *(sentence for sentence in found if sentence)]


def ranked_by(rows: Sequence[LayerRow]) -> str:
    """The column that says which layer is worst: its own fault, or where that was not measured the cumulative error."""
    return "isolated_sqnr" if any(not isnan(row.isolated_sqnr) for row in rows) else "sqnr"


def biggest_drop(rows: Sequence[LayerRow]) -> tuple[LayerRow, float, float] | None:
    """Where the cumulative SQNR falls most from one row to the next in graph order: the row, dB before, dB there.

    Rows without a finite SQNR are stepped over: nothing can be said of a fall from inf or nan.
    """
    known = [row for row in rows if isfinite(row.sqnr)]
    falls = [(row, before.sqnr, row.sqnr) for before, row in pairwise(known)]
    deepest = max(falls, key=lambda fall: fall[1] - fall[2], default=None)
    return deepest if deepest is not None and deepest[1] > deepest[2] else None


def _title(report: LayerReport, sort: str) -> str:
    worst = "smallest isolated SQNR" if ranked_by(report.rows) == "isolated_sqnr" else "smallest SQNR"
    how = {"worst": f"{worst} first", "graph": "in graph order"}.get(sort, f"by {sort}")
    samples = f"{counted(report.batches, 'batch', 'batches')} ({counted(report.samples, 'sample')})"
    return f"{report.model}, quantized by {report.quantizer}: {counted(len(report.rows), 'layer')}, {samples}, {how}"


def _output_line(row: LayerRow) -> str:
    why = f" ({row.note})" if row.note else ""
    return f"{row.name}: SQNR {decibel(row.sqnr)} dB, cosine {cosine(row.cosine)}, max error {number(row.atol)}{why}"


def _module_table(modules: Sequence[LayerRow], limit: int | None, width: int) -> str:
    if not modules:
        return ""
    by = ranked_by(modules)
    views = [view for view in VIEWS if view.column in _MODULE_COLUMNS]
    return "Modules, each run whole:\n" + table(views, ranked(LayerRow, modules, by), by, limit, width)


def _about_output(report: LayerReport) -> str:
    worst = next(iter(ranked(LayerRow, report.outputs, "sqnr")), None)
    if worst is None:
        return "No model output was compared."
    which = "The output" if len(report.outputs) == 1 else f"The worst output, {worst.name},"
    without = [f"{row.name} ({row.note or 'nan'})" for row in report.outputs if isnan(row.sqnr)]
    if without and not isnan(worst.sqnr):
        return f"Without an SQNR: {', '.join(without)}. {_about_worst_output(which, worst)}"
    return _about_worst_output(which, worst)


def _about_worst_output(which: str, worst: LayerRow) -> str:
    if isnan(worst.sqnr):
        return f"{which} has no SQNR ({worst.note or 'nan'})."
    if worst.sqnr == inf:
        return f"{which} is identical to the reference's."
    low = worst.sqnr < LOW_SQNR
    verdict = f"below {LOW_SQNR:g} dB: noise above 1 % of the signal's power" if low else f"not below {LOW_SQNR:g} dB"
    return f"{which} has an SQNR of {decibel(worst.sqnr)} dB, {verdict}."


def _about_isolated(report: LayerReport) -> str:
    if not report.rows:
        return "No layer was compared."
    worst = report.worst(1)[0]
    if isnan(worst.isolated_sqnr):
        if all(isnan(row.sqnr) or NONFINITE_ALONE in row.note for row in report.rows):
            return "No layer has an isolated SQNR: its values are not finite, or all zero in the reference."
        return "Isolated SQNR was not measured; SQNR is cumulative and includes the error from upstream."
    low = sum(row.isolated_sqnr < LOW_SQNR for row in report.rows)
    return (
        f"Worst layer by itself: {worst.name}, isolated SQNR {decibel(worst.isolated_sqnr)} dB; "
        f"{low} of {counted(len(report.rows), 'layer')} below {LOW_SQNR:g} dB."
    )


def _about_drop(rows: Sequence[LayerRow]) -> str:
    drop = biggest_drop(rows)
    if drop is None:
        return ""
    row, before, there = drop
    return f"Biggest drop of SQNR along the graph: from {decibel(before)} to {decibel(there)} dB at {row.name}."


def _clamped(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [row for row in ranked(LayerRow, rows, "saturation") if row.saturation > CLAMPED]


def _counts(report: LayerReport) -> str:
    clamped = _clamped(report.rows)
    most = f" (most: {clamped[0].name}, {share(clamped[0].saturation)} %)" if clamped else ""
    missing = without_number(report.rows, ranked_by(report.rows))
    return (
        f"Counts: {counted(len(clamped), 'layer')} with more than {100 * CLAMPED:g} % of values clamped{most}, "
        f"{counted(len(missing), 'row')} without a number, {len(report.unpaired)} unpaired, "
        f"{counted(len(report.notes), 'note')}."
    )


def _advice(report: LayerReport) -> str:
    worst = next(iter(report.worst(1)), None)
    if worst is None:
        return ""
    if failed := failures(report.set_apart):
        return f"Look at {failed[0].name} first: quantization makes values there that are not finite."
    if worst.isolated_sqnr < LOW_SQNR:
        return f"Look at {worst.name} first: no layer loses more by the rounding of its own inputs, weights and output."
    if report.sqnr < LOW_SQNR and isnan(worst.isolated_sqnr):
        return "Look where SQNR drops, in graph order."
    if report.sqnr < LOW_SQNR:
        return f"No layer is below {LOW_SQNR:g} dB by itself: errors add up; look where SQNR drops, in graph order."
    missing = [*without_number(report.outputs, "sqnr"), *without_number(report.rows, ranked_by(report.rows))]
    if len(missing) == len(report.outputs) + len(report.rows):
        return "No verdict: no layer and no output has a number."
    if _clamped(report.rows):
        return "Look at the clamped layers: calibration did not see their range."
    if report.set_apart or missing:
        unknown = [counted(len(report.set_apart), "batch", "batches")] if report.set_apart else []
        unknown += [f"{counted(len(missing), 'row')} without a number"] if missing else []
        return f"What has a number is not below {LOW_SQNR:g} dB; nothing is known of {' and '.join(unknown)}."
    return f"Nothing stands out: no layer and no output is below {LOW_SQNR:g} dB."
