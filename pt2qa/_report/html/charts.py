"""Charts of pages as data for the scripts; charts that read the section's tables do not repeat numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def bars(title: str, about: str, rows: Sequence[tuple[str, float, str]]) -> list[dict[str, Any]]:
    """A bar for each row; no chart without rows.

    Args:
        title: above the chart.
        about: below the title.
        rows: label, length, and the number as text.
    """
    drawn = [{"label": label, "value": value, "text": text} for label, value, text in rows]
    return [{"kind": "bars", "title": title, "about": about, "bars": drawn}] if drawn else []
