"""The report of what a quantizer asks for and what the converted model does, place by place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pt2qa._annotations.overview import (
    Op,
    Way,
    about_float,
    about_modules,
    about_ops,
    missing_from,
    named,
    ops_of,
    ways_of,
)
from pt2qa._annotations.rows import BASES, AnnotationCoverage, AnnotationRow, ModuleCalls
from pt2qa._report.base import Block, Listing, Report, Table
from pt2qa._report.columns import shown_columns
from pt2qa._report.prose import by_reason, counted
from pt2qa._report.rows import Environment
from pt2qa._report.storage import register
from pt2qa._report.table import table
from pt2qa.errors import ReportError


@register("annotations", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationReport(Report):
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

    heading: ClassVar = "Annotations"
    usual_measures: ClassVar = ("dtype",)
    ties: ClassVar = "name"

    rows: tuple[AnnotationRow, ...]
    modules: tuple[ModuleCalls, ...]
    coverage: tuple[AnnotationCoverage, ...]
    basis: str
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ReportError(f"basis: got {self.basis!r}, expected one of {', '.join(BASES)}")

    def of(self, name: str) -> tuple[AnnotationRow, ...]:
        """The places of one op, in the order of its arguments, the output last."""
        return tuple(row for row in self.rows if row.name == name)

    def _headline(self) -> str:
        rounded = sum(row.quantized for row in self.rows)
        return (
            f"<AnnotationReport of {self.model}, {self.quantizer}: {len(self.rows)} places, {rounded} quantized, "
            f"{self.basis}>"
        )

    def _title(self, sort: str) -> str:
        how = {
            "annotated and converted": f"annotated and converted by {self.quantizer}",
            "annotated": f"annotated by {self.quantizer}, not converted yet",
            "converted": f"converted by {self.quantizer}; what was asked for is unknown",
        }[self.basis]
        return f"{self.model}, {how}: {counted(len(self.rows), 'place')}, {self._how(sort, 'in graph order')}"

    def _worst_by(self) -> None:
        return None

    def _before(self) -> Iterator[Block]:
        yield Table(shown_columns(Way), ways_of(self.rows))
        if self.coverage:
            yield Table(self.shown("coverage"), self.coverage)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        """An op a line, or in another order a value a line."""
        if sort not in ("worst", "graph"):
            return self._table(sort, limit, width)
        return table(shown_columns(Op), ops_of(self.rows), None, limit, width)

    def _after(self, limit: int | None) -> Iterator[Block]:
        if unusual := [module for module in self.modules if module.calls != 1]:
            yield Table(self.shown("modules"), unusual, "Modules that are not called once", limit=limit)
        unmet = [row for row in self.rows if row.annotated and not row.quantized]
        yield Listing("Asked for, and not rounded", [f"{named(row)}: {row.note}" for row in unmet])
        yield Listing("Not in the graph that is quantized", by_reason(missing_from(self.rows)))
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        about = (about_ops(self.rows, self.coverage, self.basis), about_float(self.coverage))
        return [sentence for sentence in (*about, *about_modules(self.modules)) if sentence]
