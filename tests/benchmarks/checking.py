"""``check`` against ``quantize``, ``compare_weights`` against reading the weights, and verification against two runs.

Processor time, in a process of its own: what the first call in a process pays is part of it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Interpreter

import pt2qa
from pt2qa._simulator.graph_run import GraphRun
from tests.benchmarks.bars import Result
from tests.benchmarks.models import images, torchvision_model

CHECK_BAR = 1.0
"""In the time of ``quantize``, both as the first calls of a process."""
READS_BAR = 3.0
"""Reads of all weights that ``compare_weights`` takes, on the linears; one is a sum of the float values and a maximum
of the integers."""
VERIFY_BAR = 1.1
"""In the time of one run each of the two graphs, on the linears."""
MODELS = ("linears", "mobilenet_v2", "resnet50")
QUANTIZERS = ("xnnpack", "x86")
WIDTH, LAYERS = 2048, 10


class WholeOps(GraphRun):
    """A graph as torch runs it, each op on whole values: verification runs some of them in pieces, which is faster."""

    call_function = Interpreter.call_function


class Linears(nn.Module):
    """160 MiB of weights, and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return x


def measure_checking(rounds: int) -> list[Result]:
    """Each model with each quantizer in a process of its own."""
    results: list[Result] = []
    for model, quantizer in itertools.product(MODELS, QUANTIZERS):
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, model, quantizer, str(rounds)]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parents[2])
        check, again, reads, verify, first = map(float, said.stdout.split()[-5:])
        on_linears = model == "linears"
        name = f"{model}, {quantizer}"
        results += [
            Result(f"{name}: check with data / quantize", check, bar=CHECK_BAR),
            Result(f"{name}: the same again in the process", again),
            Result(f"{name}: compare_weights, reads of the weights", reads, "", READS_BAR if on_linears else None),
            Result(f"{name}: pair.verify / both graphs", verify, bar=VERIFY_BAR if on_linears else None),
            Result(f"{name}: verification in the first compare_layers / both graphs", first),
        ]
    return results


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _measure(name: str, quantizer: str, rounds: int) -> list[float]:
    torch.manual_seed(0)
    model = Linears().eval() if name == "linears" else torchvision_model(name)
    x = torch.randn(4, WIDTH) if name == "linears" else images()
    capture = pt2qa.capture(model, (x,))
    pairs: list[pt2qa.QuantizedPair] = []
    ratios = []
    for _ in range(2):
        took = _seconds(lambda: pairs.append(pt2qa.quantize(capture, quantizer, [(x,)], progress=False)))
        ratios.append(_seconds(lambda: pt2qa.check(pairs[-1], batches=[(x,)], progress=False)) / took)
    pair = pairs[-1]
    weights = [constant.reference for constant in pair.program.constants if constant.site is not None]
    integers = [weight.to(torch.int8) for weight in weights]

    def read() -> None:
        for weight, rounded in zip(weights, integers, strict=True):
            weight.sum()
            rounded.amax()

    def graphs() -> None:
        values = pair.values((x,))
        with torch.no_grad():
            for graph in (pair.quantized, pair.reference):
                WholeOps(graph).run(*values)

    best = dict.fromkeys(("read", "compare", "graphs", "verify", "first", "second"), float("inf"))
    for number in range(rounds):
        batch = (x + (number + 1) / 64,)  # a batch that was verified is not verified again
        other = (x - (number + 1) / 64,)
        functions: dict[str, Callable[[], object]] = {
            "read": read,
            "compare": lambda: pt2qa.compare_weights(pair),
            "graphs": graphs,
            "verify": lambda batch=batch: pair.verify(batch),  # type: ignore[misc]
            "first": lambda other=other: pt2qa.compare_layers(pair, [other], progress=False),  # type: ignore[misc]
            "second": lambda other=other: pt2qa.compare_layers(pair, [other], progress=False),  # type: ignore[misc]
        }
        for key, function in functions.items():
            best[key] = min(best[key], _seconds(function))
    verified = (best["first"] - best["second"]) / best["graphs"]
    return [*ratios, best["compare"] / best["read"], best["verify"] / best["graphs"], verified]


if __name__ == "__main__":
    print(*_measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
