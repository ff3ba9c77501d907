"""The report of what changed between two reports of one kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.diffs.text import diff_summary, diff_table, diff_text
from pt2qa._report.rows import EXTENDED, Environment
from pt2qa._report.storage import register

Status = Literal["worse", "changed", "gone", "new", "better", "unchanged"]


@dataclass(frozen=True, slots=True)
class DiffRow:
    """What became of one row, or of one number of the whole report.

    Args:
        name: of the row, or of the number.
        role: what else tells the row apart, such as ``weight``; of an output's number which number it is.
        status: ``worse`` and ``better`` by more than the tolerance, ``unchanged`` within it, ``changed``: a text, or a
            yes or no, that differs, or a number that came or went; ``new`` and ``gone``: only one of the reports has
            it.
        before, after: the measure in the old and the new report; nan where there is none.
        change: ``after - before``; 0 for equal infinities; nan where a number is missing.
        loss: the same, positive where it got worse.
        note: texts before and after, or why a number is missing.
    """

    name: str
    role: str
    status: Status
    before: float
    after: float
    change: float
    loss: float = field(metadata=EXTENDED)
    note: str = field(metadata=EXTENDED)

    @property
    def place(self) -> str:
        """Name and role."""
        return f"{self.name} ({self.role})" if self.role else self.name


@dataclass(frozen=True, slots=True)
class Change:
    """What else differs between the reports: a version, the model, the quantizer, how much data, a setting, a verdict.

    Args:
        name: what it is, e.g. ``torch``, ``fingerprint``, ``samples``.
        before, after: as text.
    """

    name: str
    before: str
    after: str


@register("diff", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class ReportDiff(RowReport):
    """What changed from an old report to a new one of the same kind, row by row.

    Tables and texts show ``worst``: what changed, the greatest loss first; ``graph``: all rows, in the order of the new
    report, with the rows that are gone where they were; or all by ``name`` or a column.

    Args:
        rows: one for each row of either report, in that order.
        figures: numbers of the whole report, such as the SQNR of each output.
        changes: what else differs.
        kind: the kind of both reports, e.g. ``layers``.
        measure: the table and column that was compared, e.g. ``rows.isolated_sqnr``.
        worst_is: which values are the worst: ``smallest``, ``largest``, ``either`` where rows differ in that, or
            ``unknown`` for a user's metric that does not say; empty for texts, and for yes and no.
        unit: of the measure: ``dB`` or empty.
        tolerance: change up to which a number counts as unchanged, in that unit.
        notes: what else the reader must know.
        quantizer, model, environment: of the new report.
    """

    rows: tuple[DiffRow, ...]
    figures: tuple[DiffRow, ...]
    changes: tuple[Change, ...]
    kind: str
    measure: str
    worst_is: str
    unit: str
    tolerance: float
    notes: tuple[str, ...]
    quantizer: str
    model: str
    environment: Environment

    rendering = Rendering(diff_table, diff_summary, diff_text)

    def having(self, status: Status) -> tuple[DiffRow, ...]:
        """The rows of one status, in their order."""
        return tuple(row for row in self.rows if row.status == status)

    def _headline(self) -> str:
        counts = ", ".join(f"{len(self.having(status))} {status}" for status in ("worse", "better"))
        return f"<ReportDiff of {self.kind}, {self.model}, {self.quantizer}: {counts} of {len(self.rows)} rows>"
