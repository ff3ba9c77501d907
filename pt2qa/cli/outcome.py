"""What a command leaves: its reports, files and what to type next, as one JSON document."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import floor, isfinite, isnan
from pathlib import Path
from typing import Any, Final

import click

from pt2qa import __version__
from pt2qa.errors import ReportError

_NEXT: Final[dict[str, tuple[str, ...]]] = {
    "annotations": ("pt2qa check {flow} -q {spec} --calibrate",),
    "check": ("pt2qa analyze {flow} -q {specs} -o reports", "pt2qa analyze {flow} -o reports"),
    "compare": ("pt2qa html {file} -o report.html", "pt2qa analyze {flow} -o reports"),
    "compare-graphs": (
        "pt2qa gate {file} --require 'sqnr>=60'",
        "pt2qa compare-graphs {a} {b} {flow} -o graphs.safetensors",
    ),
    "conformance": ("pt2qa show {file} --limit 0", "pt2qa conformance {quantizer} -o conformance.safetensors"),
    "deploy": (
        "pt2qa gate {runtimes} --require 'disagreements<=0'",
        "pt2qa gate {folder}/deployed.safetensors --require 'suspect_values<=0'",
    ),
    "diff": ("pt2qa gate {new} --baseline {old} --max-drop 1",),
    "gate": ("pt2qa show {report}",),
    "history": ("python -m webbrowser -t {page}", "pt2qa history {reports} --html history.html"),
    "html": ("python -m webbrowser -t {file}",),
    "init": ("pt2qa analyze {file} -o reports",),
    "new-plugin": ("pip install -e {folder}", "pip install -e {name}"),
    "merge": ("pt2qa html {file} -o report.html", "pt2qa merge {reports} -o merged.safetensors"),
    "profile": ("pt2qa analyze {flow} -q {spec} -o reports", "pt2qa analyze {flow} -o reports"),
    "quantizers": ("pt2qa analyze flow.py -o reports",),
    "reduce": ("python {folder}/part/run.py",),
    "record-inputs": ("pt2qa deploy --help",),
    "repair": (
        "pt2qa analyze {flow} -q {spec} --overrides {plan} -o reports",
        "pt2qa repair {flow} -q {spec} --plan plan.json",
    ),
    "sensitivity": ("pt2qa repair {flow} -q {spec} --plan plan.json",),
    "serve": ("pt2qa analyze {flow} -q {spec} --overrides plan.json -o reports",),
    "show": ("pt2qa html {report} -o report.html",),
}
"""By command, what follows: the first of which all parts were given."""


def found() -> dict[str, list[Any]]:
    """What the running command found so far."""
    empty: dict[str, list[Any]] = {"reports": [], "wrote": [], "next": []}
    meta = click.get_current_context().meta
    document: dict[str, list[Any]] = meta.setdefault("pt2qa.found", empty)
    return document


def text_of(command: str, exit_code: int) -> str:
    """The document, in one line."""
    reports = [report_of(each) for each in found()["reports"]]
    document = {"pt2qa": __version__, "command": command, "exit_code": exit_code, **found(), "reports": reports}
    return json.dumps(plain(document), allow_nan=False)


def report_of(report: Any) -> dict[str, Any]:
    """A report, or a gate's result: its numbers, and all rows of its tables in graph order."""
    from pt2qa._report.rows import cell, tables_of
    from pt2qa._report.storage import kind_of

    if isinstance(report, dict):
        return report
    if not hasattr(report, "columns"):  # a gate keeps no file
        return {"kind": "gate", "numbers": {"passed": report.passed}, "tables": {"checks": report.checks}}
    kind = kind_of(report)
    return {
        "kind": kind.kind,
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
        return value if isfinite(value) else None if isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return value if value is None or isinstance(value, str | int | bool) else str(value)


def following(command: str, given: Mapping[str, Any]) -> str:
    """What to type after a command with these arguments; empty where the command says so itself.

    >>> following("diff", {"old": "main.safetensors", "new": "a b.safetensors"})
    "pt2qa gate 'a b.safetensors' --baseline main.safetensors --max-drop 1"
    """
    lists = {name: value if isinstance(value, tuple) else (value,) for name, value in given.items() if value}
    texts = {name: shlex.join(map(str, value)) for name, value in lists.items()}
    for each in _NEXT.get(command, ()):
        try:
            return each.format_map(texts)
        except KeyError:
            continue  # one of its parts was not given
    return ""


def next_step(made: Mapping[str, Any], where: str, batches: Any, spec: str, stem: Path) -> tuple[str, str]:
    """The command that follows from the reports of one quantizer, and what to do before; empty without a diagnosis.

    ``batches`` are those that calibrate, in the flow ``where``.
    """
    if "diagnosis" not in made:
        return "", ""
    diagnosis, searched = made["diagnosis"], made.get("reconfiguration")
    if searched is not None and searched.plan.edits:
        return _again(where, spec, stem, f"{stem}-plan.json"), ""
    try:
        recipe = diagnosis.pair.recipe
    except ReportError:  # no remedy is for the quantizer or its data
        goal = "" if diagnosis.search_target is None else f"{diagnosis.search_target:g}"
        said = diagnosis.rows or diagnosis.asides
        if diagnosis.met == 1 and diagnosis.next_command and not said and isfinite(diagnosis.sqnr):
            goal = f"sqnr>={floor(diagnosis.sqnr) + 3}"  # with a target that is met, no remedy was measured
        if goal:
            target = ("--target", goal)
            return shlex.join(["pt2qa", "analyze", where, "-q", spec, *target, "-o", f"{stem.parent}-next"]), ""
        if diagnosis.next_command or not isfinite(diagnosis.sqnr):
            return _again(where, spec, stem, None), str(diagnosis.next_command)
        gate = ["pt2qa", "gate", f"{stem}-layers.safetensors", "--require", f"sqnr>={floor(diagnosis.sqnr)}"]
        return shlex.join(gate), ""
    from pt2qa.plugins import describe

    plan = f"{stem}-diagnosis-plan.json" if diagnosis.plan_json else None
    command = _again(where, describe(recipe.plugin), stem, plan)
    same = recipe.data is not None and recipe.data.batches is batches
    return command, "" if same else f"add data like the evaluation data to the batches of {where}"


def _again(where: str, spec: str, stem: Path, plan: str | None) -> str:
    overrides = () if plan is None else ("--overrides", plan)
    return shlex.join(["pt2qa", "analyze", where, "-q", spec, *overrides, "-o", f"{stem.parent}-next"])
