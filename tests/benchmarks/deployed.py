"""``compare_deployed`` on MobileNetV2 with XNNPACK: what it takes beyond lowering, and what lowering takes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

import pt2qa
from pt2qa._deployed.comparison import Stages
from pt2qa_xnnpack import PLUGIN
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.layers import in_own_process, make_pair, peak_resident, reset_peak, resident
from tests.benchmarks.models import images

BAR = 6.0
"""Float forwards for each further batch of 8: three runs inside of kernels and graphs, the stages before, the sums."""

LOWERINGS = 1.5
"""Plain lowerings for one batch beyond the one that is needed anyway: another with the values inside as outputs."""


def measure_deployed(rounds: int) -> list[Result]:
    """Ratios to one float forward of the captured graph, batch 8; lowering in seconds."""
    found = in_own_process("tests.benchmarks.deployed", str(rounds))
    float_forward, name = found["float"], "mobilenet_v2: compare_deployed"
    further = (found["three"] - found["one"]) / 2
    return [
        Result(f"{name}, lowering twice", found["lowering"], "s"),
        Result(f"{name}, one batch, beyond a plain lowering", found["first"] / found["plain"] - 1, bar=LOWERINGS),
        Result(f"{name}, a process of its own, beyond that", found["apart"], "s"),
        Result(f"{name}, deployed program alone", found["program"] / float_forward),
        Result(f"{name}, the model and its program alone", found["before"] / float_forward),
        Result(f"{name}, each further batch", further / float_forward, bar=BAR),
        Result(f"{name}, one batch on a saved program, checks included", found["one"] / float_forward),
        Result(f"{name}, extra memory, lowering excluded", found["peak"], "GB"),
    ]


def _measured(rounds: int) -> dict[str, float]:
    pair, batch = make_pair("mobilenet_v2"), images()
    float_graph = pair.float_graph
    assert float_graph is not None

    def forward() -> None:
        with torch.no_grad():
            float_graph(batch)

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "program"

        def compare(count: int) -> pt2qa.DeployedReport:
            return pt2qa.compare_deployed(pair, [batch] * count, program=folder, progress=False)

        def lower() -> None:
            with torch.no_grad():
                exported = torch.export.export(pair.quantized, (batch,))
            to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()

        alone = {
            "plain": lower,
            "first": lambda: pt2qa.compare_deployed(pair, [batch], progress=False),
            "apart": lambda: pt2qa.compare_deployed(pair, [batch], apart=True, progress=False),
        }
        taken = best_of(1, alone)
        compare(1)
        program = PLUGIN.backend.load(folder)
        values, stages = pair.values(batch), Stages(pair)
        functions = {
            "float": forward,
            "before": lambda: stages.before(batch, values),
            "program": lambda: program.run(values),
            "one": lambda: compare(1),
            "three": lambda: compare(3),
        }
        seconds = best_of(rounds, functions)
        reset_peak()
        before = resident()
        compare(2)
        return {
            **seconds,
            **taken,
            "lowering": taken["first"] - seconds["one"],
            "apart": taken["apart"] - taken["first"],
            "peak": (peak_resident() - before) / 1e9,
        }


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]))))
