"""Start-up: what ``import pt2qa`` adds to ``import torch``, and how long ``pt2qa show`` takes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import pt2qa
from tests.benchmarks.bars import Result

IMPORT_BAR_MS = 50.0
SHOW_BAR_S = 1.0


def measure_startup(rounds: int) -> list[Result]:
    """Times in fresh processes, the best of some rounds."""
    code = "import torch, time; start = time.perf_counter(); import pt2qa; print(time.perf_counter() - start)"
    import_ms = min(float(_run([sys.executable, "-c", code])) for _ in range(rounds)) * 1e3
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "layers.safetensors")
        capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), (torch.randn(2, 4),))
        pair = pt2qa.quantize(capture, "xnnpack", [(torch.randn(2, 4),)], progress=False)
        pt2qa.compare_layers(pair, [(torch.randn(2, 4),)], progress=False).save(report)
        show = [sys.executable, "-c", "from pt2qa.cli import main; main()", "show", str(report)]
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            _run(show)
            seconds.append(time.perf_counter() - start)
    return [
        Result("import pt2qa, beyond import torch", import_ms, "ms", IMPORT_BAR_MS),
        Result("pt2qa show, whole process", min(seconds), "s", SHOW_BAR_S),
    ]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
