"""Charts of a layer report: SQNR along the graph, and histograms of values on the integer grid."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.blocks import heat_maps
from pt2qa._layers.rows import LayerRow
from pt2qa._report.base import Report
from pt2qa._report.charts import along
from pt2qa._report.formats import decibel, number
from pt2qa.errors import ReportError

_MEASURES: Final = (
    ("sqnr", "Cumulative SQNR", "Of each value against the reference, with all error up to here."),
    (
        "isolated_sqnr",
        "Isolated SQNR",
        "Of each op and the rounding of what it reads alone, on the reference's values.",
    ),
    ("rounding_sqnr", "Rounding SQNR", "Of the rounding of each output alone."),
)

SHOWN: Final = 8
"""Layers whose histograms are shown, the worst first."""

BINS: Final = 160
"""Maximum number of bins per histogram."""

_FLOAT_SIDES: Final = frozenset({"reference", "float"})


def along_graph(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    return [
        along(
            f"{title} along the graph",
            f"{about} Dashed: {LOW_SQNR:g} dB, 1 % noise. Identical values (inf) have no mark.",
            [(key, key)],
        )
        for key, title, about in _MEASURES
        if any(isfinite(getattr(row, key)) for row in rows)
    ]


def by_block(rows: Sequence[LayerRow], by: str) -> list[dict[str, Any]]:
    return heat_maps(rows, by, next(title for key, title, _ in _MEASURES if key == by))


def histograms(report: Any, worst: Sequence[LayerRow], by: str, others: Sequence[Report]) -> list[dict[str, Any]]:
    """Output histograms of the worst layers by a column, from profiles of this model among the other reports.

    Bins are whole numbers of integer steps with edges halfway between integers, so that quantized values spread evenly
    over the bins.
    """
    profiles: list[Any] = [each for each in others if each.kind == "profile"]
    mine = [each for each in profiles if each.histograms and _is_of(each, report)]
    sides = {
        "reference": next((each for each in mine if each.side in _FLOAT_SIDES), None),
        **{side: next((each for each in mine if each.side == side), None) for side in ("quantized", "deployed")},
    }
    what = by.replace("_sqnr", "").replace("sqnr", "cumulative")
    charts = []
    for row in worst:
        found = [(side, each, _output(each, row.name)) for side, each in sides.items() if each is not None]
        drawn = [(side, each, of) for side, each, of in found if of is not None and isfinite(of.min + of.max)]
        if drawn:
            charts.append(_chart(f"{row.name}: {what} {decibel(getattr(row, by))} dB", drawn))
        if len(charts) == SHOWN:
            break
    return charts


def _is_of(profile: Any, report: Any) -> bool:
    fingerprints = {profile.environment.fingerprint, report.environment.fingerprint} - {""}
    return profile.model == report.model and len(fingerprints) < 2 and profile.quantizer in {"", report.quantizer}


def _output(profile: Any, name: str) -> Any:
    try:
        return profile.find(name)
    except ReportError:
        # A layer missing on one side has no values there and is drawn from the other side alone.
        return None


def _chart(title: str, sides: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    low, high = min(row.min for _, _, row in sides), max(row.max for _, _, row in sides)
    grid = next((found for _, _, row in sides if (found := _grid(row, max(-low, high))) is not None), None)
    edges = _equal_edges(low, high) if grid is None else _grid_edges(low, high, grid)
    series = [
        {"side": side, "counts": [round(float(count), 3) for count in profile.histogram(row, edges.tolist())[1]]}
        for side, profile, row in sides
    ]
    return {
        "kind": "histogram",
        "title": title,
        "about": ". ".join(f"{side}: {number(row.min)} to {number(row.max)}" for side, _, row in sides),
        "edges": edges.tolist(),
        "series": series,
        "grid": grid,
    }


def _grid(row: Any, largest: float) -> dict[str, Any] | None:
    """The integer grid that a value is rounded to; None if there is none, it is not uniform, or too fine for values."""
    if not row.dtype.startswith(("int", "uint")) or not isfinite(row.scale) or not isfinite(row.zero_point):
        return None
    if row.scale <= 0 or not isfinite(largest / row.scale):
        return None
    try:
        limits = np.iinfo(row.dtype)
    except TypeError:
        return None  # int4 and the like, whose limits NumPy does not know
    grid = {"dtype": row.dtype, "scale": row.scale, "low": int(limits.min), "high": int(limits.max)}
    return {**grid, "zero_point": int(row.zero_point)}


def _grid_edges(low: float, high: float, grid: dict[str, Any]) -> npt.NDArray[np.float64]:
    scale, zero_point = grid["scale"], grid["zero_point"]
    first = min(grid["low"], int(np.floor(low / scale)) + zero_point)
    last = max(grid["high"], ceil(high / scale) + zero_point)
    step = ceil((last - first + 1) / BINS)
    integers: npt.NDArray[np.float64] = first + step * np.arange((last - first) // step + 2, dtype=np.float64)
    edges: npt.NDArray[np.float64] = (integers - 0.5 - zero_point) * scale
    return edges


def _equal_edges(low: float, high: float) -> npt.NDArray[np.float64]:
    return np.linspace(low, high, BINS // 2 + 1) if high > low else np.array([low - 0.5, low + 0.5])
