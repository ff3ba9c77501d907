"""The two reports of a comparison: layer by layer, and weight by weight."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Literal

from pt2qa.report.base import Report
from pt2qa.report.columns import check_custom
from pt2qa.report.export import csv_text, frame
from pt2qa.report.layer_text import layer_summary, layer_table, layer_text
from pt2qa.report.ranking import ranked
from pt2qa.report.rows import Environment, LayerRow, Unpaired, WeightRow
from pt2qa.report.storage import register
from pt2qa.report.table import screen_width
from pt2qa.report.weight_text import BY, weight_summary, weight_table, weight_text

if TYPE_CHECKING:
    import pandas

Part = Literal["rows", "outputs", "modules"]


@register("layers", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class LayerReport(Report):
    """How far each layer of the quantized model is from the reference, and whose fault that is.

    Args:
        rows: one for each compared value, in graph order.
        outputs: the model's outputs, ``output``, ``output[1]``, ``output.logits``.
        modules: whole modules that the user asked for; ``op`` is the class name.
        unpaired: nodes of one graph without a partner in the other, with the reason.
        notes: what else the reader must know, e.g. ``2 ops fell back to the converted op``.
        batches, samples: how much was run.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.

    Raises:
        ReportError: rows carry different custom metrics, or one under a column's name.

    >>> from pt2qa.report import Environment
    >>> empty = LayerReport((), (), (), (), (), 0, 0, "xnnpack", "Net", Environment.here(""))
    >>> empty.table()
    '(no rows)'
    """

    rows: tuple[LayerRow, ...]
    outputs: tuple[LayerRow, ...]
    modules: tuple[LayerRow, ...]
    unpaired: tuple[Unpaired, ...]
    notes: tuple[str, ...]
    batches: int
    samples: int
    quantizer: str
    model: str
    environment: Environment

    def __post_init__(self) -> None:
        check_custom(LayerRow, self.rows + self.outputs + self.modules)

    @property
    def sqnr(self) -> float:
        """The whole model's SQNR in dB: the smallest of its outputs; nan if none has one."""
        return next((row.sqnr for row in ranked(LayerRow, self.outputs, "sqnr")), nan)

    def worst(self, k: int, by: str = "isolated_sqnr") -> tuple[LayerRow, ...]:
        """The k worst rows by a column or custom metric, ties by ``sqnr``; rows whose number is nan come last.

        Small is worse for SQNR, cosine and range use; large is worse for all else, custom metrics included.

        Raises:
            ReportError: there is no such column.
        """
        return ranked(LayerRow, self.rows, by)[:k]

    def table(self, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The rows alone as a table: ``worst`` first, in ``graph`` order, by ``name`` or by any column.

        Args:
            sort: the order.
            limit: rows to show; None for all.
            width: columns of the screen; None asks the terminal, 100 where there is none.

        Raises:
            ReportError: there is no such column, or the limit is negative.
        """
        return layer_table(self, sort, limit, screen_width(width))

    def summary(self) -> str:
        """What to look at, in sentences that state their thresholds."""
        return "\n".join(layer_summary(self))

    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text, as ``print`` shows it; arguments and errors as in :meth:`table`."""
        return layer_text(self, sort, limit, screen_width(width))

    def to_pandas(self, *, extended: bool = False, part: Part = "rows") -> pandas.DataFrame:
        """One row a layer in graph order, columns as fixed in the documentation, custom metrics at the end.

        Args:
            extended: adds ``range_use`` and ``note``.
            part: ``rows``, ``outputs`` or ``modules``.
        """
        return frame(LayerRow, getattr(self, part), extended=extended)

    def csv(self, *, extended: bool = False) -> str:
        """The columns of :meth:`to_pandas` as CSV text, numbers in full precision."""
        return csv_text(LayerRow, self.rows, extended=extended)

    def __repr__(self) -> str:
        return f"<LayerReport of {self.model}, {self.quantizer}: {len(self.rows)} rows, output SQNR {self.sqnr:.4g} dB>"


@register("weights", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class WeightReport(Report):
    """How far each dequantized weight is from the float one, over all and in its worst channel.

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

    def worst(self, k: int, by: str = BY) -> tuple[WeightRow, ...]:
        """The k worst rows by a column, ties by ``sqnr``; rows whose number is nan come last.

        Raises:
            ReportError: there is no such column.
        """
        return ranked(WeightRow, self.rows, by)[:k]

    def table(self, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The quantized weights alone as a table; arguments and errors as in :meth:`LayerReport.table`."""
        return weight_table(self, sort, limit, screen_width(width))

    def summary(self) -> str:
        """What to look at, in sentences that state their thresholds."""
        return "\n".join(weight_summary(self))

    def text(self, *, sort: str = "worst", limit: int | None = 20, width: int | None = None) -> str:
        """The whole report as text, as ``print`` shows it; arguments and errors as in :meth:`table`."""
        return weight_text(self, sort, limit, screen_width(width))

    def to_pandas(self, *, extended: bool = False) -> pandas.DataFrame:
        """One row a weight in graph order, every field a column."""
        return frame(WeightRow, self.rows, extended=extended)

    def csv(self, *, extended: bool = False) -> str:
        """The columns of :meth:`to_pandas` as CSV text, numbers in full precision."""
        return csv_text(WeightRow, self.rows, extended=extended)

    def __repr__(self) -> str:
        return f"<WeightReport of {self.model}, {self.quantizer}: {len(self.rows)} weights>"
