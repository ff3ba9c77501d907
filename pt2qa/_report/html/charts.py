"""What the page's charts show; they read the section's tables and hold no number twice."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, isnan
from typing import Any, Final

from pt2qa._candidates.report import CandidateReport
from pt2qa._layers.report import LayerReport
from pt2qa._layers.text import LOW_SQNR
from pt2qa._reconfigure.report import Reconfiguration
from pt2qa._report.formats import decibel, share
from pt2qa._report.prose import counted
from pt2qa._sensitivity.report import SensitivityReport

BARS: Final = 25
"""Sites that the sensitivity chart shows."""

_SERIES: Final = (
    ("sqnr", "cumulative"),
    ("isolated_sqnr", "isolated"),
    ("rounding_sqnr", "rounding"),
)


def along_graph(report: LayerReport) -> list[dict[str, Any]]:
    """SQNR of every layer in graph order; of columns that were measured."""
    series = [pair for pair in _SERIES if any(isfinite(getattr(row, pair[0])) for row in report.rows)]
    if not series:
        return []
    return [
        {
            "kind": "along",
            "title": "SQNR along the graph",
            "about": "Cumulative: all error up to here. Isolated: of the op and the rounding of what it reads alone, "
            "on the reference's values. "
            f"Rounding: of the output alone. Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark.",
            "table": "rows",
            "series": series,
            "line": LOW_SQNR,
        }
    ]


def sensitivity_bars(report: SensitivityReport) -> list[dict[str, Any]]:
    """The share of the output noise of the sites that cost most."""
    worst = sorted((row for row in report.rows if isfinite(row.noise_share)), key=lambda row: row.rank)[:BARS]
    title = "Share of the output noise, by site" if report.group == "site" else f"Share of the noise, by {report.group}"
    bars = [_bar(f"{row.name} ({row.kind})", row.noise_share, f"{share(row.noise_share)} %") for row in worst]
    return _bars(title, f"The {counted(len(worst), report.group)} that cost most.", bars)


def candidate_bars(report: CandidateReport) -> list[dict[str, Any]]:
    """The output SQNR of each candidate."""
    able = sorted((each for each in report.candidates if isfinite(each.sqnr)), key=lambda each: -each.sqnr)
    bars = [_bar(each.name, each.sqnr, f"{decibel(each.sqnr)} dB") for each in able]
    return _bars("Output SQNR of each candidate", "The best first.", bars)


def reconfiguration_curve(report: Reconfiguration) -> list[dict[str, Any]]:
    """Quality against the share of the arithmetic in float, as predicted and as measured."""
    if not any(isfinite(point.predicted) or isfinite(point.measured) for point in report.curve):
        return []
    return [
        {
            "kind": "curve",
            "title": "Quality against cost along the search",
            "about": f"Target: {report.target}. From left to right, one edit more at each point.",
            "table": "curve",
            "x": "macs",
            "x_title": "share of the multiply-accumulates in float, %",
            "series": [
                [column, label]
                for column, label in (("predicted", "predicted"), ("measured", "measured"))
                if not all(isnan(getattr(point, column)) for point in report.curve)
            ],
        }
    ]


def _bar(label: str, value: float, text: str) -> dict[str, Any]:
    return {"label": label, "value": value, "text": text}


def _bars(title: str, about: str, bars: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"kind": "bars", "title": title, "about": about, "bars": list(bars)}] if bars else []
