"""Small models that torch.export captures, and what a quantizer made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from pt2qa.plugins import QuantizerPlugin, modules_of, op_type

IMAGE = (2, 3, 8, 8)


class Block(nn.Module):
    """Convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.bn(self.conv(x)))
        return result


class Merge(nn.Module):
    """Adds, multiplies and concatenates."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x + y, x * y], 1)


class Net(nn.Module):
    """Two convolution blocks, a merge, a pool and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(3, 8), Block(8, 8)])
        self.merge = Merge()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scores: Tensor = self.head(self.pool(self.merge(x, self.blocks[1](x))))
        return scores


class Attention(nn.Module):
    """Two linears and the product of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.query(x), self.key(x).transpose(-1, -2))


@dataclass(frozen=True)
class Outcome:
    """A converted graph and how its values are quantized."""

    graph: GraphModule

    def inputs_of(self, name: str) -> list[str]:
        """How each tensor that the ops of a name, or of a module, take is quantized, in order of call."""
        return [how for node in self._calls(name) for how in map(_encoding, node.all_input_nodes)]

    def weights_of(self, name: str) -> list[str]:
        """How the weights of the convs and linears of a name, or of a module, are quantized."""
        return [_encoding(node.args[1]) for node in self._calls(name) if op_type(node) in ("conv2d", "linear")]

    def range_of(self, name: str) -> list[tuple[int, int]]:
        """Smallest and largest integer of the activations that the ops of a name or module take."""
        sources = [node.args[0] for node in self._calls(name)]
        return [tuple(source.args[3:5]) for source in sources if _encoding(source) != "float"]

    def _calls(self, name: str) -> list[Any]:
        compute = [n for n in self.graph.graph.nodes if n.op == "call_function" and "quant" not in str(n.target)]
        return [node for node in compute if name == op_type(node) or name in modules_of(node)]


def _encoding(node: Any) -> str:
    """How a value is stored: float, float16, tensor (one scale), channel (a scale each), dynamic."""
    target = str(node.target)
    if "convert_element_type" in target:
        return "float16"
    if "dequantize" not in target:
        return "float"
    return "channel" if "per_channel" in target else "dynamic" if target.endswith("tensor") else "tensor"


def export(model: nn.Module | None = None, shape: tuple[int, ...] = IMAGE, *, strict: bool = False) -> GraphModule:
    """The captured graph of a model in eval mode."""
    graph = torch.export.export((model or Net()).eval(), (torch.randn(shape),), strict=strict).module()
    assert isinstance(graph, GraphModule)
    return graph


def quantized(
    plugin: QuantizerPlugin,
    model: nn.Module | None = None,
    shape: tuple[int, ...] = IMAGE,
    *,
    qat: bool = False,
    strict: bool = False,
) -> Outcome:
    """Prepares, calibrates with one random batch and converts; the result has been run once."""
    model = (model or Net()).train(qat)
    example = torch.randn(shape)
    graph: Any = torch.export.export(model, (example,), strict=strict).module()
    prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, plugin.build(graph, qat=qat))
    prepared(example)
    converted = convert_pt2e(prepared)
    converted(example)
    return Outcome(converted)
