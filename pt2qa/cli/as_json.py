"""What a command found, as one JSON document: its reports, the files it wrote, and what to type next."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import click

from pt2qa import __version__


def found() -> dict[str, list[Any]]:
    """What the running command found so far."""
    empty: dict[str, list[Any]] = {"reports": [], "wrote": [], "next": []}
    document: dict[str, list[Any]] = click.get_current_context().meta.setdefault("pt2qa.found", empty)
    return document


def text_of(command: str, exit_code: int) -> str:
    """The document, in one line."""
    reports = [report_of(each) for each in found()["reports"]]
    document = {"pt2qa": __version__, "command": command, "exit_code": exit_code, **found(), "reports": reports}
    return json.dumps(plain(document), allow_nan=False)


def report_of(report: Any) -> dict[str, Any]:
    """A report, or a gate's result: its numbers, and all rows of its tables in graph order."""
    from pt2qa._report.columns import cell, tables_of
    from pt2qa._report.storage import kind_of

    if isinstance(report, dict):
        return report
    if not hasattr(report, "columns"):  # a gate keeps no file
        return {"kind": "gate", "numbers": {"passed": report.passed}, "tables": {"checks": report.checks}}
    kind = kind_of(report)
    return {
        "kind": kind.name,
        "schema": kind.schema,
        **{name: getattr(report, name, None) for name in ("model", "quantizer")},
        "summary": report.summary(),
        "numbers": {name: getattr(report, name) for name in report.numbers()},
        "tables": {
            part: [{each.name: cell(row, each.name) for each in report.columns(part)} for row in getattr(report, part)]
            for part in tables_of(type(report))
        },
    }


def plain(value: Any) -> Any:
    """A value as JSON has it: no number is null, infinities are ``"inf"`` and ``"-inf"``.

    >>> plain({"sqnr": float("nan"), "drop": float("-inf"), "shape": (2, 3)})
    {'sqnr': None, 'drop': '-inf', 'shape': [2, 3]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value if value is None or isinstance(value, str | int | bool) else str(value)
