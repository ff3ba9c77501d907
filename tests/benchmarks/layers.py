"""``compare_layers`` and the simulator against one float forward, and torchao's logger flow beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

import pt2qa
from pt2qa.cli.program import keep_freed_memory
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.models import images, torchvision_model

BARS = {"resnet50": (2.5, 3.8), "mobilenet_v2": (3.0, 5.0)}
"""Cumulative columns alone, and all columns, in float forwards, on one thread."""
SIMULATOR_BAR = {"resnet50": 1.3}
MEMORY_BAR = 1 / 8
"""Of what torchao's flow takes beyond the models themselves."""


def make_pair(model: str) -> pt2qa.QuantizedPair:
    capture = pt2qa.capture(torchvision_model(model), images())
    return pt2qa.quantize(capture, "xnnpack", [images()], progress=False)


def torchao_flow(pair: pt2qa.QuantizedPair, batch: torch.Tensor) -> Any:
    """torchao's numeric debugger, SQNR of every node: loggers in both graphs, one run each, then the comparison."""
    from torchao.quantization.pt2e import (
        compare_results,
        extract_results_from_loggers,
        prepare_for_propagation_comparison,
    )

    reference = prepare_for_propagation_comparison(pair.float_graph)
    quantized = prepare_for_propagation_comparison(pair.quantized)
    with torch.no_grad():
        reference(batch)
        quantized(batch)
    summary = compare_results(extract_results_from_loggers(reference), extract_results_from_loggers(quantized))
    return [[result.sqnr for result in entry.results] for entry in summary.values()]


def measure_times(model: str, rounds: int) -> list[Result]:
    """Ratios to one float forward of the captured graph, batch 8, on one thread, and as many threads as torch takes."""
    seconds = in_own_process(__name__, "times", model, str(rounds), threads=1)
    threaded = in_own_process(__name__, "times", model, str(rounds))
    kept = in_own_process(__name__, "kept", model, str(rounds))
    ratio = {name: value / seconds["float"] for name, value in seconds.items()}
    cumulative, everything = BARS[model]
    return [
        Result(f"{model}: float forward, batch 8, one thread", seconds["float"], "s"),
        Result(f"{model}: converted graph", ratio["converted"]),
        Result(f"{model}: simulator, all sites off", ratio["off"]),
        Result(f"{model}: simulator, all sites on", ratio["on"], bar=SIMULATOR_BAR.get(model)),
        Result(f"{model}: compare_layers, cumulative columns", ratio["cumulative"], bar=cumulative),
        Result(f"{model}: compare_layers, all columns", ratio["all"], bar=everything),
        Result(
            f"{model}: compare_layers, first call (bar: all columns and both graphs once)",
            ratio["first"],
            bar=ratio["all"] + ratio["converted"] + 1,
        ),
        Result(f"{model}: torchao's logger flow, SQNR alone", ratio["torchao"]),
        Result(f"{model}: float forward, all threads", threaded["float"], "s"),
        Result(f"{model}: compare_layers, cumulative columns, all threads", threaded["cumulative"] / threaded["float"]),
        Result(f"{model}: compare_layers, all columns, all threads", threaded["all"] / threaded["float"]),
        Result(f"{model}: all columns, memory kept as by the command / not", kept["all"] / threaded["all"]),
    ]


def _times(model: str, rounds: int) -> dict[str, float]:
    pair, batch = make_pair(model), images()
    values = pair.values(batch)
    pair.verify(batch)
    float_graph = pair.float_graph
    assert float_graph is not None

    def forward(graph: torch.fx.GraphModule) -> Any:
        with torch.no_grad():
            return graph(batch)

    def first_call() -> None:
        pair.graphs.accepted.clear()
        pt2qa.compare_layers(pair, [batch], progress=False)

    seconds = best_of(
        rounds,
        {
            "float": lambda: forward(float_graph),
            "converted": lambda: forward(pair.quantized),
            "off": lambda: pair.simulator.run(values, on=False),
            "on": lambda: pair.simulator.run(values, on=True),
            "cumulative": lambda: pt2qa.compare_layers(pair, [batch], isolated=False, progress=False),
            "all": lambda: pt2qa.compare_layers(pair, [batch], progress=False),
            "first": first_call,
        },
    )
    seconds |= best_of(1, {"torchao": lambda: torchao_flow(pair, batch)})
    return seconds


def measure_memory() -> list[Result]:
    """Peak resident memory beyond the pair's own, one batch of 8 through ResNet-50."""
    ours, theirs = (in_own_process(__name__, "memory", what)["peak"] for what in ("compare_layers", "torchao"))
    return [
        Result("resnet50: compare_layers, extra memory", ours, "GB"),
        Result("resnet50: torchao's logger flow, extra memory", theirs, "GB"),
        Result("resnet50: extra memory, compare_layers / torchao", ours / theirs, bar=MEMORY_BAR),
    ]


def in_own_process(module: str, *arguments: str, threads: int | None = None) -> dict[str, float]:
    """What a module prints for these arguments: nothing that ran before has warmed or split the process's memory."""
    environment = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _peak(what: str) -> dict[str, float]:
    pair, batch = make_pair("resnet50"), images()
    pt2qa.compare_layers(pair, [batch], progress=False)  # verifies, which runs the whole graphs
    with torch.no_grad():
        pair.reference(batch)
    reset_peak()
    before = resident()
    if what == "torchao":
        torchao_flow(pair, batch)
    else:
        pt2qa.compare_layers(pair, [batch], progress=False)
    return {"peak": (peak_resident() - before) / 1e9}


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


def resident() -> int:
    return _status("VmRSS")


def peak_resident() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    """Linux forgets the peak so far when 5 is written here."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


if __name__ == "__main__":
    kind, what, *more = sys.argv[1:]
    if kind == "kept":
        keep_freed_memory()
    print(json.dumps(_peak(what) if kind == "memory" else _times(what, int(more[0]))))
