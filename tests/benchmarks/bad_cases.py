"""``find_bad_cases`` against the two forwards that it cannot do without: the simulator with all sites off and on."""

from __future__ import annotations

import json
import subprocess
import sys

import pt2qa
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.layers import make_pair
from tests.benchmarks.models import images

MODEL = "mobilenet_v2"
BAR = 1.15
"""In forwards of reference and simulator together."""
BATCHES = 4
METRICS = {"sqnr": "sqnr", "all metrics": ["sqnr", "cosine", "l1", "atol", "kl"]}


def measure_bad_cases(rounds: int) -> list[Result]:
    """Ratios to one reference and one quantized forward of each batch, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bad_cases", str(rounds)],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    forwards = seconds["off"] + seconds["on"]
    return [
        Result(f"{MODEL}: reference and simulator forward, batch 8", forwards / BATCHES, "s"),
        *(
            Result(f"{MODEL}: find_bad_cases, {name}, of both forwards", seconds[name] / forwards, bar=BAR)
            for name in METRICS
        ),
    ]


def _times(rounds: int) -> dict[str, float]:
    pair = make_pair(MODEL)
    batches = [images(seed) for seed in range(BATCHES)]
    values = [pair.values(batch) for batch in batches]
    pair.verify(batches[0])
    functions = {
        "off": lambda: [pair.simulator.run(each, on=False) for each in values],
        "on": lambda: [pair.simulator.run(each, on=True) for each in values],
    }
    for name, metric in METRICS.items():
        functions[name] = lambda metric=metric: [pt2qa.find_bad_cases(pair, batches, metric=metric, progress=False)]
    return best_of(rounds, functions)


if __name__ == "__main__":
    print(json.dumps(_times(int(sys.argv[1]))))
