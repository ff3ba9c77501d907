"""Charts of a report as data, which scripts of a page and matplotlib draw.

Charts that read the report's tables do not repeat numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pt2qa._decibels import LOW_SQNR

LONGEST: Final = 1e30
"""What a bar may be long: more than any measured number, and little enough to be scaled and added up."""


def bars(title: str, about: str, rows: Sequence[tuple[str, float, str]]) -> list[dict[str, Any]]:
    """A bar for each row of label, length and number as text; no chart without rows."""
    drawn = [{"label": label, "value": _length(value), "text": text} for label, value, text in rows]
    return [{"kind": "bars", "title": title, "about": about, "bars": drawn}] if drawn else []


def stacked(
    title: str, about: str, series: Sequence[str], rows: Sequence[tuple[str, Sequence[float], str]]
) -> list[dict[str, Any]]:
    """A bar for each row of label, lengths of its parts and the whole as text; no chart without rows."""
    lengths = [(label, list(map(_length, parts)), text) for label, parts, text in rows]
    drawn = [{"label": label, "value": sum(parts), "parts": parts, "text": text} for label, parts, text in lengths]
    chart = {"kind": "bars", "title": title, "about": about, "series": list(series), "bars": drawn}
    return [chart] if drawn else []


def _length(value: float) -> float:
    """A bar's length: none for a number that has none; the text beside the bar says what it is."""
    return value if abs(value) <= LONGEST else 0.0


def along(
    title: str, about: str, series: Sequence[tuple[str, str]], *, line: float = LOW_SQNR, unit: str = "dB"
) -> dict[str, Any]:
    """Columns of the report's rows, each with what it is called, in graph order; ``line`` is dashed."""
    found = {"kind": "along", "title": title, "about": about, "table": "rows", "line": line, "unit": unit}
    return {**found, "series": [list(each) for each in series]}


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
