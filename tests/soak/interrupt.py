"""Ctrl-C at any moment of ``pt2qa analyze``: exit code 130, no traceback, and what was finished is there and whole."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from pt2qa.errors import ReportError
from pt2qa.report import load
from tests.soak.figures import Outcome

FLOW = """
import torch
def flow():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
    batches = [torch.randn(4, 3, 8, 8) for _ in range(6)]
    return model.eval(), batches[0], batches
"""

OVER = "over before"
"""A run that was done when it should have been interrupted."""

LONGEST = 120
"""Seconds that a run may take."""


def interrupt(seconds: float, seed: int, *, count: int | None = None) -> Outcome:
    """Interrupt runs at moments spread over the time that one takes, until the seconds are over or so many are done."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as top:
        (Path(top) / "flow.py").write_text(FLOW, encoding="utf-8")
        begun = time.monotonic()
        whole = _run(top, "whole", None)
        length = time.monotonic() - begun
        if whole.returncode != 0:
            violations.append(f"a run that nobody interrupts: exit code {whole.returncode}: {whole.stderr[-300:]}")
        end, trial = begun + seconds, 0
        while trial < count if count is not None else time.monotonic() < end:
            after = chance.uniform(0.0, length)
            started = time.monotonic()
            outcome, problems = _judge(_run(top, str(trial), after), Path(top) / str(trial))
            if outcome == OVER:
                # The first run is slower than those that find its files in memory.
                length = min(length, time.monotonic() - started)
            counts["interrupts"] += 1
            counts[outcome] += 1
            violations += [f"interrupted after {after:.2f} s of {length:.2f}: {problem}" for problem in problems]
            trial += 1
    return Outcome("interrupted analyses", counts, violations)


def _run(top: str, name: str, after: float | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pt2qa", "analyze", f"{top}/flow.py:flow", "-q", "x86", "-o", f"{top}/{name}"]
    process = subprocess.Popen(
        [*command, "--bad-cases", "1", "--sensitivity"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_listening,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        out, err = process.communicate(timeout=LONGEST if after is None else after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _listening() -> None:
    # A parent that ignores Ctrl-C, as a shell has its background jobs do, hands that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _judge(done: subprocess.CompletedProcess[str], folder: Path) -> tuple[str, list[str]]:
    """How it ended, and what must not be."""
    problems = []
    files = sorted(folder.iterdir()) if folder.exists() else []
    for file in files:
        if file.suffix == ".tmp":
            problems.append(f"{file.name} was left behind")
        elif file.suffix == ".safetensors":
            try:
                load(file)
            except ReportError as error:
                problems.append(str(error))
    said = [line.removeprefix("wrote ") for line in done.stderr.splitlines() if line.startswith("wrote ")]
    problems += [f"{path} was written and is not there" for path in said if not Path(path).exists()]
    if done.returncode == 0:
        return OVER, problems
    begun = re.search(r'cli/program\.py", line \d+, in main\n', done.stderr)
    started = done.stderr.endswith("KeyboardInterrupt\n") and done.returncode in (1, -signal.SIGINT)
    if (started or (done.returncode, done.stderr) == (-signal.SIGINT, "")) and not begun:
        # Python's own start, in which nothing of pt2qa is loaded that could listen; at first not even Python does.
        return "before pt2qa began", problems
    if done.returncode != 130:
        problems.append(f"exit code {done.returncode}: {done.stderr[-300:]}")
    if "Traceback" in done.stderr:
        problems.append(f"a traceback: {done.stderr[-600:]}")
    return "exit code 130", problems
