"""``diagnose`` against float forwards, on the pretrained MobileNetV2."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import torch

import pt2qa
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.sensitivity import FORWARDS, PACKAGES, SAMPLES, make_pair

BAR = 40.0
"""In float forwards of the same pictures, without the quantizations of free remedies."""


def measure_diagnose(rounds: int) -> list[Result]:
    """The cost of a diagnosis, in a process of its own; nothing where the models are missing."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        print(f"diagnose not measured: {', '.join(missing)} missing, `make zoo` installs it", file=sys.stderr)
        return []
    command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.diagnose", str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    rest = found["diagnose"] - found["quantizations"] * found["quantize"]
    return [
        Result(f"mobilenet_v2: diagnose, {SAMPLES} pictures", found["diagnose"], "s"),
        Result(f"mobilenet_v2: one of its {found['quantizations']:g} quantizations", found["quantize"], "s"),
        Result("mobilenet_v2: diagnose, the rest", rest / found["float"], bar=BAR),
        Result("mobilenet_v2: the structure check in it", found["check"] / found["float"]),
    ]


def _measured(rounds: int) -> dict[str, float]:
    pair, batches = make_pair("mobilenet_v2")
    float_graph, capture = pair.float_graph, pair.capture
    assert float_graph is not None
    assert capture is not None
    quantizations = 0

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(FORWARDS):
                for batch in batches:
                    float_graph(batch)

    def diagnose() -> None:
        nonlocal quantizations
        fresh = pt2qa.quantize(capture, "xnnpack", batches, progress=False)
        quantizations = pt2qa.diagnose(fresh, batches, verify_code=False, progress=False).quantizations + 1

    functions: dict[str, Any] = {
        "float": forwards,
        "diagnose": diagnose,
        "quantize": lambda: pt2qa.quantize(capture, "xnnpack", batches, progress=False),
        "check": lambda: pt2qa.check(pair, progress=False),
    }
    seconds = best_of(rounds, functions)
    return {**seconds, "float": seconds["float"] / FORWARDS, "quantizations": quantizations}


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]))))
