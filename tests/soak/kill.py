"""SIGKILL at any moment of a process that saves reports: each file is whole, and the next run leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pt2qa.errors import ReportError
from pt2qa.report import LayerReport, Report, WeightReport, load
from tests.soak.figures import Outcome
from tests.soak.samples import sample

ROWS = 400
"""Of a report that takes some milliseconds to write."""


def kill(count: int, seed: int) -> Outcome:
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
        _save(folder, reports)
        begun = time.monotonic()
        _save(folder, reports)
        # As long as it takes to save everything once, so that every moment of it is met.
        longest = time.monotonic() - begun
        for trial in range(count):
            read, write = os.pipe()
            child = os.fork()
            while not child:
                os.write(write, b".")
                _save(folder, reports)
            os.read(read, 1)
            time.sleep(chance.uniform(0.0, longest))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)
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
        if counts["whole reports"] != count * len(reports):
            violations.append(f"{counts['whole reports']} whole reports, expected {count * len(reports)}")
        _save(folder, reports)
        violations += [f"{file.name} was left behind" for file in folder.iterdir() if file.suffix == ".tmp"]
    return Outcome("killed while saving", counts, violations)


def _save(folder: Path, reports: Mapping[str, Report]) -> None:
    for name, report in reports.items():
        report.save(folder / f"{name}.safetensors")
        report.to_csv(folder / f"{name}.csv")
