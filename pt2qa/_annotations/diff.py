"""The report of how two annotations differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pt2qa._annotations.rows import AnnotationDiffRow
from pt2qa._report.base import Rendering, RowReport
from pt2qa._report.formats import index
from pt2qa._report.prose import by_reason, counted, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.rows import Environment
from pt2qa._report.storage import register
from pt2qa._report.table import View, table, with_column

_VIEWS: Final = (
    View("name", "name", str, 0, shrinks_to=20),
    View("role", "role", str, 9),
    View("argument", "arg", index, 2),
    View("of", "value of", str, 1, shrinks_to=16),
    View("status", "status", str, 8),
    View("what", "what differs (a -> b)", str, 0, shrinks_to=44),
)


def diff_text(report: AnnotationDiff, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    alike = by_reason((f"{row.name}, {row.role}", kind) for row in report.rows for kind in _kinds(row))
    return sections(
        [
            wrap(f"{report.model}: annotations of a, {report.a}, and b, {report.b}", width, indent="  "),
            listed(f"Differences by kind ({len(alike)})", alike, width),
            diff_table(report, sort, limit, width) if report.rows else "",
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in diff_summary(report)),
        ]
    )


def _kinds(row: AnnotationDiffRow) -> list[str]:
    """What differs, each by itself; which values share a scale differs from place to place."""
    if row.status != "changed":
        return [f"{row.status}: {row.what}"]
    changes = row.what.split("; ")
    return [change.partition(" ")[0] if change.startswith(("shares ", "value ")) else change for change in changes]


def diff_table(report: AnnotationDiff, sort: str, limit: int | None, width: int) -> str:
    """The places that differ as a table; ``worst`` is graph order."""
    in_order = sort in {"worst", "graph"}
    rows = report.rows if in_order else ranked(AnnotationDiffRow, report.rows, sort, ties="name")
    views = _VIEWS if in_order or sort == "name" else with_column(AnnotationDiffRow, _VIEWS, sort)
    return table(views, rows, None if in_order else sort, limit, width)


def diff_summary(report: AnnotationDiff) -> list[str]:
    """How many places differ, and how many do not."""
    same = f"{counted(report.equal_quantized + report.equal_float, 'place')} alike, {report.equal_quantized} quantized"
    if report.equal:
        return [f"No difference: {same}."]
    counts = {status: sum(row.status == status for row in report.rows) for status in ("only in a", "only in b")}
    changed = len(report.rows) - sum(counts.values())
    shown = ", ".join(f"{count} {status}" for status, count in counts.items())
    return [f"{counted(len(report.rows), 'place')} differ: {changed} changed, {shown}; {same}."]


@register("annotation_diff", schema=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationDiff(RowReport):
    """Where two annotations differ; true where they do.

    >>> from pt2qa.report import Environment
    >>> bool(AnnotationDiff((), "x86", "x86", 4, 2, (), "Net", Environment.here("")))
    False

    Args:
        rows: the places that differ, in graph order, those of b alone last.
        a, b: what the two sides are.
        equal_quantized: places that both sides quantize alike.
        equal_float: places that both leave in float.
        notes: what else the reader must know.
        model: the class name of the model, of both where they differ.
        environment: versions, and the fingerprint of a's model.
    """

    rows: tuple[AnnotationDiffRow, ...]
    a: str
    b: str
    equal_quantized: int
    equal_float: int
    notes: tuple[str, ...]
    model: str
    environment: Environment

    rendering = Rendering(diff_table, diff_summary, diff_text)

    @property
    def equal(self) -> bool:
        """Whether no place differs."""
        return not self.rows

    def __bool__(self) -> bool:
        return not self.equal

    def _headline(self) -> str:
        return f"<AnnotationDiff of {self.model}, {self.a} and {self.b}: {len(self.rows)} places differ>"
