"""Histograms of the reference's and the quantized model's values, on the grid of the integers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pt2qa._layers.report import LayerReport
from pt2qa._layers.text import ranked_by
from pt2qa._profile.report import Profile
from pt2qa._profile.rows import ProfileRow
from pt2qa._report.formats import decibel, number
from pt2qa.errors import ReportError

SHOWN: Final = 8
"""Layers whose histograms are shown, the worst first."""

BINS: Final = 160
"""Bins of one histogram at most."""

_FLOAT_SIDES: Final = frozenset({"reference", "float"})


def layer_histograms(report: LayerReport, profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """The outputs of the worst layers that profiles of this model hold.

    Bins are whole numbers of integer steps with their edges between two integers, so that the quantized values fall
    into all of them alike.

    Args:
        report: says which layers are the worst.
        profiles: of the reference, of the quantized model, or of both; others are left out.
    """
    mine = [each for each in profiles if each.histograms and _is_of(each, report)]
    reference = next((each for each in mine if each.side in _FLOAT_SIDES), None)
    quantized = next((each for each in mine if each.side == "quantized"), None)
    by = ranked_by(report.rows)
    charts = []
    for row in report.worst(len(report.rows), by):
        sides = {"reference": _output(reference, row.name), "quantized": _output(quantized, row.name)}
        found = {side: each for side, each in sides.items() if each is not None and isfinite(each.min + each.max)}
        if found:
            profile = {"reference": reference, "quantized": quantized}
            title = (
                f"{row.name}: {by.replace('_sqnr', '').replace('sqnr', 'cumulative')} {decibel(getattr(row, by))} dB"
            )
            charts.append(_chart(title, [(side, profile[side], each) for side, each in found.items()]))
        if len(charts) == SHOWN:
            break
    return charts


def _is_of(profile: Profile, report: LayerReport) -> bool:
    fingerprints = {profile.environment.fingerprint, report.environment.fingerprint} - {""}
    return profile.model == report.model and len(fingerprints) < 2 and profile.quantizer in {"", report.quantizer}


def _output(profile: Profile | None, name: str) -> ProfileRow | None:
    if profile is None:
        return None
    try:
        return profile.find(name)
    except ReportError:
        # A layer that one side lacks has no values there: it is drawn from the other side alone.
        return None


def _chart(title: str, sides: Sequence[tuple[str, Profile | None, ProfileRow]]) -> dict[str, Any]:
    low, high = min(row.min for _, _, row in sides), max(row.max for _, _, row in sides)
    grid = next((found for _, _, row in sides if (found := _grid(row)) is not None), None)
    edges = _equal_edges(low, high) if grid is None else _grid_edges(low, high, grid)
    series = [
        {"side": side, "counts": [round(float(count), 3) for count in profile.histogram(row, edges.tolist())[1]]}
        for side, profile, row in sides
        if profile is not None
    ]
    return {
        "kind": "histogram",
        "title": title,
        "about": ". ".join(f"{side}: {number(row.min)} to {number(row.max)}" for side, _, row in sides),
        "edges": edges.tolist(),
        "series": series,
        "grid": grid,
    }


def _grid(row: ProfileRow) -> dict[str, Any] | None:
    """The integers that a value is rounded to; None where it is not, or not on one even grid."""
    if not row.dtype.startswith(("int", "uint")) or not isfinite(row.scale) or not isfinite(row.zero_point):
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
