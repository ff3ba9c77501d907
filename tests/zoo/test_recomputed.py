"""Every row of the layer table against an independent computation, on models that nobody here wrote.

``torch.fx.Interpreter`` runs the reference and the converted graph, sums are made in float64, and isolated values come
from the converted graph's own nodes on the reference graph's values.  Nothing of pt2qa's engine takes part, but for the
regions, which say what is run together.  The second batch has the strides of a picture that was read with its channels
last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F

import pt2qa
from tests.zoo import models
from tests.zoo.pairs import handle

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


class Recording(Interpreter):
    """Runs a graph and keeps a copy of every value as it was made."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[Node, Any] = {}

    def run_node(self, node: Node) -> Any:
        if node.target == "_guards_fn":
            return None
        result = super().run_node(node)
        self.values[node] = result.clone() if isinstance(result, Tensor) else result
        return result

    @classmethod
    def of(cls, graph: GraphModule, batch: Tensor) -> dict[Node, Any]:
        recording = cls(graph)
        with torch.no_grad():
            recording.run(batch, enable_io_processing=False)
        return recording.values


def is_quantization(node: Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.")


def by_handle(graph: GraphModule) -> dict[int, Node]:
    """The node of each handle; where an op became several, the last one."""
    found = {}
    for node in graph.graph.nodes:
        if node.op in ("call_function", "placeholder") and not is_quantization(node) and "custom" in node.meta:
            found[handle(node)] = node
    return found


class Recomputation:
    """All rows of a pair, from its two graphs."""

    def __init__(self, pair: pt2qa.QuantizedPair, rows: Iterable[pt2qa.LayerRow]) -> None:
        self.pair = pair
        self.reference, self.quantized = by_handle(pair.reference), by_handle(pair.quantized)
        handles = {name.name: number for number, name in pair.names.items()}
        self.region = {
            op: {self.quantized[handles[other]] for other in region.ops} for region in pair.regions for op in region.ops
        }
        self.columns = {(row.handle, row.observed_at, row.scale): Columns() for row in rows}

    def add(self, batch: Tensor) -> None:
        reference = Recording.of(self.pair.reference, batch)
        quantized = Recording.of(self.pair.quantized, batch)
        floats = {
            self.quantized[number]: reference[node]
            for number, node in self.reference.items()
            if number in self.quantized
        }
        for (number, observed_at, scale), columns in self.columns.items():
            op, ideal = self.quantized[number], reference[self.reference[number]]
            seen = op if observed_at == "raw" else self.dequantized(op, scale)
            columns.sqnr.add(ideal, quantized[seen])
            inside = self.region.get(self.pair.names[number].name, set())
            columns.isolated_sqnr.add(ideal, self.evaluated(seen, inside, floats, {}))
            columns.rounding_sqnr.add(ideal, self.evaluated(seen, set(), floats, {}))

    def dequantized(self, op: Node, scale: float) -> Node:
        """The dequantize node behind an op with this scale."""
        for quantize in op.users:
            if is_quantization(quantize) and (math.isnan(scale) or quantize.args[1] == scale):
                return next(iter(quantize.users))
        raise AssertionError(f"no site of scale {scale} reads {op}")

    def evaluated(self, node: Node, inside: set[Node], floats: dict[Node, Any], known: dict[Node, Any]) -> Any:
        """A node on the reference's values: nodes inside and quantization are run, all others are looked up."""
        if node not in known:
            if node.op == "get_attr":
                known[node] = functools.reduce(getattr, str(node.target).split("."), self.pair.quantized)
            elif node in floats and node not in inside:
                known[node] = floats[node]
            else:
                args, kwargs = torch.fx.map_arg(
                    (node.args, node.kwargs), lambda each: self.evaluated(each, inside, floats, known)
                )
                args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
                with torch.no_grad():
                    known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]


@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_every_row_agrees_with_an_independent_computation(name: str, quantizer: str) -> None:
    model, data = MODELS[name][0]()
    batches = list(data.split(1))
    if data.dim() == 4:
        batches[1] = batches[1][0].permute(1, 2, 0).contiguous().permute(2, 0, 1)[None]
    pair = pt2qa.quantize(pt2qa.capture(model, batches[0]), quantizer, batches, progress=False)
    report = pt2qa.compare_layers(pair, batches[:2], progress=False)
    again = Recomputation(pair, report.rows)
    for batch in batches[:2]:
        again.add(batch)
    assert len(report.rows) > 5
    for row in report.rows:
        columns = again.columns[row.handle, row.observed_at, row.scale]
        assert row.sqnr == pytest.approx(columns.sqnr.sqnr, abs=AGREE_DB, nan_ok=True), row.name
        if not math.isnan(row.isolated_sqnr):
            assert row.isolated_sqnr == pytest.approx(columns.isolated_sqnr.sqnr, abs=AGREE_DB), row.name
        if not math.isnan(row.rounding_sqnr):
            assert row.rounding_sqnr == pytest.approx(columns.rounding_sqnr.sqnr, abs=AGREE_DB), row.name
