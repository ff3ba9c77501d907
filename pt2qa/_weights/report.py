"""The report of a comparison weight by weight."""

from __future__ import annotations

from dataclasses import dataclass

from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.ranking import ranked
from pt2qa._report.rows import Environment, Unpaired, WeightRow
from pt2qa._report.storage import register
from pt2qa._weights.text import BY, weight_summary, weight_table, weight_text


@register("weights", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class WeightReport(RowReport):
    """How far each dequantized weight is from the float one, over all and in its worst channel.

    Tables show the quantized weights; ``to_pandas`` and ``csv`` have every weight.

    Args:
        rows: one for each parameter in graph order, those that stay float included (``WeightRow.quantized``).
        unpaired: parameters of one graph without a partner in the other, with the reason.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.
    """

    rows: tuple[WeightRow, ...]
    unpaired: tuple[Unpaired, ...]
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

    rendering = Rendering(weight_table, weight_summary, weight_text)

    def worst(self, k: int, by: str = BY) -> tuple[WeightRow, ...]:
        """The k worst rows by a column, ties by ``sqnr``; rows whose number is nan come last.

        Raises:
            ReportError: there is no such column.
        """
        return ranked(WeightRow, self.rows, by)[:k]

    def _headline(self) -> str:
        return f"<WeightReport of {self.model}, {self.quantizer}: {len(self.rows)} weights>"
