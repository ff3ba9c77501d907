"""The charts of a report, for notebooks, TensorBoard and ``report.plot``; pages draw them in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Drawing:
    """One chart, as ``report.charts`` gives it, with the report whose tables it reads."""

    report: Any
    chart: dict[str, Any]

    @property
    def title(self) -> str:
        title: str = self.chart["title"]
        return title

    @property
    def rows(self) -> Sequence[Any]:
        rows: Sequence[Any] = getattr(self.report, self.chart.get("table", "rows"))
        return rows


def drawings(report: Any, others: Sequence[Any] = ()) -> list[Drawing]:
    """The charts that a page with these reports shows of the first."""
    return [Drawing(report, chart) for chart in report.charts((report, *others)) if "row" not in chart]


def of_rows(report: Any) -> list[tuple[Any, Drawing]]:
    """The charts of single rows, each with its row."""
    found = [Drawing(report, chart) for chart in report.charts((report,)) if "row" in chart]
    return [(each.rows[each.chart["row"]], each) for each in found]
