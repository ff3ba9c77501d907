"""The report of a comparison layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import nan
from typing import TYPE_CHECKING, Literal

from pt2qa._layers.steps import opened
from pt2qa._layers.text import layer_summary, layer_table, layer_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.columns import check_custom, since
from pt2qa._report.export import frame
from pt2qa._report.ranking import ranked
from pt2qa._report.rows import Environment, LayerRow, Unpaired
from pt2qa._report.set_apart import SetApart
from pt2qa._report.storage import register
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas

Part = Literal["rows", "outputs", "modules", "set_apart"]


@register("layers", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class LayerReport(RowReport):
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
        set_apart: batches that are in none of the numbers: empty ones, and those with NaN or infinities.
        smaller_is_worse, larger_is_worse: the custom metrics that say so of their values.

    Raises:
        ReportError: rows carry different custom metrics, or one under a column's name; or a metric says both.

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
    set_apart: tuple[SetApart, ...] = field(default=(), metadata=since(2))
    smaller_is_worse: tuple[str, ...] = field(default=(), metadata=since(2))
    larger_is_worse: tuple[str, ...] = field(default=(), metadata=since(2))

    rendering = Rendering(layer_table, layer_summary, layer_text)

    def __post_init__(self) -> None:
        check_custom(LayerRow, self.rows + self.outputs + self.modules)
        if both := sorted({*self.smaller_is_worse} & {*self.larger_is_worse}):
            raise ReportError(f"custom metric {both[0]!r}: said to be worse when smaller and when larger")

    @property
    def sqnr(self) -> float:
        """The whole model's SQNR in dB: the smallest of its outputs; nan if none has one."""
        return next((row.sqnr for row in ranked(LayerRow, self.outputs, "sqnr")), nan)

    @property
    def batches_apart(self) -> int:
        """How many batches are in none of the numbers."""
        return len(self.set_apart)

    def worst(self, k: int, by: str = "isolated_sqnr") -> tuple[LayerRow, ...]:
        """The k worst rows by a column or custom metric, ties by ``sqnr``; rows whose number is nan come last.

        Small is worse for SQNR, cosine and range use, and for custom metrics that say so; large for all else.

        Raises:
            ReportError: there is no such column.
        """
        return ranked(LayerRow, self.rows, by, smallest=self.smaller_is_worse)[:k]

    def opened(self, name: str) -> LayerReport:
        """The same report, in whose tables a recurrent op that capture took apart is shown part by part.

        Args:
            name: of the op, such as ``rnn/lstm``.

        Raises:
            ReportError: no op of that name was taken apart.
        """
        return replace(self, rows=opened(self.rows, name))

    def to_pandas(self, *, extended: bool = False, part: Part = "rows") -> pandas.DataFrame:
        """One row a layer in graph order, columns as fixed in the documentation, custom metrics at the end.

        Args:
            extended: adds ``range_use``, ``note``, ``part_of``, ``step``, ``answers_for``, ``input_sqnr`` and
                ``excess_lsb``.
            part: ``rows``, ``outputs`` or ``modules``; ``set_apart`` has one row a batch that is set apart.
        """
        return frame(SetApart if part == "set_apart" else LayerRow, getattr(self, part), extended=extended)

    def _headline(self) -> str:
        return f"<LayerReport of {self.model}, {self.quantizer}: {len(self.rows)} rows, output SQNR {self.sqnr:.4g} dB>"
