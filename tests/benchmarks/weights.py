"""Memory beyond a model whose linear weights are nearly all of it, as multiples of these weights."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._graph.internals.allocator import return_freed_memory
from tests.benchmarks.bars import Result
from tests.benchmarks.layers import peak_resident, reset_peak, resident

KEPT_BAR = 0.5
"""After ``quantize``: the integers are 1/4, the cache of float weights 0.13 of 1 GB."""
PEAK_BAR = 0.9
"""During any analysis, what is kept included."""

WIDTHS = (512, 2048, 4096)
"""Weights of 1, 16 and 64 MB: below 32 MB, glibc keeps freed values in the heap unless told to return them."""

ANALYSES: dict[str, Callable[[pt2qa.QuantizedPair, Tensor], Any]] = {
    "verify": lambda pair, x: pair.verify(x),
    "compare_layers": lambda pair, x: pt2qa.compare_layers(pair, [x], progress=False),
    "sensitivity": lambda pair, x: pt2qa.sensitivity(pair, [x], progress=False),
    "sensitivity, exact": lambda pair, x: pt2qa.sensitivity(pair, [x], method="exact", progress=False),
    "find_bad_cases": lambda pair, x: pt2qa.find_bad_cases(pair, [x], progress=False),
    "compare_weights": lambda pair, x: pt2qa.compare_weights(pair),
    "check": lambda pair, x: pt2qa.check(pair, batches=[x], progress=False),
    "profile": lambda pair, x: pt2qa.profile(pair, [x], side="quantized", progress=False),
    "error_budget": lambda pair, x: pt2qa.error_budget(pair, [x], progress=False),
    "diagnose": lambda pair, x: pt2qa.diagnose(pair, [x], verify_code=False, progress=False),
    "repair": lambda pair, x: pt2qa.repair(pair, [x], verify_code=False, progress=False),
    "reconfigure": lambda pair, x: pt2qa.reconfigure(pair, [x], target=60, verify_code=False, progress=False),
}
"""Those that quantize again do not run the code that they print: it exports the model, with weights of its own."""


def measure_weights(gigabytes: float) -> list[Result]:
    """What stays after ``quantize``, and the peak of each analysis, each in a process of its own."""
    return [result for width in WIDTHS for result in _measured(width, round(gigabytes * 1e9 / (4 * width * width)))]


def _measured(width: int, layers: int) -> list[Result]:
    found = {name: measured(width, layers, [name]) for name in ANALYSES}
    weights = f"{layers} weights of {4e-6 * width * width:.0f} MB"
    kept = max(each["quantize"] for each in found.values())
    return [
        Result(f"{weights}: beyond the model after quantize", kept, bar=KEPT_BAR),
        *(Result(f"{weights}: peak of {name} beyond it", each[name], bar=PEAK_BAR) for name, each in found.items()),
    ]


def measured(
    width: int, layers: int, analyses: Sequence[str], weight_cache: int | None = None, *, in_use: bool = False
) -> dict[str, float]:
    """Bytes beyond a model after ``quantize``, and at the peak of each analysis, in bytes of its weights.

    ``in_use``: freed memory goes back to the system at once, so that what is resident is in use.  Otherwise what glibc
    keeps counts too, as in a user's process: of small models that is much of it.
    """
    own = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)} if in_use else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, json.dumps([width, layers, list(analyses), weight_cache])],
        env={**os.environ, **own},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _captured(width: int, layers: int) -> tuple[pt2qa.Capture, Tensor]:
    torch.manual_seed(0)
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
    x = torch.randn(8, width)
    return pt2qa.capture(nn.Sequential(*blocks).eval(), x), x


def _quantized(capture: pt2qa.Capture, x: Tensor, weight_cache: int | None) -> pt2qa.QuantizedPair:
    pair = pt2qa.quantize(capture, "xnnpack:per_channel=true", [x], progress=False)
    if weight_cache is not None:
        pair = dataclasses.replace(pair, weight_cache=weight_cache)
        pair.verify(x)
        return_freed_memory()  # of the cache that the pair had before
    return pair


def _measure(width: int, layers: int, analyses: Sequence[str], weight_cache: int | None) -> dict[str, float]:
    capture, x = _captured(16, 2)
    small = _quantized(capture, x, weight_cache)
    for name in analyses:
        ANALYSES[name](small, x)  # imports what it needs
    capture, x = _captured(width, layers)
    weights = 4 * width * width * layers

    def beyond(used: int) -> float:
        return (used - before) / weights

    gc.collect()
    before = resident()
    pair = _quantized(capture, x, weight_cache)
    gc.collect()
    found = {"quantize": beyond(resident())}
    for name in analyses:
        reset_peak()
        ANALYSES[name](pair, x)
        found[name] = beyond(peak_resident())
        gc.collect()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(*json.loads(sys.argv[1]))))
