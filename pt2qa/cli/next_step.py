"""What to type after an analysis."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from math import floor, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt2qa.errors import ReportError

if TYPE_CHECKING:
    from pt2qa.cli.flow import Flow


def next_step(made: Mapping[str, Any], where: str, flow: Flow, spec: str, stem: Path) -> str:
    """The command that follows from the reports of one quantizer, or a sentence; empty without a diagnosis."""
    if "diagnosis" not in made:
        return ""
    diagnosis, searched = made["diagnosis"], made.get("reconfiguration")
    if searched is not None and searched.plan.edits:
        return _again(where, spec, stem, f"{stem}-plan.json")
    try:
        recipe = diagnosis.pair.recipe
    except ReportError:  # no remedy is for the quantizer or its data
        if diagnosis.search_target is not None:
            target = ("--target", f"{diagnosis.search_target:g}")
            return shlex.join(["pt2qa", "analyze", where, "-q", spec, *target, "-o", f"{stem.parent}-next"])
        if diagnosis.next_command or not isfinite(diagnosis.sqnr):
            return str(diagnosis.next_command)
        return shlex.join(
            ["pt2qa", "gate", f"{stem}-layers.safetensors", "--require", f"sqnr>={floor(diagnosis.sqnr)}"]
        )
    from pt2qa.plugins import describe

    plan = f"{stem}-diagnosis-plan.json" if diagnosis.plan_json else None
    command = _again(where, describe(recipe.plugin), stem, plan)
    if recipe.data is not None and recipe.data.batches is flow.batches:
        return command
    return f"add data like the evaluation data to the batches of {where}, then {command}"


def _again(where: str, spec: str, stem: Path, plan: str | None) -> str:
    overrides = () if plan is None else ("--overrides", plan)
    return shlex.join(["pt2qa", "analyze", where, "-q", spec, *overrides, "-o", f"{stem.parent}-next"])
