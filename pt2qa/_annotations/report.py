"""The report of what a quantizer asks for and what the converted model does, place by place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pt2qa._annotations.rows import BASES, AnnotationCoverage, AnnotationRow, ModuleCalls
from pt2qa._annotations.text import annotation_summary, annotation_table, annotation_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.columns import row_type_of
from pt2qa._report.export import frame
from pt2qa._report.rows import Environment
from pt2qa._report.storage import register
from pt2qa.errors import ReportError

if TYPE_CHECKING:
    import pandas

Part = Literal["rows", "modules", "coverage"]


@register("annotations", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationReport(RowReport):
    """How each op's inputs, weights and output are quantized: dtype, scheme, axis, observer, scale.

    ``print`` shows an op a line; :meth:`table` a place a line.

    Args:
        rows: one for each place where a value is made or read, in graph order, those that stay float included.
        modules: how often each module is called, in the order of the calls, those that are never called last.
        coverage: by kind of op, how many are annotated and quantized.
        basis: ``annotated and converted``; ``annotated``: nothing is converted yet, so there are no scales, and
            ``quantized`` is what will be; ``converted``: a graph from elsewhere, so nothing is known of what was asked.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        model: the model's class name.
        environment: versions, and the model's fingerprint.

    Raises:
        ReportError: ``basis`` is none of these.
    """

    rows: tuple[AnnotationRow, ...]
    modules: tuple[ModuleCalls, ...]
    coverage: tuple[AnnotationCoverage, ...]
    basis: str
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

    rendering = Rendering(annotation_table, annotation_summary, annotation_text)

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ReportError(f"basis: got {self.basis!r}, expected one of {', '.join(BASES)}")

    def of(self, name: str) -> tuple[AnnotationRow, ...]:
        """The places of one op, in the order of its arguments, the output last."""
        return tuple(row for row in self.rows if row.name == name)

    def to_pandas(self, *, extended: bool = False, part: Part = "rows") -> pandas.DataFrame:
        """A row a place in graph order, or another part: ``modules``, ``coverage``; ``extended`` adds site and note."""
        return frame(row_type_of(type(self), part), getattr(self, part), extended=extended)

    def _headline(self) -> str:
        rounded = sum(row.quantized for row in self.rows)
        return (
            f"<AnnotationReport of {self.model}, {self.quantizer}: {len(self.rows)} places, {rounded} quantized, "
            f"{self.basis}>"
        )
