"""The report of a sensitivity analysis, and its rows: what quantizing each site alone costs the output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, isnan, nan
from typing import Annotated, Any, ClassVar, Final, Literal

from pt2qa._decibels import decibels
from pt2qa._report.base import DataReport, Report, data_read
from pt2qa._report.charts import bars
from pt2qa._report.prose import absent, counted, decibel, few, number, share
from pt2qa._report.rows import Amount, Column, Count, Row, Worse, column, derived
from pt2qa._report.storage import register
from pt2qa._report.sums import Sums
from pt2qa._report.table import without_number

ALL_SITES: Final = -1
"""The ``place`` of sums for the fully quantized model."""


def _sigma(value: float) -> str:
    """One digit: it is an estimate."""
    return number(value) if value in (0.0, inf) or isnan(value) else f"{value:.1g}"


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityRow(Row):
    """How quantizing one site, or a group of sites together, affects the model's output.

    Let ``ref`` be the reference's outputs and ``alone`` the outputs with only this site quantized, with sums over all
    elements of all outputs and batches::

        noise = sum((ref - alone)**2)        value = 10 * log10(sum(ref**2) / noise)     dB, for the metric sqnr

    A row of what :func:`pt2qa.sensitivity` returns.

    Args:
        name: of the op that produces the value (activation) or reads it (weight), e.g. ``layer1.0.conv1/conv2d``; for a
            group the region's first op, or the module's path.
        kind: ``activation`` or ``weight`` (a bias counts as a weight); a group is an ``activation`` if it holds one.
        op: that op's type, e.g. ``conv2d``, ``input`` for model inputs; for a module its class name.
        value: the metric with only this site quantized; for ``sqnr`` dB, ``inf`` if the output does not change.
        dtype: of the quantized values, e.g. ``int8``.
        flops: floating-point operations of that op per sample, a multiply-add counting two; 0 for ops without a
            formula.
        flops_share: its share of the model's flops, 0..1.
        site: index in ``pair.sites``; -1 for a group.
        handle: the op's handle; -1 if there is none.
        module: module path of the op.
        region: index in ``pair.regions``; -1 for the model's inputs and for modules.
        noise: squared output error caused by this site alone, summed over the data; linear units, additive.
        noise_share: its share, 0..1, of the sum over all rows.
        error: one sigma of the sampling error of ``value``, in its unit; 0 if nothing was sampled.
        rank: 1 is the worst.
        near_tie: whether an adjacent rank is within the sampling error of both.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("rank", "near_tie", "name", "kind", "op", "dtype"),
        *("value", "error", "noise_share", "flops_share"),
    )

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    kind: Annotated[Literal["activation", "weight"], column(key=True, importance=6)]
    op: Annotated[str, column(importance=1, shrinks_to=12)]
    value: Annotated[float, column(importance=0)]
    dtype: Annotated[str, column(importance=2)]
    flops: int
    flops_share: Annotated[float, column("flops\n%", show=share, importance=3)]
    site: Annotated[int, column(extended=True)]
    handle: Annotated[int, column(worse="smaller", extended=True)]
    module: Annotated[str, column(extended=True)]
    region: Annotated[int, column(extended=True)]
    noise: Annotated[float, column(extended=True)]
    noise_share: Annotated[float, column("noise\n%", show=share, importance=7, extended=True)]
    error: Annotated[float, column("±", show=_sigma, importance=3, extended=True)]
    rank: Annotated[int, column(worse="smaller", importance=5, extended=True)]
    near_tie: Annotated[bool, column("", show=lambda near: "≈" * near, importance=4, extended=True)]


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityBatch(Row):
    """One measured batch, so that an interrupted analysis can resume with the same data.

    Args:
        fingerprint: digest of the inputs.
        samples: how many.
        signal: sum of the squared reference outputs.
        projections: random projections; 0 for the exact method, and where each row was measured alone.
    """

    fingerprint: str
    samples: Count
    signal: Amount
    projections: Annotated[int, column(since=2, least=0)] = 0


@dataclass(frozen=True, slots=True, eq=False)
class SensitivityPart(Row):
    """The sums of one site or group on one batch; those of all batches make a row.

    Args:
        place: position of the row among all rows of the analysis; :data:`ALL_SITES` for all sites on.
        batch: position of the batch.
        noise: sum of the squared output errors.
        variance: of ``noise``, due to the random projections; 0 for the exact method.
        quant_signal: sum of the squared outputs with the site on.
        product: sum of the products of both outputs.
        absolute: sum of the absolute errors.
        largest: largest absolute error.
        count: number of output elements.
        loss: weighted sum of a loss; 0 for metrics that need none.
        weight: sum of the weights in ``loss``.
    """

    place: Annotated[int, column(least=-1)]
    batch: Count
    noise: Amount
    variance: Amount = 0.0
    quant_signal: Amount = 0.0
    product: float = 0.0
    absolute: Amount = 0.0
    largest: Amount = 0.0
    count: Count = 0
    loss: float = 0.0
    weight: float = 0.0


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
    sums: Annotated[Sums, column(since=3)] = field(default_factory=dict, compare=False)

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
        worst = sorted((row for row in self.rows if isfinite(row.noise_share)), key=lambda row: row.rank)[:25]
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
        cause = "causes" if len(few_rows) == 1 else "cause"
        if total:
            rows = counted(len(few_rows), self.group)
            yield f"{rows} of {len(self.rows)} {cause} {share(total)} % of the noise{kept}."
