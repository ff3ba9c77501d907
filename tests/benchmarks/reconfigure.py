"""``reconfigure`` against float forwards, on the pretrained MobileNetV2, without repairs."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import pt2qa
from pt2qa._reconfigure import analysis
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.layers import in_own_process
from tests.benchmarks.sensitivity import FORWARDS, PACKAGES, SAMPLES, float_forwards, make_pair

BAR = 25.0
"""In float forwards of the same pictures, beyond the sensitivities."""
WANTED: dict[str, dict[str, Any]] = {
    "22 dB": {"target": 22.0},
    "26 dB": {"target": 26.0},
    "a fifth of the MACs": {"budget": {"macs": 0.2}},
}


def measure_reconfigure() -> list[Result]:
    """The cost of a search, its two quantizations included; nothing where the models are missing."""
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        print(f"reconfigure not measured: {', '.join(missing)} missing, `make zoo` installs it", file=sys.stderr)
        return []
    found = in_own_process("tests.benchmarks.reconfigure")
    name = f"mobilenet_v2: reconfigure, {SAMPLES} pictures"
    return [Result(f"{name}, {what}, beyond sensitivities", found[what] / found["float"], bar=BAR) for what in WANTED]


def _measured() -> dict[str, float]:
    pair, batches = make_pair("mobilenet_v2")
    noises_of = analysis.noises_of
    spent = [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        made = noises_of(*args, **kwargs)
        spent.append(time.perf_counter() - start)
        return made

    analysis.noises_of = timed
    seconds = {"float": best_of(2, {"float": float_forwards(pair, batches)})["float"] / FORWARDS}
    for what, wanted in WANTED.items():
        start = time.perf_counter()
        pt2qa.reconfigure(pair, batches, repairs=(), verify_code=False, progress=False, **wanted)
        seconds[what] = time.perf_counter() - start - spent[-1]
    return seconds


if __name__ == "__main__":
    print(json.dumps(_measured()))
