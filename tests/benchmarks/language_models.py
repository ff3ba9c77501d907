"""Time and memory of a language model's analyses as its weights grow: Llama with random weights, XNNPACK dynamic."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import Dim

import pt2qa
from tests.benchmarks.bars import Result
from tests.benchmarks.layers import in_own_process, peak_resident, reset_peak, resident
from tests.zoo.language_models import Logits, language_model, prompts

SIZES = {"0.1": (640, 12), "0.3": (1024, 18), "1": (1792, 23)}
"""Billions of weights; width and blocks of Llama with 32,000 words."""

WORDS = 32_000
LENGTHS = (12, 7, 19)


def measure_language_models() -> list[Result]:
    """CPU seconds, and peak memory beyond the model, of each step; nothing where transformers is missing."""
    if find_spec("transformers") is None:
        print("language models not measured: transformers is missing, `make zoo` installs it", file=sys.stderr)
        return []
    results = []
    for size in SIZES:
        for what, value in in_own_process("tests.benchmarks.language_models", size).items():
            step, _, unit = what.rpartition(", ")
            results.append(Result(f"Llama, {size} B weights: {step}", value, unit))
    return results


def _measured(size: str) -> dict[str, float]:
    torch.set_num_threads(1)
    _steps(Logits(language_model("llama")).eval(), prompts(LENGTHS), {})  # imports all that is needed
    width, blocks = SIZES[size]
    model = Logits(language_model("llama", width=width, blocks=blocks, words=WORDS)).eval()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    found = {"weights, GB": weights / 1e9}
    _steps(model, prompts(LENGTHS, WORDS), found)
    return found


def _steps(model: torch.nn.Module, data: list[torch.Tensor], found: dict[str, float]) -> None:
    """Adds what each step took."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    before = _held()

    def step(name: str, function: Callable[[], Any]) -> Any:
        _held()
        reset_peak()
        start = _cpu_seconds()
        result = function()
        found[f"{name}, CPU s"] = _cpu_seconds() - start
        found[f"{name}: peak beyond the model, × the weights"] = (peak_resident() - before) / weights
        return result

    with torch.no_grad():
        step("one forward of each prompt", lambda: [model(prompt) for prompt in data])
    shapes = {"tokens": {1: Dim("length", min=2, max=32)}}
    capture = step("capture", lambda: pt2qa.capture(model, data[0], dynamic_shapes=shapes))
    pair = step("quantize", lambda: pt2qa.quantize(capture, "xnnpack:mode=dynamic", data, progress=False))
    found["after quantize: beyond the model, × the weights"] = (_held() - before) / weights
    step("compare_layers", lambda: pt2qa.compare_layers(pair, data, progress=False))
    step("sensitivity", lambda: pt2qa.sensitivity(pair, data, method="projection", projections=4, progress=False))
    target = pt2qa.compare_layers(pair, data, isolated=False, progress=False).sqnr + 6
    step("diagnose 6 dB", lambda: pt2qa.diagnose(pair, data, target=target, verify_code=False, progress=False))
    step("repair", lambda: pt2qa.repair(pair, data, verify_code=False, progress=False))
    step("reconfigure 6 dB", lambda: pt2qa.reconfigure(pair, data, target=target, verify_code=False, progress=False))


def _held() -> int:
    """Resident memory, without what Python's cycles and the C library would keep for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1])))
