from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan
from typing import Annotated, Any, ClassVar, Final

import numpy.typing as npt

from pt2qa._decibels import decibels
from pt2qa._report.base import DataReport, Report, data_read
from pt2qa._report.charts import bars
from pt2qa._report.columns import Column, Count, Worse, column, derived
from pt2qa._report.formats import absent, decibel, number, share
from pt2qa._report.prose import counted, few
from pt2qa._report.storage import register
from pt2qa._report.table import without_number
from pt2qa._sensitivity.rows import SensitivityBatch, SensitivityPart, SensitivityRow

BARS: Final = 25


@register("sensitivity", schema=4, oldest=3, since={"set_apart": 2, "input_ranges": 4})
@dataclass(frozen=True, slots=True, repr=False)
class SensitivityReport(DataReport):
    """How quantizing each site alone affects the model's output.

    ``to_pandas(extended=True)`` adds the site, its place in the model, its noise and its rank.

    What :func:`pt2qa.sensitivity` returns.  Its other fields are those of :class:`pt2qa.report.DataReport`.

    Args:
        rows: one per site, region or module, in graph order; a value that is quantized twice alike is one site.
        outputs: the outputs that were analyzed, ``output``, ``output[1]``, ``output.logits``.
        method: ``projection`` or ``exact``.
        metric: what ``value`` is: ``sqnr`` in dB, ``cosine``, ``l1``, ``atol``, ``kl``, or the name of a loss.
        worst_is: which values are the worst, ``smallest`` or ``largest``.
        group: what a row covers: ``site``, ``region`` or ``module``.
        projections: random projections per batch, the maximum over batches; 0 if all were measured exactly.
        planned: rows of the complete analysis; more than there are if it was interrupted in its first batch.
        signal: sum of the squared reference outputs over the data.
        noise: sum of the squared output errors of the fully quantized model, measured.
        value: the metric of the fully quantized model, measured.
        data: the batches, including the unfinished one and those that are set apart.
        parts: the sums of each row on each batch.
        sums: what :func:`pt2qa.merge` needs besides ``data`` and ``parts``.
    """

    counts_set_apart: ClassVar[bool] = False
    merges_in: ClassVar[str] = "pt2qa._sensitivity.ledger"
    usual_measures: ClassVar[tuple[str, ...]] = ("value",)
    ties: ClassVar[str] = "rank"
    served: ClassVar[frozenset[str]] = frozenset({"parts", "data"})
    one_run: ClassVar[tuple[str, ...]] = (
        *("model", "quantizer", "method", "metric", "worst_is", "group", "planned", "outputs"),
    )

    rows: tuple[SensitivityRow, ...]
    outputs: tuple[str, ...]
    method: str
    metric: str
    worst_is: str
    group: str
    projections: Count
    planned: Count
    signal: float
    noise: float
    value: float
    data: tuple[SensitivityBatch, ...]
    parts: tuple[SensitivityPart, ...]
    sums: Annotated[dict[str, npt.NDArray[Any]], column(since=3)] = field(default_factory=dict, compare=False)

    @derived(unit="dB", judged=True)
    def predicted_sqnr(self) -> float:
        """Output SQNR in dB if the noise of the sites added up; nan where rows are missing."""
        return self._sqnr(sum(row.noise for row in self.rows)) if len(self.rows) == self.planned else nan

    @derived(unit="dB", judged=True)
    def measured_sqnr(self) -> float:
        """Output SQNR in dB of the fully quantized model."""
        return self._sqnr(self.noise)

    def worst(self, k: int) -> tuple[SensitivityRow, ...]:
        """The k rows that cost most, worst first; rows without a number come last."""
        return self.ranked(self.rows, "rank")[:k]

    def _sqnr(self, noise: float) -> float:
        # Identical outputs give inf even if the reference is all zero.
        return inf if noise == 0.0 else decibels(self.signal, noise)

    def _headline(self) -> str:
        what = f"{len(self.rows)} {self.group}s, {self.method}"
        return f"<SensitivityReport of {self.model}, {self.quantizer}: {what}, output SQNR {self.measured_sqnr:.4g} dB>"

    def charts(self, others: Sequence[Report]) -> list[dict[str, Any]]:
        worst = sorted((row for row in self.rows if isfinite(row.noise_share)), key=lambda row: row.rank)[:BARS]
        title = "Share of the output noise, by site" if self.group == "site" else f"Share of the noise, by {self.group}"
        drawn = [(f"{row.name} ({row.kind})", row.noise_share, f"{share(row.noise_share)} %") for row in worst]
        return bars(title, f"The {counted(len(worst), self.group)} that cost most.", drawn)

    def meant(self, column: Column, key: Sequence[str] = ()) -> Column:
        """The value has the unit of the metric, and so does its error, which is present if something was sampled."""
        in_decibels = self.metric == "sqnr"
        if column.name == "error":
            show = column.show if self.projections else absent
            return replace(column, header="± dB" if in_decibels else "±", show=show)
        if column.name != "value":
            return column
        worse: Worse = "smaller" if self.worst_is == "smallest" else "larger"
        if in_decibels:
            return replace(column, header="SQNR\ndB", unit="dB", show=decibel, worse=worse)
        return replace(column, header=self.metric[:20], show=number, worse=worse)

    def _title(self, sort: str) -> str:
        how = self._how(sort, f"{self.worst_is} {self.metric} first")
        by = f"{self.method} method"
        if self.projections:
            by += f", {counted(self.projections, 'projection')}"
        rows, read = counted(len(self.rows), self.group), data_read(self.batches, self.samples)
        return f"{self.model}, quantized by {self.quantizer}: {rows}, each quantized alone; {by}, {read}, {how}"

    def _ordered(self, sort: str) -> tuple[Sequence[SensitivityRow], str | None]:
        # The rank decides which of two equal values is worse.
        return (self.ranked(self.rows, "rank"), "value") if sort == "worst" else Report._ordered(self, sort)

    def _table(self, sort: str, limit: int | None, width: int) -> str:
        return Report._table(self, "worst" if sort == "value" else sort, limit, width)

    def _lead(self) -> Sequence[str]:
        measured, predicted = self.measured_sqnr, self.predicted_sqnr
        if measured == predicted == inf:
            return ["The quantized model's outputs are equal to the reference's, and no row changes them."]
        whole_model = f"The quantized model has an output SQNR of {decibel(measured)} dB"
        if len(self.rows) < self.planned:
            return [f"{whole_model}; {self.planned - len(self.rows)} of {self.planned} rows are missing."]
        if isnan(predicted):  # a row without a number, which the summary names
            return [f"{whole_model}."]
        adds = f"{whole_model}; the noise of the rows adds up to {decibel(predicted)} dB"
        if isnan(measured):
            return [f"{adds}."]
        # The difference of two infinities is nan: nothing to report.
        gap = 0.0 if measured == predicted else abs(predicted - measured)
        for limit, how in ((1.0, "add up"), (3.0, "add up roughly")):
            if gap <= limit:
                return [f"{adds}: errors {how}, within {limit:g} dB."]
        how = "cancel or saturate" if predicted < measured else "are worse"
        return [f"{adds}: errors do not add up, they {how} together; take the rows as a ranking."]

    def _summary(self) -> Sequence[str]:
        return list(self._sentences())

    def _sentences(self) -> Iterator[str]:
        missing = without_number(self.rows, "value")
        if missing:
            names = few([row.name for row in missing], 3)
            yield f"Not ranked, because the output has no number when they alone are quantized: {names}."
        yield from self._about_worst()
        near = sum(row.near_tie for row in self.rows)
        if near and self.projections:
            rows = counted(near, "row")
            yield f"{rows} marked ≈: within the sampling error of an adjacent rank; more projections separate them."
        if any(row.noise > 0 for row in self.rows):
            yield (
                "What helps is not measured here: pt2qa.repair chooses the ranges and biases that cost the output "
                "least, pt2qa.reconfigure keeps ops in float, and pt2qa.diagnose measures the gain of each remedy."
            )
        silent = sum(row.noise == 0.0 for row in self.rows)
        yield (
            f"Counts: {silent} without effect on the output, {counted(len(missing), 'row')} without a number, "
            f"{counted(len(self.notes), 'note')}."
        )

    def _about_worst(self) -> Iterator[str]:
        """The worst row, and the fewest rows that make half of the noise."""
        if not self.rows:
            yield "No row was measured."
        if all(row.noise == 0.0 for row in self.rows):
            return
        worst = self.worst(1)[0]
        shown = f"{decibel(worst.value)} dB" if self.metric == "sqnr" else f"{self.metric} {number(worst.value)}"
        yield f"Worst: {worst.name} ({worst.kind}), {shown} when it alone is quantized."
        total, few_rows = 0.0, []
        for row in sorted(self.rows, key=lambda row: -row.noise_share):
            if not total < 0.5 or isnan(row.noise_share):
                break
            total += row.noise_share
            few_rows.append(row)
        flops = sum(row.flops_share for row in few_rows if row.kind == "weight" or self.group != "site")
        kept = f", with {share(flops)} % of the flops" if flops else ""
        make = "makes" if len(few_rows) == 1 else "make"
        if total:
            rows = counted(len(few_rows), self.group)
            yield f"{rows} of {len(self.rows)} {make} {share(total)} % of the noise{kept}."
