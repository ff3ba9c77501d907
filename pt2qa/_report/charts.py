"""Charts of a report as data, which scripts of a page and matplotlib draw, and its events for TensorBoard.

Charts that read the report's tables do not repeat numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from pt2qa._decibels import LOW_SQNR
from pt2qa._report.rows import cell

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
        return str(self.chart["title"])

    @property
    def rows(self) -> Sequence[Any]:
        rows: Sequence[Any] = getattr(self.report, self.chart.get("table", "rows"))
        return rows


def drawings(report: Any, others: Sequence[Any] = ()) -> list[Drawing]:
    """The charts that a page with these reports shows of the first."""
    return [Drawing(report, chart) for chart in report.charts((report, *others)) if is_whole(chart)]


def is_whole(chart: dict[str, Any]) -> bool:
    """Whether a chart stands in its report's section, and not only in the row that it is of."""
    return bool(chart.get("whole", "row" not in chart))


def of_rows(report: Any) -> list[tuple[Any, Drawing]]:
    """The charts of single rows, each with its row."""
    found = [Drawing(report, chart) for chart in report.charts((report,)) if "row" in chart]
    return [(each.rows[each.chart["row"]], each) for each in found]


@dataclass(frozen=True, slots=True)
class Buckets:
    """One histogram: smallest and largest value, how many, their sum and sum of squares; upper edges of buckets."""

    min: float
    max: float
    number: int
    total: float
    squares: float
    limits: Sequence[float]
    counts: Sequence[float]


@dataclass(frozen=True, slots=True)
class Event:
    """What TensorBoard shows under a tag."""

    tag: str
    step: int
    value: float | Buckets | Drawing


Runs = dict[str, list[Event]]
"""Events by the name of a TensorBoard run; runs share a card where their tags are the same."""


def scalars(of: str, rows: Sequence[Any], metrics: Sequence[str], step: int, run: str = "", prefix: str = "") -> Runs:
    """Each metric of each row at the step; and one curve over all rows, in a run for each step: builds share its card.

    Metrics are columns with this prefix; only finite values.
    """
    names = _told_apart([row.name for row in rows])
    cells = [(metric, at, float(cell(row, f"{prefix}{metric}"))) for metric in metrics for at, row in enumerate(rows)]
    known = [each for each in cells if isfinite(each[-1])]
    return {
        run or of: [Event(f"{metric}/{names[at]}", step, value) for metric, at, value in known],
        f"{run or of}/step_{step}": [Event(f"along_the_graph/{of}/{metric}", at, value) for metric, at, value in known],
    }


def _told_apart(names: Sequence[str]) -> list[str]:
    """A value that is quantized in two ways has two rows with the same name."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = ordinal = seen.get(name, 0) + 1
        found.append(name if ordinal == 1 else f"{name} ({ordinal})")
    return found


def sides(rows: Sequence[Any], numbers: Sequence[str], step: int) -> Runs:
    """Columns such as ``ref_min`` and ``quant_min`` as the runs ``reference`` and ``quantized`` of one tag."""
    prefixes = {"reference": "ref_", "quantized": "quant_"}
    found = [scalars("layers", rows, numbers, step, run, prefix) for run, prefix in prefixes.items()]
    return {**found[0], **found[1]}


def pictures(drawn: Sequence[Drawing], step: int) -> list[Event]:
    """Charts of a report as pictures, both sides of a histogram in one; builds share their tags, without numbers."""
    names = _told_apart([each.title.partition(": ")[0] for each in drawn])
    return [Event(f"charts/{name}", step, each) for name, each in zip(names, drawn, strict=True)]
