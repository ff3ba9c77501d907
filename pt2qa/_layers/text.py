"""A layer report as text: outputs, the worst layers, what is missing, and last what to look at."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Final

from pt2qa._decibels import power
from pt2qa._layers.steps import folded
from pt2qa._report.columns import custom_names
from pt2qa._report.formats import cosine, decibel, number, share
from pt2qa._report.prose import by_reason, counted, listed, sections, unpaired_entries, wrap
from pt2qa._report.ranking import order, ranked, without_number
from pt2qa._report.rows import NONFINITE_ALONE, LayerRow
from pt2qa._report.set_apart import about_set_apart, apart_entries, failures
from pt2qa._report.table import View, custom_view, table, with_column

if TYPE_CHECKING:
    from pt2qa._layers.report import LayerReport

LOW_SQNR: Final = 20.0
"""dB below which a layer, weight or output is called low: the noise has more than 1 % of the signal's power."""

MOSTLY: Final = 0.5
"""Share of a value's error that clamping makes, above which it is counted."""

NEAR: Final = 3.0
"""dB above the output's SQNR up to which a layer is named: its noise has at least half the output's share of power."""

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
    """What the rows prove, in sentences that state their thresholds.

    No row can prove what its error costs the output, so that sensitivity and reconfigure are named for that.  Layers
    are named only where an output is low, their own noise has at least half the share of power that the output's has,
    and it is what lowers the SQNR there.  The lowest isolated SQNR alone says nothing: those of EfficientNet-Lite0 and
    MobileNetV2 are of layers that cost the output less than 0.3 dB.
    """
    about = [_about_output(report), _about_isolated(report)]
    if report.sqnr < LOW_SQNR:
        about += [_about_growth(report), _about_clamped(report)]
    about += [_counts(report), _advice(report)]
    return [*about_set_apart(report.set_apart, report.batches), *(sentence for sentence in about if sentence)]


def ranked_by(rows: Sequence[LayerRow]) -> str:
    """The column that says which layer is worst: its own fault, or where that was not measured the cumulative error."""
    return "isolated_sqnr" if any(not isnan(row.isolated_sqnr) for row in rows) else "sqnr"


def growth(row: LayerRow) -> float:
    """By how much the noise, as a share of the signal's power, is above that in what the row's op reads; or nan."""
    return power(-row.sqnr) - power(-row.input_sqnr)


def clamped_share(row: LayerRow) -> float:
    """The share of a value's error that clamping makes, 0..1: beyond ``scale**2 / 12``, which rounding makes alone.

    It is that of the reference's values, rounded, within the error of the quantized run.  nan where the rounding was
    not measured.
    """
    if not row.mse > 0:
        return nan
    share = power(row.sqnr - row.rounding_sqnr) - row.scale * row.scale / (12 * row.mse)
    beyond = row.saturation > 0 or row.excess_lsb > 0.5
    return min(max(share, 0.0), 1.0) * beyond if isfinite(share) else nan


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
    if isnan(report.worst(1)[0].isolated_sqnr):
        if all(isnan(row.sqnr) or NONFINITE_ALONE in row.note for row in report.rows):
            return "No layer has an isolated SQNR: its values are not finite, or all zero in the reference."
        return "Isolated SQNR was not measured; SQNR is cumulative and includes the error from upstream."
    values = [row for row in ranked(LayerRow, _quantized(report.rows), "isolated_sqnr") if not isnan(row.isolated_sqnr)]
    if not values:
        return ""
    worst, median = values[0], values[(len(values) - 1) // 2]
    low = sum(row.isolated_sqnr < LOW_SQNR for row in values)
    where = f" ({_named(worst)})" if _weighs(worst.isolated_sqnr, report) and _is_own(worst) else ""
    return (
        f"Isolated SQNR of {counted(len(values), 'quantized value')}: lowest {decibel(worst.isolated_sqnr)} dB{where}, "
        f"median {decibel(median.isolated_sqnr)} dB; {low} below {LOW_SQNR:g} dB."
    )


def _about_growth(report: LayerReport) -> str:
    known = [row for row in _quantized(report.rows) if not isnan(growth(row))]
    if not known:
        return ""
    limit = power(-LOW_SQNR)
    large = sorted((row for row in known if growth(row) > limit), key=growth, reverse=True)
    grows = f"grows by more than {100 * limit:g} % of the signal's power"
    if not large:
        return f"From what an op reads to what it makes, the noise nowhere {grows}."
    measured = any(not isnan(row.isolated_sqnr) for row in report.rows)
    own = [row for row in large if _is_own(row)] if measured else large
    cases = f", in {counted(len(own), 'case')} by the op's own quantization" if measured else ""
    most = next((row for row in own if growth(row) >= power(-report.sqnr - NEAR)), None)
    return f"The noise {grows} at {counted(len(large), 'op')}{cases}{_from_to(most)}."


def _from_to(row: LayerRow | None) -> str:
    if row is None:
        return ""
    before = "exact values" if row.input_sqnr == inf else f"{decibel(row.input_sqnr)} dB in what it reads"
    return f", most at {_named(row)}: from {before} to {decibel(row.sqnr)} dB"


def _about_clamped(report: LayerReport) -> str:
    clamped = [row for row in _clamped(report.rows) if _weighs(row.rounding_sqnr, report)]
    if not clamped:
        return ""
    worst = ranked(LayerRow, clamped, "rounding_sqnr")[0]
    far = "" if isnan(worst.excess_lsb) else f", with values up to {number(worst.excess_lsb)} steps beyond its range"
    return (
        f"Values are clamped at {worst.name}, which makes {100 * clamped_share(worst):.0f} % of the error there{far}: "
        "the range does not fit this data."
    )


def _counts(report: LayerReport) -> str:
    missing = without_number(report.rows, ranked_by(report.rows))
    found = [
        f"{counted(len(missing), 'row')} without a number",
        f"{len(report.unpaired)} unpaired",
        counted(len(report.notes), "note"),
    ]
    if any(not isnan(clamped_share(row)) for row in report.rows):
        found.insert(0, f"{counted(len(_clamped(report.rows)), 'value')} with most of the error from clamping")
    return f"Counts: {', '.join(found)}."


def _advice(report: LayerReport) -> str:
    if not report.rows:
        return ""
    if failed := failures(report.set_apart):
        return f"Look at {failed[0].name} first: quantization makes values there that are not finite."
    if report.sqnr < LOW_SQNR:
        return (
            "What each layer costs the output is not measured here: pt2qa.sensitivity ranks them by it, and "
            "pt2qa.reconfigure finds what to change."
        )
    measured = ranked_by(report.rows)
    missing = [*without_number(report.outputs, "sqnr"), *without_number(report.rows, measured)]
    if len(missing) == len(report.outputs) + len(report.rows):
        return "No verdict: no layer and no output has a number."
    unknown = [counted(len(report.set_apart), "batch", "batches")] if report.set_apart else []
    unknown += [f"{counted(len(missing), 'row')} without a number"] if missing else []
    rest = f"othing is known of {' and '.join(unknown)}." if unknown else ""
    if any(row.isolated_sqnr < LOW_SQNR for row in _quantized(report.rows)):
        return rest and f"N{rest}"
    by_itself = ", and no quantized value by itself" if measured == "isolated_sqnr" else ""
    found = f"o output is below {LOW_SQNR:g} dB{by_itself}"
    return f"N{found}; n{rest}" if rest else f"Nothing stands out: n{found}."


def _quantized(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Rows of values that some op reads as they are, and that quantization changes at that very op."""
    return [row for row in rows if row.observed_at == "dq" or row.answers_for]


def _named(row: LayerRow) -> str:
    """Which op answers for a row, and where its value is read."""
    return row.name if row.answers_for in ("", row.name) else f"{row.answers_for}, as {row.name} hands it on"


def _weighs(sqnr: float, report: LayerReport) -> bool:
    """Whether a noise is so large beside that of the output that whoever makes it is named."""
    return sqnr < LOW_SQNR and sqnr <= report.sqnr + NEAR and report.sqnr < LOW_SQNR


def _is_own(row: LayerRow) -> bool:
    """Whether the op's own quantization is as much as half of what the noise grows by.

    What an op reads may weigh more in what it makes: a relu takes signal away, an addition cancels it.
    """
    return power(-row.isolated_sqnr) >= growth(row) / 2 > 0


def _clamped(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [row for row in rows if clamped_share(row) > MOSTLY]
