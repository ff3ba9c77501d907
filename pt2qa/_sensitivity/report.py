"""The report of a sensitivity analysis: which site's quantization the output suffers from."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, nan

from pt2qa._decibels import decibels
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.columns import since
from pt2qa._report.ranking import ranked
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import SetApart
from pt2qa._report.storage import register
from pt2qa._sensitivity.rows import SensitivityBatch, SensitivityPart, SensitivityRow
from pt2qa._sensitivity.text import sensitivity_summary, sensitivity_table, sensitivity_text


@register("sensitivity", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class SensitivityReport(RowReport):
    """What the quantization of each site alone does to the model's output.

    ``to_pandas(extended=True)`` adds the site, its place in the model, its noise and its rank.

    Args:
        rows: one for each site, region or module, in graph order; a value that is quantized twice alike is one site.
        outputs: the outputs that were looked at, ``output``, ``output[1]``, ``output.logits``.
        method: ``projection`` or ``exact``.
        metric: what ``value`` is: ``sqnr`` in dB, ``cosine``, ``l1``, ``atol``, ``kl``, or the name of a loss.
        worst_is: which values are the worst, ``smallest`` or ``largest``.
        group: what a row stands for: ``site``, ``region`` or ``module``.
        projections: random projections of a batch, the most of all batches; 0 for the exact method.
        planned: rows of the finished analysis; more than there are where it was interrupted in its first batch.
        signal: sum of the squared reference outputs over the data.
        noise: sum of the squared output errors of the fully quantized model, measured.
        value: the metric of the fully quantized model, measured.
        batches, samples: how much the rows cover; batches that are set apart do not count.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
        data: the batches, the unfinished one and those that are set apart included.
        parts: the sums of each row on each batch.
        set_apart: batches that are in none of the numbers: empty ones, and those with NaN or infinities in an output.
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
    set_apart: tuple[SetApart, ...] = field(default=(), metadata=since(2))

    rendering = Rendering(sensitivity_table, sensitivity_summary, sensitivity_text)

    @property
    def predicted_sqnr(self) -> float:
        """Output SQNR in dB if the noise of the sites added up; nan where rows are missing."""
        return self._sqnr(sum(row.noise for row in self.rows)) if len(self.rows) == self.planned else nan

    @property
    def measured_sqnr(self) -> float:
        """Output SQNR in dB of the fully quantized model."""
        return self._sqnr(self.noise)

    def worst(self, k: int) -> tuple[SensitivityRow, ...]:
        """The k rows that cost most, the worst first; rows without a number come last."""
        return ranked(SensitivityRow, self.rows, "rank", ties="rank")[:k]

    def _sqnr(self, noise: float) -> float:
        # Outputs that do not differ give inf also where the reference is all zero.
        return inf if noise == 0.0 else decibels(self.signal, noise)

    def _headline(self) -> str:
        what = f"{len(self.rows)} {self.group}s, {self.method}"
        return f"<SensitivityReport of {self.model}, {self.quantizer}: {what}, output SQNR {self.measured_sqnr:.4g} dB>"
