"""Charts as plain series of numbers, for notebooks and matplotlib; pages draw them in the browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Final

from pt2qa._report.columns import cell

LONGEST: Final = 44
"""Letters of a name beside a chart."""


@dataclass(frozen=True, slots=True)
class Series:
    """What one colour shows; of a histogram, ``xs`` are the edges, one more than values; bars have none."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One chart.

    Args:
        kind: ``points``, ``bars``, ``histogram`` or ``heat``.
        x, y: titles of the axes; empty where labels say it.
        names: of the points, bars or rows of a heat map, in order; empty for numbers alone.
        texts: the number of each bar as text.
        series: what is drawn; those of bars lie end to end, those of a heat map are its columns.
        line: where a dashed line is; None without one.
        range: the values of the darkest and the lightest shade of a heat map; None for other charts.
    """

    kind: str
    title: str
    about: str
    x: str = ""
    y: str = ""
    names: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    series: tuple[Series, ...]
    line: float | None = None
    range: tuple[float, float] | None = None


def short(name: str) -> str:
    """A name as it is written beside a chart: of a longer one, its end, which tells ops apart."""
    return name if len(name) < LONGEST else f"…{name[2 - LONGEST :]}"


def drawings(report: Any, others: Sequence[Any] = ()) -> list[Drawing]:
    """The charts that a page shows of a report."""
    return [_drawing(report, chart) for chart in report.charts((report, *others)) if "row" not in chart]


def of_rows(report: Any) -> list[tuple[Any, Drawing]]:
    """The charts of single rows, each with its row."""
    charts = [chart for chart in report.charts((report,)) if "row" in chart]
    return [(getattr(report, chart["table"])[chart["row"]], _drawing(report, chart)) for chart in charts]


def _drawing(report: Any, chart: dict[str, Any]) -> Drawing:
    rows = getattr(report, chart.get("table", "rows"))
    return Drawing(title=chart["title"], about=chart["about"], **_DRAWN[chart["kind"]](rows, chart))


def _columns(rows: Sequence[Any], chart: dict[str, Any], xs: Sequence[float]) -> tuple[Series, ...]:
    return tuple(
        Series(label if len(chart["series"]) > 1 else "", tuple(xs), tuple(float(cell(row, key)) for row in rows))
        for key, label in chart["series"]
    )


def _along(rows: Sequence[Any], chart: dict[str, Any]) -> dict[str, Any]:
    series = _columns(rows, chart, range(len(rows)))
    names = tuple(row.name for row in rows)
    return {"kind": "points", "y": chart["unit"], "names": names, "series": series, "line": chart["line"]}


def _curve(rows: Sequence[Any], chart: dict[str, Any]) -> dict[str, Any]:
    xs = [100 * float(cell(row, chart["x"])) for row in rows]
    return {"kind": "points", "x": chart["x_title"], "series": _columns(rows, chart, xs)}


def _bars(rows: Sequence[Any], chart: dict[str, Any]) -> dict[str, Any]:
    bars = chart["bars"]
    parts = zip(*(bar.get("parts", [bar["value"]]) for bar in bars), strict=True)
    series = tuple(Series(label, (), tuple(part)) for label, part in zip(chart.get("series", [""]), parts, strict=True))
    names, texts = (tuple(bar[key] for bar in bars) for key in ("label", "text"))
    return {"kind": "bars", "names": names, "texts": texts, "series": series}


def _histogram(rows: Sequence[Any], chart: dict[str, Any]) -> dict[str, Any]:
    series = tuple(Series(each["side"], tuple(chart["edges"]), tuple(each["counts"])) for each in chart["series"])
    return {"kind": "histogram", "x": "value", "y": "values in a bin", "series": series}


def _heat(rows: Sequence[Any], chart: dict[str, Any]) -> dict[str, Any]:
    values = [
        [nan if place is None else float(cell(rows[place], chart["column"])) for place in places]
        for places in chart["places"]
    ]
    columns = zip(chart["blocks"], zip(*values, strict=True), strict=True)
    series = tuple(Series(label, (), tuple(column)) for label, column in columns)
    drawn = {"names": tuple(chart["ops"]), "series": series, "range": tuple(chart["range"])}
    return {"kind": "heat", "x": "block", "y": "dB", **drawn}


_DRAWN: Final[dict[str, Callable[[Sequence[Any], dict[str, Any]], dict[str, Any]]]] = {
    "along": _along,
    "curve": _curve,
    "bars": _bars,
    "histogram": _histogram,
    "heat": _heat,
}
