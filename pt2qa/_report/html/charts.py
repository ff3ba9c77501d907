"""Charts of pages as data for the scripts; charts that read the section's tables do not repeat numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pt2qa._decibels import LOW_SQNR


def bars(title: str, about: str, rows: Sequence[tuple[str, float, str]]) -> list[dict[str, Any]]:
    """A bar for each row; no chart without rows.

    Args:
        title: above the chart.
        about: below the title.
        rows: label, length, and the number as text.
    """
    drawn = [{"label": label, "value": value, "text": text} for label, value, text in rows]
    return [{"kind": "bars", "title": title, "about": about, "bars": drawn}] if drawn else []


def stacked(
    title: str, about: str, series: Sequence[str], rows: Sequence[tuple[str, Sequence[float], str]]
) -> list[dict[str, Any]]:
    """A bar for each row, made of parts; no chart without rows.

    Args:
        title: above the chart.
        about: below the title.
        series: what the parts are, in order.
        rows: label, the length of each part, and the whole as text.
    """
    drawn = [{"label": label, "value": sum(parts), "parts": list(parts), "text": text} for label, parts, text in rows]
    chart = {"kind": "bars", "title": title, "about": about, "series": list(series), "bars": drawn}
    return [chart] if drawn else []


def along(
    title: str, about: str, series: Sequence[tuple[str, str]], *, line: float = LOW_SQNR, unit: str = "dB"
) -> dict[str, Any]:
    """One quantity of each of the report's rows, in graph order.

    Args:
        title: above the chart.
        about: below the title.
        series: the columns, and what they are called.
        line: where a dashed line is drawn.
        unit: of all columns.
    """
    found = {"kind": "along", "title": title, "about": about, "table": "rows", "line": line, "unit": unit}
    return {**found, "series": [list(each) for each in series]}
