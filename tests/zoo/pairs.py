"""The models of the zoo, captured and quantized; each is made once in a test run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import pt2qa
from tests.zoo import models

QUANTIZERS = ("xnnpack", "x86")

MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mobilenet_v2": lambda: (models.mobilenet_v2(), models.pictures()),
    "efficientnet_lite0": lambda: (models.efficientnet_lite0(), models.pictures(models.LITE)),
    "resnet18": lambda: (models.healthy_resnet("resnet18"), models.pictures()[:8]),
    "resnet50": lambda: (models.healthy_resnet("resnet50"), models.pictures()[:8]),
    "digit_net": lambda: (models.digit_net(), models.digits()[0]),
    "speech_encoder": lambda: (models.speech_encoder(), models.utterances(24)),
}
_BATCH = {"mobilenet_v2": 10, "efficientnet_lite0": 10, "digit_net": 125}
_CALIBRATION = {"digit_net": 2, "speech_encoder": 2}
"""Batches that calibrate; all where a model is not named."""


@dataclass(frozen=True)
class Captured:
    """A model, its capture, and all its data in batches of the captured size."""

    model: nn.Module
    capture: pt2qa.Capture
    batches: tuple[Tensor, ...]


@functools.cache
def captured(name: str) -> Captured:
    """The model under a name of the table above."""
    model, data = MODELS[name]()
    batches = data.split(_BATCH.get(name, 8))
    return Captured(model, pt2qa.capture(model, (batches[0],)), batches)


@functools.cache
def pair_of(name: str, quantizer: str) -> pt2qa.QuantizedPair:
    """The model's pair."""
    made = captured(name)
    return pt2qa.quantize(made.capture, quantizer, made.batches[: _CALIBRATION.get(name)], progress=False)


@functools.cache
def layers_of(name: str, quantizer: str) -> pt2qa.LayerReport:
    """The layer report over all the model's data."""
    return pt2qa.compare_layers(pair_of(name, quantizer), captured(name).batches, progress=False)


def compute_rows(report: pt2qa.LayerReport) -> list[pt2qa.LayerRow]:
    """The rows of convs and linears."""
    return [row for row in report.rows if row.op in ("conv2d", "linear")]


def compute_nodes(graph: torch.fx.Graph) -> Iterator[Node]:
    """The convs and linears of a graph, told by their aten op."""
    ops = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
    return (node for node in graph.nodes if node.target in ops)


def handle(node: Node) -> int:
    """A node's handle, where torchao's flow keeps it."""
    return int(node.meta["custom"]["numeric_debug_handle"])


def decibels(reference: Any, quantized: Any) -> float:
    """SQNR of lists of tensors in float64: powers added up, then one ratio."""
    signal = sum(float((ref.double() ** 2).sum()) for ref in reference)
    noise = sum(
        float(((ref.double() - quant.double()) ** 2).sum()) for ref, quant in zip(reference, quantized, strict=True)
    )
    return float(10 * torch.tensor(signal / noise, dtype=torch.float64).log10())


class ComputeVisitor(Interpreter):
    """Runs a graph and shows each conv and linear with the values of its arguments and its result."""

    def __init__(self, graph: torch.fx.GraphModule, visit: Callable[[Node, tuple[Any, ...], Tensor], None]) -> None:
        super().__init__(graph)
        self._visit = visit
        self._shown = set(compute_nodes(graph.graph))

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node in self._shown:
            # convs read their input before any in-place op behind them writes
            self._visit(node, tuple(self.map_nodes_to_values(node.args, node)), result)
        return result

    def __call__(self, batch: Tensor) -> None:
        with torch.no_grad():
            self.run(batch, enable_io_processing=False)
