"""A small report of every kind that files can hold, made from the kind's own fields."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from pt2qa._profile.histogram import CHANNELS, HISTOGRAM, Histogram, packed
from pt2qa._report.rows import Environment, columns_of, takes_custom
from pt2qa._report.storage import kinds
from pt2qa.report import Report

ROWS = 5

_CELLS = {"int": 1, "float": 0.5, "bool": True, "text": "int8", "shape": (2, 3), "names": ("a, b/relu", "c/relu")}


def samples() -> dict[str, Report]:
    """One report a kind, by the kind's name."""
    return {kind.kind: sample(kind) for kind in kinds()}


def sample(report_type: type[Report]) -> Report:
    """A report that any renderer takes: five rows in each table, one note, numbers that differ from row to row."""
    hints = get_type_hints(report_type)
    given = _special(report_type.__name__)
    all_ = fields(report_type)  # type: ignore[arg-type]
    needed = [f.name for f in all_ if f.default is MISSING or f.name in ("quantizer", "model", "batches", "samples")]
    return report_type(**{name: _value(name, hints[name]) for name in needed} | given)


def _value(name: str, hint: Any) -> Any:
    if hint is int:
        return 2
    if hint is float:
        return 1.5
    if hint is str:
        return name
    if hint is Environment:
        return Environment("2.13.0", "0.18.0", "1.4.1", "0.1.0", "3f2a")
    if hint == tuple[str, ...]:
        return ("größe", "second")
    if get_origin(hint) is dict:
        return {}
    return tuple(_row(get_args(hint)[0], number) for number in range(ROWS))


def _row(row_type: Any, number: int, **given: Any) -> Any:
    cells: dict[str, Any] = {}
    for column in columns_of(row_type):
        cells[column.name] = column.choices[number % len(column.choices)] if column.choices else _CELLS[column.type]
    cells |= {"name": f"blocks.{number}/conv2d"} if "name" in cells else {}
    cells |= {name: 20.0 + number for name in ("sqnr", "isolated_sqnr", "value", "quality") if name in cells}
    cells |= {"zero_point": 3.0} if "zero_point" in cells else {}
    if takes_custom(row_type):
        cells["custom"] = {"psnr": 1.5 + number, "a/b": 2.5}
    return row_type(**cells | given)


def _special(report: str) -> dict[str, Any]:
    """Fields that hang together."""
    if report == "Reconfiguration":
        return {"plan_json": "[]"}
    if report == "AnnotationReport":
        return {"basis": "annotated"}
    if report == "Profile":
        from pt2qa.report import ProfileRow

        values = [np.linspace(-1.0, 1.0 + number, 50) for number in range(ROWS)]
        counted = [Histogram.of(each) for each in values]
        rows = tuple(
            _row(ProfileRow, number, value=number, min=-1.0, max=1.0 + number, count=50, channels=0, nans=0, infs=0)
            for number in range(ROWS)
        )
        return {
            "rows": rows,
            "side": "quantized",
            "histograms": packed(HISTOGRAM, [(each.bins, each.counts) for each in counted]),
            "channels": packed(CHANNELS, [[np.full(3, 0.5)] * len(CHANNELS)] * ROWS),
        }
    if report == "BadCases":
        from pt2qa.report import CaseRow, Ranking, StoredCase

        leaf = {"tensor": 0, "dtype": "float32"}
        structure = {"dict": [["x", leaf], ["more", {"tuple": [{"tensor": 1, "dtype": "int64"}, {"value": 3}]}]]}
        return {
            "rows": tuple(CaseRow("sqnr", "output", n + 1, 8.25 + n, 0, n, n) for n in range(2)),
            "rankings": (Ranking("sqnr", "output", "smallest", 8, 21.5, 0, 0),),
            "cases": tuple(StoredCase(0, n, n, 1, json.dumps(structure)) for n in range(2)),
            "inputs": {
                f"0/{n}/{k}": np.ones((1, 4), dtype) for n in range(2) for k, dtype in enumerate((np.float32, np.int64))
            },
            "batch_axis": 0,
        }
    return {}
