"""The report of a conformance run: which properties hold for a quantizer, on which models."""

from __future__ import annotations

from dataclasses import dataclass

from pt2qa._conformance.rows import ConformanceRow, ModelCoverage
from pt2qa._conformance.text import conformance_summary, conformance_table, conformance_text
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.rows import Environment
from pt2qa._report.storage import register


@register("conformance", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class ConformanceReport(RowReport):
    """What holds for a quantizer.

    ``print(report)`` shows how often each property held, then each failure with its reason;
    ``to_pandas(extended=True)`` adds the seconds.

    Args:
        rows: one for each property and model, model by model.
        coverage: how much of each model is annotated.
        notes: what else the reader must know.
        quantizer: the plug-in's name, or the class of a quantizer without one.
        environment: versions.
    """

    rows: tuple[ConformanceRow, ...]
    coverage: tuple[ModelCoverage, ...]
    notes: tuple[str, ...]
    quantizer: str
    environment: Environment

    rendering = Rendering(conformance_table, conformance_summary, conformance_text)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and something passed: a quantizer that annotates nothing has shown nothing."""
        outcomes = {row.outcome for row in self.rows}
        return "failed" not in outcomes and "passed" in outcomes

    @property
    def failures(self) -> tuple[ConformanceRow, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.outcome == "failed")

    @property
    def seconds(self) -> float:
        """How long the run took."""
        return sum(row.seconds for row in self.rows)

    def _headline(self) -> str:
        return f"<ConformanceReport of {self.quantizer}: {len(self.failures)} of {len(self.rows)} failed>"
