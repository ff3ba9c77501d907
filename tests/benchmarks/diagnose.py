"""``diagnose`` against float forwards, on the pretrained MobileNetV2."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

import pt2qa
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import quantize_again
from pt2qa._trials import judge
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.sensitivity import FORWARDS, PACKAGES, SAMPLES, float_forwards, make_pair

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
    return [
        Result(f"mobilenet_v2: diagnose, {SAMPLES} pictures", found["diagnose"], "s"),
        Result(f"mobilenet_v2: its {found['count']:g} quantizations", found["quantizations"], "s"),
        Result("mobilenet_v2: diagnose, the rest", found["rest"] / found["float"], bar=BAR),
        Result("mobilenet_v2: the structure check in it", found["check"] / found["float"]),
    ]


def _measured(rounds: int) -> dict[str, float]:
    pair, batches = make_pair("mobilenet_v2")
    capture = pair.capture
    assert capture is not None
    fresh = [pt2qa.quantize(capture, "xnnpack", batches, progress=False) for _ in range(rounds + 1)]
    spent, rests = [0.0], list[float]()
    count = 0

    def timed(*args: Any, **kwargs: Any) -> QuantizedPair:
        start = time.perf_counter()
        made = quantize_again(*args, **kwargs)
        spent[-1] += time.perf_counter() - start
        return made

    def diagnose() -> None:
        nonlocal count
        spent.append(0.0)
        start = time.perf_counter()
        count = pt2qa.diagnose(fresh.pop(), batches, verify_code=False, progress=False).quantizations
        rests.append(time.perf_counter() - start - spent[-1])

    judge.quantize_again = timed
    functions: dict[str, Any] = {
        "float": float_forwards(pair, batches),
        "diagnose": diagnose,
        "check": lambda: pt2qa.check(pair, progress=False),
    }
    seconds = best_of(rounds, functions)
    return {
        **seconds,
        "float": seconds["float"] / FORWARDS,
        "count": count,
        "quantizations": min(spent[1:]),
        "rest": min(rests),
    }


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]))))
