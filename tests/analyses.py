"""Every analysis of a pair, on a small model, for tests of what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pt2qa


class Net(nn.Module):
    """What has often been tied to the CPU: a scalar made in forward, a mask, in-place and reshaping ops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scaled, self.fc, self.head = nn.LayerNorm(128), nn.Linear(128, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.conv(x)).relu_(), 2, 2)
        mask = torch.arange(4, device=x.device) < 3
        x = torch.where(mask, x, torch.zeros((), device=x.device))
        return self.head(nn.functional.hardtanh(self.fc(self.scaled(x.flatten(1))), 0.0, 6.0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 8, 8, generator=generator) * (1 + number) for number in range(3)]


TARGETS = [torch.zeros(4, dtype=torch.int64)] * 3

ANALYSES: dict[str, Callable[[pt2qa.QuantizedPair, Any], Any]] = {
    "layers": lambda pair, data: pt2qa.compare_layers(pair, data, progress=False),
    "modules": lambda pair, data: pt2qa.compare_modules(pair, data, modules=["fc"], progress=False),
    "graphs": lambda pair, data: pt2qa.compare_graphs(pair.reference, pair.quantized, data),
    "weights": lambda pair, data: pt2qa.compare_weights(pair),
    "exact": lambda pair, data: pt2qa.sensitivity(pair, data, method="exact", metric="kl", progress=False),
    "projection": lambda pair, data: pt2qa.sensitivity(
        pair, data, method="projection", projections=4, progress=False
    ),
    "cases": lambda pair, data: pt2qa.find_bad_cases(
        pair, zip(data, TARGETS, strict=True), k=2, inputs_of=lambda item: item[0],
        targets_of=lambda item: item[1], progress=False,
    ),
    "profile": lambda pair, data: pt2qa.profile(pair, data, side="quantized", progress=False),
    "budget": lambda pair, data: pt2qa.error_budget(pair, data, progress=False),
    "check": lambda pair, data: pt2qa.check(pair, batches=data),
    "annotations": lambda pair, data: pt2qa.annotations(pair),
    "candidates": lambda pair, data: pt2qa.compare_quantizers(
        pair.capture,  # type: ignore[arg-type]
        {"own": pair, "dynamic": "xnnpack:mode=dynamic", "by tensor": "xnnpack:per_channel=false"},
        data,
        data,
    ),
    "diagnosis": lambda pair, data: pt2qa.diagnose(pair, data, progress=False),
    "reconfiguration": lambda pair, data: pt2qa.reconfigure(pair, data, target=45.0, progress=False),
    "repair": lambda pair, data: pt2qa.repair(
        pair, data, methods=["shifting", "equalization", "ranges", "rounding", "biases"], progress=False
    ),
    "x86": lambda pair, data: pt2qa.compare_layers(
        pt2qa.quantize(pair.capture, "x86", data, progress=False), data, progress=False  # type: ignore[arg-type]
    ),
    "as deployed": lambda pair, data: pt2qa.compare_layers(
        pt2qa.quantize(pair.capture, "xnnpack:mode=dynamic", data, progress=False).as_deployed(),  # type: ignore[arg-type]
        data,
        progress=False,
    ),
}  # fmt: skip
