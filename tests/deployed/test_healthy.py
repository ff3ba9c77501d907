"""Models of many kinds on XNNPACK: no op is accused, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from tests.models import KeywordInputs, Linears, NestedOutputs, Residual, images, randomize_batch_norms

X = images(4)


def block(inputs: int, outputs: int, activation: Callable[[], nn.Module], **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation())


class Detector(nn.Module):
    """Two scales, one of them upsampled and joined with the other; outputs in a dict of a list and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = block(3, 8, nn.ReLU), block(8, 16, nn.ReLU, stride=2)
        self.lateral, self.merged = nn.Conv2d(16, 8, 1), block(16, 8, nn.ReLU)
        self.boxes, self.scores, self.coarse_scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        up = F.interpolate(self.lateral(coarse), scale_factor=2.0, mode="nearest")
        merged = self.merged(torch.cat([fine, up], 1))
        return {"boxes": [self.boxes(merged)], "scores": (self.scores(merged).sigmoid(), self.coarse_scores(coarse))}


class Mobile(nn.Module):
    """hardswish, a depthwise convolution with ReLU6, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = block(3, 8, nn.Hardswish), block(8, 8, nn.ReLU6, groups=8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(self.depthwise(self.first(x))))


class Attention(nn.Module):
    """An embedding, two heads of attention on it, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.projections = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in self.projections[:3])
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        return self.projections[3](mixed) + x


class LSTM(nn.Module):
    """One layer of two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class TopK(nn.Module):
    """An op with two outputs, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x).topk(3)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batches: tuple[Any, ...] = (X,)
    quantizer: str = "xnnpack"
    capture: Mapping[str, Any] = field(default_factory=dict)
    values: int = 0
    """How many rows there are."""
    outputs: tuple[str, ...] = ("output",)


def batch(**limits: int) -> dict[str, Any]:
    return {"dynamic_shapes": {"x": {0: torch.export.Dim("batch", **limits)}}}


TOKENS = torch.arange(12).view(2, 6)
CASES = {
    "batch of one, per tensor": Case(Residual, (images(1),), "xnnpack:per_channel=false", values=6),
    "channels last": Case(Residual, (X.to(memory_format=torch.channels_last),), values=6),
    "any batch": Case(Residual, (X, images(7), images(2)), capture=batch(), values=6),
    "two dynamic dimensions": Case(
        Mobile,
        (X, torch.randn(3, 3, 8, 16)),
        capture={"dynamic_shapes": {"x": {0: torch.export.Dim("n", max=6), 3: torch.export.Dim("w", max=16)}}},
        values=6,
    ),
    "detector": Case(Detector, outputs=("output.boxes[0]", "output.scores[0]", "output.scores[1]"), values=11),
    "attention": Case(Attention, ((TOKENS,),), values=15),
    "lstm": Case(LSTM, (torch.randn(2, 2, 4),), capture={"decompose": ["lstm"]}, values=33),
    "dynamic": Case(Linears, (torch.randn(1, 16),), "xnnpack:mode=dynamic", values=2),
    "nested outputs": Case(
        NestedOutputs,
        (torch.randn(3, 16),),
        outputs=("output.logits", "output.rest[0]", "output.rest[1]", "output.rest[2]"),
        values=6,
    ),
    "topk": Case(TopK, (torch.randn(3, 16),), outputs=("output[0]", "output[1]"), values=2),
    "keyword": Case(KeywordInputs, ({"x": torch.randn(3, 16), "scale": torch.rand(3, 16)},), values=4),
}


SLOW = ("attention", "lstm", "two dynamic dimensions", "nested outputs", "keyword", "batch of one, per tensor")
"""Copies inside delegates cost further lowerings; the others have what is seen in shorter ones, too, at once."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo] if name in SLOW else []) for name in CASES]
)
def test_no_op_is_accused(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = randomize_batch_norms(case.model())
    first, keywords = case.batches[0], None
    if isinstance(first, dict):
        first, keywords = first["x"], {"scale": first["scale"]}
    capture = pt2qa.capture(model, first, keywords, **case.capture)
    pair = pt2qa.quantize(capture, case.quantizer, case.batches, progress=False)
    report = pt2qa.compare_deployed(pair, case.batches, progress=False)
    assert report.suspects == (), report.text()
    assert not [row for row in report.rows if row.note], report.text()
    assert report.stage in ("converted", "")
    assert len(report.rows) == case.values
    assert tuple(row.name for row in report.outputs) == case.outputs
    assert all(row.isolated_max_lsb <= 1 or row.isolated_sqnr > 100 for row in report.rows), report.table()
