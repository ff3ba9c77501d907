"""Two processes against one, with one thread each, on the same batches of the pretrained MobileNetV2."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import pt2qa
from tests.benchmarks.bars import Result
from tests.benchmarks.sensitivity import PACKAGES, make_pair

REPEATS = 2
"""How often the two batches of eight pictures are in the data."""


def measure_processes(rounds: int) -> list[Result]:
    """The share of the ideal speed-up that two processes reach; nothing where the models are missing."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        print(f"processes not measured: {', '.join(missing)} missing, `make zoo` installs it", file=sys.stderr)
        return []
    alone, together = (_seconds(size, rounds) for size in (1, 2))
    return [
        Result(f"mobilenet_v2: {name}, 2 processes", 100 * alone[name] / (2 * together[name]), "% efficiency")
        for name in alone
    ]


def _seconds(size: int, rounds: int) -> dict[str, float]:
    """The best time of each analysis, as the first of so many processes sees it."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.processes"]
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(store), str(rounds)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [worker.communicate()[0] for worker in workers]
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def _work(rank: int, size: int, store: str, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    pair, batches = make_pair("mobilenet_v2")
    mine = (list(batches) * REPEATS)[rank::size]
    analyses = {
        "compare_layers": lambda: pt2qa.compare_layers(pair, mine, progress=False),
        "sensitivity": lambda: pt2qa.sensitivity(pair, mine, method="projection", projections=4, progress=False),
    }
    best = dict.fromkeys(analyses, float("inf"))
    with pt2qa.distributed():
        for _ in range(rounds + 1):
            for name, analysis in analyses.items():
                dist.barrier()
                start = time.perf_counter()
                analysis()
                best[name] = min(best[name], time.perf_counter() - start)
    dist.destroy_process_group()
    return best


if __name__ == "__main__":
    first, second, where, count = sys.argv[1:]
    print(json.dumps(_work(int(first), int(second), where, int(count))))
