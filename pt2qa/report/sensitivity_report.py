"""The report of a sensitivity analysis: which site's quantization the output suffers from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan, log10, nan
from typing import TYPE_CHECKING

from pt2qa.report.base import Report
from pt2qa.report.export import csv_text, frame
from pt2qa.report.ranking import ranked
from pt2qa.report.rows import Environment
from pt2qa.report.sensitivity_rows import SensitivityBatch, SensitivityPart, SensitivityRow
from pt2qa.report.sensitivity_text import sensitivity_summary, sensitivity_table, sensitivity_text
from pt2qa.report.storage import register
from pt2qa.report.table import screen_width

if TYPE_CHECKING:
    import pandas


@register("sensitivity", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class SensitivityReport(Report):
    """What the quantization of each site alone does to the model's output.

    Args:
        rows: one for each site, region or module, in graph order; a value that is quantized twice alike is one site.
        outputs: the outputs that were looked at, ``output``, ``output[1]``, ``output.logits``.
        method: ``projection`` or ``exact``.
        metric: what ``value`` is: ``sqnr`` in dB, ``cosine``, ``l1``, ``atol``, ``kl``, or the name of a loss.
        worst_is: which values are the worst, ``smallest`` or ``largest``.
        group: what a row stands for: ``site``, ``region`` or ``module``.
        projections: random projections of each batch; 0 for the exact method.
        planned: rows of the finished analysis; more than there are where it was interrupted in its first batch.
        signal: sum of the squared reference outputs over the data.
        noise: sum of the squared output errors of the fully quantized model, measured.
        value: the metric of the fully quantized model, measured.
        batches, samples: how much the rows cover.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
        data: the batches, the unfinished one included.
        parts: the sums of each row on each batch.
    """

    rows: tuple[SensitivityRow, ...]
    outputs: tuple[str, ...]
    method: str
    metric: str
    worst_is: str
    group: str
    projections: int
    planned: int
    signal: float
    noise: float
    value: float
    batches: int
    samples: int
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment
    data: tuple[SensitivityBatch, ...]
    parts: tuple[SensitivityPart, ...]

    @property
    def predicted_sqnr(self) -> float:
        """Output SQNR in dB if the noise of the sites added up; nan where rows are missing."""
        return decibels(self.signal, sum(row.noise for row in self.rows)) if len(self.rows) == self.planned else nan

    @property
    def measured_sqnr(self) -> float:
        """Output SQNR in dB of the fully quantized model."""
        return decibels(self.signal, self.noise)

    def worst(self, k: int) -> tuple[SensitivityRow, ...]:
        """The k rows that cost most, the worst first; rows without a number come last."""
        return ranked(SensitivityRow, self.rows, "rank", ties="rank")[:k]

    def table(self, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The rows alone as a table: ``worst`` first, in ``graph`` order, by ``name`` or by any column.

        Args:
            sort: the order.
            limit: rows to show; None for all.
            width: columns of the screen; None asks the terminal, 100 where there is none.

        Raises:
            ReportError: there is no such column, or the limit is negative.
        """
        return sensitivity_table(self, sort, limit, screen_width(width))

    def summary(self) -> str:
        """What to look at, in sentences that state their thresholds."""
        return "\n".join(sensitivity_summary(self))

    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text, as ``print`` shows it; arguments and errors as in :meth:`table`."""
        return sensitivity_text(self, sort, limit, screen_width(width))

    def to_pandas(self, *, extended: bool = False) -> pandas.DataFrame:
        """One row a site in graph order; ``extended`` adds the site, its place in the model, its noise and its rank."""
        return frame(SensitivityRow, self.rows, extended=extended)

    def csv(self, *, extended: bool = False) -> str:
        """The columns of :meth:`to_pandas` as CSV text, numbers in full precision."""
        return csv_text(SensitivityRow, self.rows, extended=extended)

    def __repr__(self) -> str:
        what = f"{len(self.rows)} {self.group}s, {self.method}"
        return f"<SensitivityReport of {self.model}, {self.quantizer}: {what}, output SQNR {self.measured_sqnr:.4g} dB>"


def decibels(signal: float, noise: float) -> float:
    """``10 * log10(signal / noise)``; inf without noise, nan where the signal is zero or a number is nan.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, inf)
    """
    if isnan(signal) or isnan(noise):
        return nan
    if noise == 0.0:
        return inf
    return 10 * (log10(signal) - log10(noise)) if signal > 0.0 else nan
