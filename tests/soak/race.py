"""Two processes in one folder of :class:`pt2qa.QuantAnalysis`: no entry of the list gets lost, each file is whole.

``python -m tests.soak.race FOLDER ROUNDS NUMBER`` is one of the processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pt2qa.report import Findings, LayerReport, Report, SensitivityReport, WeightReport, load
from tests.soak.figures import Outcome
from tests.soak.samples import sample

PROCESSES = 2

WRITTEN: tuple[dict[str, type[Report]], ...] = (
    {"layers": LayerReport, "findings": Findings},
    {"weights": WeightReport, "sensitivity": SensitivityReport},
)
"""What each of the processes writes."""


def race(rounds: int) -> Outcome:
    """So many folders, in each of which two processes write at the same moment."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    with tempfile.TemporaryDirectory() as top:
        command = [sys.executable, "-m", "tests.soak.race", top, str(rounds)]
        processes = [
            subprocess.Popen([*command, str(number)], stderr=subprocess.DEVNULL) for number in range(PROCESSES)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            violations.append(f"a process ended with an error: exit codes {codes}")
        for number in range(rounds):
            folder = Path(top) / str(number)
            counts["folders"] += 1
            violations += [f"folder {number}: {problem}" for problem in _problems(folder)]
    return Outcome("two processes in a folder", counts, violations)


def _problems(folder: Path) -> list[str]:
    written = [what for each in WRITTEN for what in each]
    listed = json.loads((folder / "quant-analysis.json").read_text())
    problems = [f"{name} is not listed" for what in written for name in _names(what) if name not in listed]
    for file in folder.glob("*.safetensors"):
        load(file)
    expected = {"quant-analysis.json", *(name for what in written for name in _names(what))}
    found = {file.name for file in folder.iterdir()}
    return problems + [f"{name} should not be as it is" for name in sorted(found ^ expected)]


def _names(what: str) -> tuple[str, str, str]:
    return f"{what}.safetensors", f"{what}.txt", f"{what}.csv"


def _write(top: Path, rounds: int, number: int) -> None:
    """One of the processes: it waits until the others stand before the same folder."""
    from pt2qa import QuantAnalysis, QuantizedPair

    nothing: Any = None
    pair = QuantizedPair(reference=nothing, quantized=nothing, names={}, model="Net", quantizer="xnnpack")
    reports = {what: sample(kind) for what, kind in WRITTEN[number].items()}
    for each in range(rounds):
        (top / f"ready-{each}-{number}").touch()
        while not all((top / f"ready-{each}-{other}").exists() for other in range(PROCESSES)):
            time.sleep(0.0005)
        analysis = QuantAnalysis(pair, [], out_dir=top / str(each))
        for what, report in reports.items():
            analysis._written(what, lambda _, report=report: report)  # type: ignore[misc]


if __name__ == "__main__":
    _write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
