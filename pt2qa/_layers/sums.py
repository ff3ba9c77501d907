"""The sums behind a layer report, and the rows made of them: of one run, and of several merged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pt2qa._layers.rows import LayerRow
from pt2qa._metrics import ENDS, ErrorSums, Metric, NoiseSums
from pt2qa._report.merging import merged_data
from pt2qa._report.rows import Count
from pt2qa._report.sums import EACH, FIRST, MERGED, Mergeable, Sums, pack, settings_of, unpack, why_not
from pt2qa.errors import ReportError

TableName = Literal["rows", "outputs", "modules", ""]
"""A table of the report; empty for a value that is in none, but that rows read."""

UNMERGEABLE = "cannot be merged"
"""The setting that names the user's metrics whose states a file cannot hold."""


@dataclass(frozen=True, slots=True)
class Totals(Mergeable):
    """The sums of one row over some values.

    ``clamped`` of ``clamped_of`` values were clamped; ``dtype`` and ``shape`` are the first value's, None without one.
    """

    sums: ErrorSums = field(default_factory=ErrorSums, metadata=MERGED)
    isolated: NoiseSums = field(default_factory=NoiseSums, metadata=MERGED)
    rounding: NoiseSums = field(default_factory=NoiseSums, metadata=MERGED)
    custom: dict[str, Metric] = field(default_factory=dict, metadata=EACH)
    clamped: Count = 0
    clamped_of: Count = 0
    dtype: str = field(default="", metadata=FIRST)
    shape: tuple[int, ...] | None = field(default=None, metadata=FIRST)

    @property
    def nonfinite(self) -> bool:
        """Whether a value is NaN or infinite on one side only, so that the numbers are nan."""
        return bool(self.sums.nonfinite) or math.isnan(self.isolated.noise) or math.isnan(self.rounding.noise)


@dataclass(frozen=True, slots=True)
class Compared:
    """What a row compares; the other names are those of :class:`pt2qa.LayerRow`.

    Attributes:
        table: that has the row.
        low, high: the integer range, counted from the zero point; nan without a single scale and zero point.
        sources: positions of the rows whose values the op's region reads; None if not known.
        note: known beforehand.
        problem: why values could not be compared.
    """

    name: str = ""
    module: str = ""
    op: str = ""
    handle: int = -1
    table: TableName = "rows"
    observed_at: Literal["dq", "raw"] = "raw"
    dtype: str = ""
    scale: float = math.nan
    zero_point: float = math.nan
    low: float = math.nan
    high: float = math.nan
    part_of: str = ""
    step: int = -1
    answers_for: str = ""
    sources: tuple[int, ...] | None = None
    inputs: str = ""
    note: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RowSums:
    """What a row compares, and its sums over the batches that count and over those set apart."""

    compared: Compared
    counted: Totals
    apart: Totals

    @property
    def seen(self) -> bool:
        return bool(self.compared.problem) or self.counted.shape is not None or self.apart.shape is not None

    def reading(self, inputs: Sequence[str]) -> RowSums:
        return replace(self, compared=replace(self.compared, inputs=", ".join(inputs)))


def tables(sums: Sequence[RowSums], *, only_apart: bool) -> dict[str, Any]:
    """The rows of each table of a report; of the batches that are set apart, if these are all (``only_apart``)."""
    totals = [each.apart if only_apart else each.counted for each in sums]

    def input_sqnr(sources: Sequence[int] | None) -> float:
        """The smallest SQNR among the values that a row's region reads; nan if one of them has none."""
        if sources is None:
            return math.nan
        found = [totals[source].sums.sqnr for source in sources]
        return math.nan if any(map(math.isnan, found)) else min(found, default=math.inf)

    found: dict[str, list[LayerRow]] = {"rows": [], "outputs": [], "modules": []}
    for each, own in zip(sums, totals, strict=True):
        if each.compared.table and (each.seen or each.compared.table != "rows"):
            found[each.compared.table].append(_row(each.compared, own, input_sqnr(each.compared.sources)))
    return {name: tuple(rows) for name, rows in found.items()}


_KNOWN = (
    *("handle", "name", "module", "op", "observed_at", "scale", "zero_point"),
    *("part_of", "step", "answers_for", "inputs"),
)
"""What a row says before any batch."""


def _row(row: Compared, totals: Totals, input_sqnr: float) -> LayerRow:
    sums = totals.sums
    nonfinite_alone = math.isnan(totals.isolated.noise)
    alone = "NaN or infinite when run by itself" if nonfinite_alone and not sums.nonfinite else ""
    range_use, excess_lsb = _reach(row, sums)
    return LayerRow(
        **{name: getattr(row, name) for name in _KNOWN},
        dtype=row.dtype or totals.dtype,
        shape=totals.shape or (),
        **{name: getattr(sums, name) for name in ("sqnr", "mse", "cosine", "l1", "atol", "ref_mean", "quant_mean")},
        isolated_sqnr=totals.isolated.sqnr,
        rounding_sqnr=totals.rounding.sqnr,
        max_lsb=sums.atol / row.scale if row.scale > 0 else math.nan,
        saturation=totals.clamped / totals.clamped_of if totals.clamped_of else math.nan,
        **(dict.fromkeys(ENDS, math.nan) if not sums.count else {name: getattr(sums, name) for name in ENDS}),
        range_use=range_use,
        note="; ".join(filter(None, (row.note, *((row.problem,) if row.problem else (sums.reason, alone))))),
        input_sqnr=input_sqnr,
        excess_lsb=excess_lsb,
        nonfinite=nonfinite_alone or bool(sums.nonfinite or sums.excluded),
        custom={name: float(metric.compute()) for name, metric in totals.custom.items()},
    )


def _reach(row: Compared, sums: ErrorSums) -> tuple[float, float]:
    """Share of the integer range that the reference spans, and how many steps it reaches beyond the range."""
    if not (row.high > row.low and row.scale > 0 and sums.count):
        return math.nan, math.nan
    smallest, largest = sums.ref_min / row.scale, sums.ref_max / row.scale
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        return math.nan, math.nan
    spanned = min(max(round(largest), row.low), row.high) - min(max(round(smallest), row.low), row.high)
    return spanned / (row.high - row.low), max(largest - row.high, row.low - smallest, 0.0)


# -- to a report and back ----------------------------------------------------------------------------------------------


def packed(sums: Sequence[RowSums], settings: Mapping[str, str]) -> Sums:
    whole = [(each.counted, each.apart) for each in sums]
    states = [(name, state) for both in whole for totals in both for name, state in totals.custom.items()]
    reasons = {name: why for name, state in states if (why := why_not(state))}

    def kept(totals: Totals) -> Totals:
        return replace(totals, custom={name: own for name, own in totals.custom.items() if name not in reasons})

    empty = all(totals.shape is None for _, totals in whole)
    return pack(
        {**settings, UNMERGEABLE: "; ".join(f"metric {name!r}: {why}" for name, why in sorted(reasons.items()))},
        compared=[each.compared for each in sums],
        counted=[kept(totals) for totals, _ in whole],
        apart=[] if empty else [kept(totals) for _, totals in whole],
    )


def _unpacked(report: Any, empty: Totals) -> list[RowSums]:
    compared, counted = unpack(report.sums, "compared", Compared()), unpack(report.sums, "counted", empty)
    apart = unpack(report.sums, "apart", empty) or [empty] * len(compared)
    if not len(compared) == len(counted) == len(apart):
        raise ReportError("the sums of a report do not fit its rows. Make the report again.")
    return list(map(RowSums, compared, counted, apart))


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    first = reports[0]
    settings = settings_of(first.sums)
    if settings.pop(UNMERGEABLE, ""):
        raise ReportError(f"cannot merge: {settings_of(first.sums)[UNMERGEABLE]}.")
    _check_metrics(reports, metrics)
    sums = _unpacked(first, Totals(custom=dict(metrics)))
    for number, report in enumerate(reports[1:], 2):
        others = _unpacked(report, Totals(custom=dict(metrics)))
        if len(others) != len(sums):
            raise ReportError(
                f"cannot merge: report {number} compares {len(others)} values, the first one {len(sums)}. Shards of "
                "one run are made with the same pair and the same arguments."
            )
        sums = [_added(one, other, number) for one, other in zip(sums, others, strict=True)]
    data = merged_data(reports)
    found = tables(sums, only_apart=len(data["set_apart"]) == data["batches"])
    return replace(first, **found, **data, sums=packed(sums, settings))


def _check_metrics(reports: Sequence[Any], metrics: Mapping[str, Any]) -> None:
    """Only the user's own class can add up the states of a metric."""
    for number, report in enumerate(reports, 1):
        rows = (*report.rows, *report.outputs, *report.modules)
        names = set(rows[0].custom) if rows else set(metrics)
        if names != set(metrics):
            raise ReportError(
                f"cannot merge: report {number} has the metrics {sorted(names)}, given were {sorted(metrics)}. Pass "
                "each as compare_layers had it: pt2qa.merge(reports, metrics={name: empty state})."
            )


def _added(one: RowSums, other: RowSums, number: int) -> RowSums:
    for name in ("name", "table", "observed_at", "scale", "zero_point", "low", "high"):
        given, expected = getattr(other.compared, name), getattr(one.compared, name)
        if given != expected and not (given != given and expected != expected):  # nan is no difference
            raise ReportError(
                f"cannot merge: {name} of {other.compared.name!r} is {given!r} in report {number}, {expected!r} in the "
                "first one. Shards of one run are made with the same pair and the same arguments."
            )
    return RowSums(
        replace(one.compared, problem=one.compared.problem or other.compared.problem),
        one.counted.merge(other.counted),
        one.apart.merge(other.apart),
    )
