"""What the rows of a layer report prove, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, isnan, nan, prod
from typing import Final

from pt2qa._decibels import LOW_SQNR, power
from pt2qa._layers.rows import LayerRow
from pt2qa._report.base import UNDIAGNOSED
from pt2qa._report.prose import counted, decibel, number
from pt2qa._report.set_apart import SetApart, failures
from pt2qa._report.table import ranked, without_number

MOSTLY: Final = 0.5
"""Share of a value's error caused by clamping above which it is counted."""

NEAR: Final = 3.0
"""dB above the output's SQNR up to which a layer is named: its relative noise is at least half the output's."""


def summary_of(
    rows: Sequence[LayerRow], outputs: Sequence[LayerRow], unpaired: int, notes: int, found: Sequence[SetApart]
) -> list[str]:
    """What the rows prove, in sentences that state their thresholds.

    No row can prove what its error costs the output, so the summary refers to diagnose for that.
    Layers are named only if an output is low, their relative noise is at least half the output's, and they cause the
    drop in SQNR there. The lowest isolated SQNR alone says nothing: in EfficientNet-Lite0 and MobileNetV2 it belongs to
    layers that cost the output less than 0.3 dB.
    """
    sqnr = output_sqnr(outputs)
    about = [_about_output(outputs), *_about_constants(outputs), _about_isolated(rows, sqnr)]
    if sqnr < LOW_SQNR:
        about += [_about_growth(rows, sqnr), _about_clamped(rows, sqnr)]
    about += [_counts(rows, unpaired, notes), _advice(rows, outputs, found)]
    return [sentence for sentence in about if sentence]


def output_sqnr(outputs: Sequence[LayerRow]) -> float:
    return next((row.sqnr for row in ranked(LayerRow, outputs, "sqnr")), nan)


def ranked_by(rows: Sequence[LayerRow]) -> str:
    """The column that says which layer is worst: isolated error, or cumulative error if that was not measured."""
    return "isolated_sqnr" if any(not isnan(row.isolated_sqnr) for row in rows) else "sqnr"


def growth(row: LayerRow) -> float:
    """How much the relative noise power exceeds that of the values the row's op reads; or nan."""
    return power(-row.sqnr) - power(-row.input_sqnr)


def clamped_share(row: LayerRow) -> float:
    """The share of a value's error caused by clamping, 0..1: beyond ``scale**2 / 12``, the error of rounding alone.

    Computed from the rounded reference values, relative to the error of the quantized run. nan if rounding was not
    measured.
    """
    if not row.mse > 0:
        return nan
    share = power(row.sqnr - row.rounding_sqnr) - row.scale * row.scale / (12 * row.mse)
    beyond = row.saturation > 0 or row.excess_lsb > 0.5
    return min(max(share, 0.0), 1.0) * beyond if isfinite(share) else nan


def _about_output(outputs: Sequence[LayerRow]) -> str:
    worst = next(iter(ranked(LayerRow, outputs, "sqnr")), None)
    if worst is None:
        return "No model output was compared."
    which = "The output" if len(outputs) == 1 else f"The worst output, {worst.name},"
    if isnan(worst.sqnr):
        return f"{which} has no SQNR ({worst.note or 'nan'})."
    without = ", ".join(f"{row.name} ({row.note or 'nan'})" for row in outputs if isnan(row.sqnr))
    before = f"Without an SQNR: {without}. " if without else ""
    if worst.sqnr == inf:
        return f"{before}{which} is identical to the reference's."
    low = worst.sqnr < LOW_SQNR
    verdict = f"below {LOW_SQNR:g} dB: noise above 1 % of the signal's power" if low else f"not below {LOW_SQNR:g} dB"
    return f"{before}{which} has an SQNR of {decibel(worst.sqnr)} dB, {verdict}."


def _about_constants(outputs: Sequence[LayerRow]) -> list[str]:
    """The outputs whose error says nothing, because the reference has one value everywhere."""
    return [
        f"{row.name} is {number(row.ref_min)} everywhere in the reference, so it shows no error of what is before it."
        for row in outputs
        if row.ref_min == row.ref_max and prod(row.shape) > 1
    ]


def _about_isolated(rows: Sequence[LayerRow], sqnr: float) -> str:
    if not rows:
        return "No layer was compared."
    if all(isnan(row.isolated_sqnr) for row in rows):
        if all(isnan(row.sqnr) or row.nonfinite for row in rows):
            return "No layer has an isolated SQNR: its values are not finite, or all zero in the reference."
        return "Isolated SQNR was not measured; SQNR is cumulative and includes the error from upstream."
    values = [row for row in ranked(LayerRow, _quantized(rows), "isolated_sqnr") if not isnan(row.isolated_sqnr)]
    if not values:
        return ""
    worst, median = values[0], values[(len(values) - 1) // 2]
    low = sum(row.isolated_sqnr < LOW_SQNR for row in values)
    where = f" ({_named(worst)})" if _weighs(worst.isolated_sqnr, sqnr) and _is_own(worst) else ""
    return (
        f"Isolated SQNR of {counted(len(values), 'quantized value')}: lowest {decibel(worst.isolated_sqnr)} dB{where}, "
        f"median {decibel(median.isolated_sqnr)} dB; {low} below {LOW_SQNR:g} dB."
    )


def _about_growth(rows: Sequence[LayerRow], sqnr: float) -> str:
    known = [row for row in _quantized(rows) if not isnan(growth(row))]
    if not known:
        return ""
    limit = power(-LOW_SQNR)
    large = sorted((row for row in known if growth(row) > limit), key=growth, reverse=True)
    by = f"by more than {100 * limit:g} % of the signal's power"
    if not large:
        return f"No op increases the noise {by}."
    measured = any(not isnan(row.isolated_sqnr) for row in rows)
    own = [row for row in large if _is_own(row)] if measured else large
    cases = f", in {counted(len(own), 'case')} by the op's own quantization" if measured else ""
    most = next((row for row in own if growth(row) >= power(-sqnr - NEAR)), None)
    return f"The noise grows {by} at {counted(len(large), 'op')}{cases}{_from_to(most)}."


def _from_to(row: LayerRow | None) -> str:
    if row is None:
        return ""
    before = "exact values" if row.input_sqnr == inf else f"{decibel(row.input_sqnr)} dB in what it reads"
    return f", most at {_named(row)}: from {before} to {decibel(row.sqnr)} dB"


def _about_clamped(rows: Sequence[LayerRow], sqnr: float) -> str:
    clamped = [row for row in _clamped(rows) if _weighs(row.rounding_sqnr, sqnr)]
    if not clamped:
        return ""
    worst = ranked(LayerRow, clamped, "rounding_sqnr")[0]
    far = "" if isnan(worst.excess_lsb) else f", with values up to {number(worst.excess_lsb)} steps beyond its range"
    return (
        f"Values are clamped at {worst.name}, which causes {100 * clamped_share(worst):.0f} % of the error there{far}: "
        "the range does not fit this data."
    )


def _counts(rows: Sequence[LayerRow], unpaired: int, notes: int) -> str:
    missing = without_number(rows, ranked_by(rows))
    found = [f"{counted(len(missing), 'row')} without a number", f"{unpaired} unpaired", counted(notes, "note")]
    if any(not isnan(clamped_share(row)) for row in rows):
        found.insert(0, f"{counted(len(_clamped(rows)), 'value')} with most of the error from clamping")
    return f"Counts: {', '.join(found)}."


def _advice(rows: Sequence[LayerRow], outputs: Sequence[LayerRow], found: Sequence[SetApart]) -> str:
    if not rows:
        return ""
    if failed := failures(found):
        return f"Look at {failed[0].name} first: quantization makes values there that are not finite."
    if output_sqnr(outputs) < LOW_SQNR:
        return UNDIAGNOSED
    measured = ranked_by(rows)
    missing = [*without_number(outputs, "sqnr"), *without_number(rows, measured)]
    if len(missing) == len(outputs) + len(rows):
        return "No verdict: no layer and no output has a number."
    unknown = [counted(len(found), "batch", "batches")] if found else []
    unknown += [f"{counted(len(missing), 'row')} without a number"] if missing else []
    rest = f"othing is known of {' and '.join(unknown)}." if unknown else ""
    if any(row.isolated_sqnr < LOW_SQNR for row in _quantized(rows)):
        return rest and f"N{rest}"
    by_itself = ", and no quantized value by itself" if measured == "isolated_sqnr" else ""
    healthy = f"o output is below {LOW_SQNR:g} dB{by_itself}"
    return f"N{healthy}; n{rest}" if rest else f"Nothing stands out: n{healthy}."


def _quantized(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Rows of values that some op reads directly, and that quantization changes at that very op."""
    return [row for row in rows if row.observed_at == "dq" or row.answers_for]


def _named(row: LayerRow) -> str:
    return row.name if row.answers_for in ("", row.name) else f"{row.answers_for}, read after {row.name}"


def _weighs(sqnr: float, output: float) -> bool:
    """Whether a noise is large enough, relative to the output's, for its source to be named."""
    return sqnr < LOW_SQNR and sqnr <= output + NEAR and output < LOW_SQNR


def _is_own(row: LayerRow) -> bool:
    """Whether the op's own quantization is at least half of the growth in noise.

    Input noise may weigh more in an op's output: a relu removes signal, an addition cancels it.
    """
    return power(-row.isolated_sqnr) >= growth(row) / 2 > 0


def _clamped(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [row for row in rows if clamped_share(row) > MOSTLY]
