"""SIGKILL at any moment of a process that saves reports: each file is whole, and the next run leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from pt2qa.errors import ReportError
from pt2qa.report import LayerReport, WeightReport, load
from tests.soak.figures import Figures
from tests.soak.samples import sample

ROWS = 1000
"""Of a report that takes some milliseconds to write."""

LONGEST = 0.1
"""Seconds after which a process is killed at the latest."""


def kill(count: int, seed: int) -> Figures:
    """Kill so many processes, one after the other, that save reports to one folder."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    chance = random.Random(seed)
    layers, weights = sample(LayerReport), sample(WeightReport)
    reports = {
        "layers": replace(layers, rows=layers.rows * ROWS),
        "weights": replace(weights, rows=weights.rows * ROWS),
    }
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        for trial in range(count):
            child = os.fork()
            if not child:
                _save_for_ever(folder, reports)
            time.sleep(chance.uniform(0.0, LONGEST))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            counts["kills"] += 1
            left = [file for file in folder.iterdir() if file.suffix == ".tmp"]
            counts["files left half-written under another name"] += len(left)
            for file in folder.glob("*.safetensors"):
                try:
                    report = load(file)
                    counts["whole reports"] += 1
                    if len(report.rows) != len(reports[file.stem].rows):  # type: ignore[attr-defined]
                        violations.append(f"kill {trial}: {file.name} holds {len(report.rows)} rows")  # type: ignore[attr-defined]
                except ReportError as error:
                    violations.append(f"kill {trial}: {error}")
        for name, report in reports.items():
            report.save(folder / f"{name}.safetensors")
            report.to_csv(folder / f"{name}.csv")
        violations += [f"{file.name} was left behind" for file in folder.iterdir() if file.suffix == ".tmp"]
    return Figures("killed while saving", counts, violations)


def _save_for_ever(folder: Path, reports: dict[str, LayerReport | WeightReport]) -> None:
    while True:
        for name, report in reports.items():
            report.save(folder / f"{name}.safetensors")
            report.to_csv(folder / f"{name}.csv")
