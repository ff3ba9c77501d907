"""The report of how two annotations differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pt2qa._annotations.rows import AnnotationDiffRow
from pt2qa._report.base import Block, Listing, ModelReport
from pt2qa._report.columns import Count, derived
from pt2qa._report.prose import by_reason, counted
from pt2qa._report.storage import register


@register("annotation-diff", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationDiff(ModelReport):
    """Where two annotations differ; true if they do.

    >>> from pt2qa.report import Environment
    >>> bool(AnnotationDiff((), "x86", "x86", 4, 2, notes=(), model="Net", environment=Environment.here("")))
    False

    Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: the places that differ, in graph order, those only in b last.
        a, b: what the two sides are.
        equal_quantized: places that both sides quantize alike.
        equal_float: places that both leave in float.
    """

    heading: ClassVar[str] = "Two annotations"
    ties: ClassVar[str] = "name"
    quantizer: ClassVar[str] = ""  # type: ignore[misc]  # each side has its own

    rows: tuple[AnnotationDiffRow, ...]
    a: str
    b: str
    equal_quantized: Count
    equal_float: Count

    @derived(judged=True)
    def differing(self) -> int:
        """How many places differ."""
        return len(self.rows)

    @property
    def equal(self) -> bool:
        """Whether no place differs."""
        return not self.rows

    def __bool__(self) -> bool:
        return not self.equal

    def _headline(self) -> str:
        return f"<AnnotationDiff of {self.model}, {self.a} and {self.b}: {len(self.rows)} places differ>"

    def _title(self, sort: str) -> str:
        return f"{self.model}: annotations of a, {self.a}, and b, {self.b}"

    def _before(self) -> Iterator[Block]:
        alike = by_reason((f"{row.name}, {row.role}", kind) for row in self.rows for kind in _kinds(row))
        yield Listing(f"Differences by kind ({len(alike)})", alike)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        return self._table(sort, limit, width) if self.rows else ""

    def _summary(self) -> Sequence[str]:
        """How many places differ, and how many do not."""
        same = f"{counted(self.equal_quantized + self.equal_float, 'place')} alike, {self.equal_quantized} quantized"
        if self.equal:
            return [f"No difference: {same}."]
        counts = {status: sum(row.status == status for row in self.rows) for status in ("only in a", "only in b")}
        changed = len(self.rows) - sum(counts.values())
        shown = ", ".join(f"{count} {status}" for status, count in counts.items())
        return [f"{counted(len(self.rows), 'place')} differ: {changed} changed, {shown}; {same}."]


def _kinds(row: AnnotationDiffRow) -> list[str]:
    """What differs, fact by fact; all of it as one where the row does not tell the facts apart."""
    return row.kind.split("\n") if row.kind else [f"{row.status}: {row.what}"]
