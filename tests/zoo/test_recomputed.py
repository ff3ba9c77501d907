"""Every row of the layer table against an independent computation, on models that nobody here wrote.

The values are those of ``tests/recomputation.py``, and sums are made in float64.  The second batch has the strides of a
picture that was read with its channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from tests.recomputation import Recomputation, Values
from tests.zoo import models

pytestmark = pytest.mark.zoo

AGREE_DB = 1e-3


class Encoder(nn.Module):
    """A sentence encoder: embeddings with positions, self-attention with a padding mask, the mean of the tokens."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(500, width), nn.Embedding(32, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.queries = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mask = (ids != 0)[:, None, None, :]
        for number, (query, out, up, down) in enumerate(
            zip(self.queries, self.outs, self.ups, self.downs, strict=True)
        ):
            parts = query(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
            x = self.norms[2 * number](x + out(seen.transpose(1, 2).flatten(2)))
            x = self.norms[2 * number + 1](x + down(F.gelu(up(x))))
        return x.mean(1)


def sentences(count: int) -> Tensor:
    ids = torch.randint(1, 500, (count, 16), generator=torch.Generator().manual_seed(0))
    ids[:, 12:] = 0
    return ids


def small_pictures() -> Tensor:
    return F.interpolate(models.pictures()[:6], size=(64, 64), mode="bilinear", antialias=True)


def of_torchvision(name: str, **options: Any) -> Callable[[], tuple[nn.Module, Tensor]]:
    """A model with random weights and with the batch norm statistics of real pictures."""

    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = getattr(models.torchvision_models(), name)(weights=None, **options)
        data = small_pictures()
        for norm in (each for each in model.modules() if isinstance(each, nn.BatchNorm2d)):
            norm.momentum = None
        with torch.no_grad():
            model.train()(data)
        return model.eval(), data

    return make


def vision_transformer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    models.torchvision_models()
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    nn.init.normal_(model.heads[0].weight, std=0.1)
    return model.eval(), small_pictures()


def encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Encoder().eval(), sentences(6)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], tuple[str, ...]]] = {
    "mobilenet_v2": (lambda: (models.mobilenet_v2(), models.pictures()[:6]), ("xnnpack", "x86")),
    "efficientnet_lite0": (lambda: (models.efficientnet_lite0(), models.pictures(models.LITE)[:6]), ("xnnpack",)),
    "digit_net": (lambda: (models.digit_net(), models.digits()[0][:6]), ("xnnpack",)),
    "resnet18": (of_torchvision("resnet18"), ("xnnpack", "x86")),
    "googlenet": (of_torchvision("googlenet", aux_logits=False, init_weights=False), ("xnnpack",)),
    "mobilenet_v3_small": (of_torchvision("mobilenet_v3_small"), ("x86",)),
    "efficientnet_b0": (of_torchvision("efficientnet_b0"), ("x86",)),
    "squeezenet1_1": (of_torchvision("squeezenet1_1"), ("xnnpack",)),
    "shufflenet_v2_x0_5": (of_torchvision("shufflenet_v2_x0_5"), ("xnnpack",)),
    "mnasnet0_5": (of_torchvision("mnasnet0_5"), ("x86",)),
    "regnet_y_400mf": (of_torchvision("regnet_y_400mf"), ("xnnpack",)),
    "vision_transformer": (vision_transformer, ("xnnpack",)),
    "sentence_encoder": (encoder, ("xnnpack", "x86")),
}
CASES = [(name, quantizer) for name, (_, quantizers) in MODELS.items() for quantizer in quantizers]


@dataclass
class Sums:
    """Signal and noise of one column of one row."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, reference: Tensor, other: Tensor) -> None:
        reference, other = reference.double(), other.double()
        self.signal += float((reference**2).sum())
        self.noise += float(((reference - other) ** 2).sum())

    @property
    def sqnr(self) -> float:
        if not self.signal or not self.noise:
            return math.inf if self.signal or not self.noise else math.nan
        return 10 * math.log10(self.signal / self.noise)


@dataclass
class Columns:
    sqnr: Sums = field(default_factory=Sums)
    isolated_sqnr: Sums = field(default_factory=Sums)
    rounding_sqnr: Sums = field(default_factory=Sums)

    def add(self, values: Values) -> None:
        self.sqnr.add(values.reference, values.quantized)
        self.isolated_sqnr.add(values.reference, values.isolated)
        self.rounding_sqnr.add(values.reference, values.rounded)


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_every_row_agrees_with_an_independent_computation(name: str, quantizer: str) -> None:
    model, data = MODELS[name][0]()
    batches = list(data.split(1))
    if data.dim() == 4:
        batches[1] = batches[1][0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), quantizer, batches, progress=False)
    report = pt2qa.compare_layers(pair, batches[:2], progress=False)
    expected = [Columns() for _ in report.rows]
    for recomputed in (Recomputation(pair, batch) for batch in batches[:2]):
        for columns, row in zip(expected, report.rows, strict=True):
            columns.add(recomputed.of(row))
    assert len(report.rows) > 5
    for columns, row in zip(expected, report.rows, strict=True):
        assert row.sqnr == pytest.approx(columns.sqnr.sqnr, abs=AGREE_DB, nan_ok=True), row.name
        if not math.isnan(row.isolated_sqnr):
            assert row.isolated_sqnr == pytest.approx(columns.isolated_sqnr.sqnr, abs=AGREE_DB), row.name
        if not math.isnan(row.rounding_sqnr):
            assert row.rounding_sqnr == pytest.approx(columns.rounding_sqnr.sqnr, abs=AGREE_DB), row.name
