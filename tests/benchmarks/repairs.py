"""``make bench-repair``: what each repair gives on data that nothing was fitted to, on pretrained models.

For each model and quantizer: as quantized (plain), with the fusions that the backend supports and the quantizer does
not annotate (fused), each repair of each of these, and the time of the repairs in float forwards of the same pictures.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

import torch
from tabulate import tabulate
from torch import Tensor

import pt2qa
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.methods import METHODS
from pt2qa.overrides import fusions
from tests.zoo import models

MODELS = ("mobilenet_v2", "efficientnet_lite0")
QUANTIZERS = ("xnnpack", "x86")
BATCH = 5
LEAST = -0.2
"""Bar: the change in dB on held-out data that no repair may fall below."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.repairs", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="these alone")
    parser.add_argument("--quantizer", action="append", choices=QUANTIZERS, help="these alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Sequence[object]] = []
    for model in arguments.model or MODELS:
        for quantizer in arguments.quantizer or QUANTIZERS:
            for row in measure(model, quantizer):
                rows.append(row)
                print(*row, file=sys.stderr, flush=True)
    headers = ["model", "quantizer", "plain", *METHODS, *(["all"] if len(METHODS) > 1 else []), "float forwards"]
    print(tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f"))
    lost = [row for row in rows if any(isinstance(each, float) and each < row[2] + LEAST for each in row[3:-1])]  # type: ignore[operator]
    return 1 if lost else 0


def measure(model: str, quantizer: str) -> list[Sequence[object]]:
    """A row as quantized and, if there is something to fuse, one with that."""
    pictures = models.pictures(models.LITE if model == "efficientnet_lite0" else models.TORCHVISION)
    calibration, held_out = (list(pictures[start::2].split(BATCH)) for start in (0, 1))
    capture = pt2qa.capture(getattr(models, model)(), (calibration[0],))
    plans: dict[str, pt2qa.OverridePlan | None] = {quantizer: None}
    if fused := fusions(capture, quantizer):
        plans[f"{quantizer}, fused"] = pt2qa.OverridePlan(fused)
    rows: list[Sequence[object]] = []
    for name, plan in plans.items():
        pair = pt2qa.quantize(capture, quantizer, calibration, overrides=plan, progress=False)
        forward = _seconds_of_forward(pair, calibration)
        found = []
        for methods in [[each] for each in METHODS] + ([None] if len(METHODS) > 1 else []):
            begun = time.process_time()
            report = pt2qa.repair(pair, held_out, methods=methods, verify_code=False, progress=False)
            cost = (time.process_time() - begun) / forward
            found.append({stage.name: stage.quality for stage in report.stages}["converted"])
        plain = {stage.name: stage.quality for stage in report.stages}["before"]
        rows.append((model, name, plain, *found, round(cost)))
    return rows


def _seconds_of_forward(pair: QuantizedPair, batches: list[Tensor]) -> float:
    """Processor time of the float graph on all batches, the best of three."""
    graph, best = pair.float_graph, float("inf")
    assert graph is not None
    with torch.no_grad():
        for _ in range(4):
            begun = time.process_time()
            for batch in batches:
                graph(batch)
            best = min(best, time.process_time() - begun)
    return best


if __name__ == "__main__":
    sys.exit(main())
