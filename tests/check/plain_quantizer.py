"""A quantizer that does what a test says, and graphs that it quantized without pt2qa."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

import pt2qa
from pt2qa._graph.handles import op_of

EPS = 2.0**-12
AFFINE = QuantizationSpec(
    torch.uint8, HistogramObserver.with_args(eps=EPS), 0, 255, torch.per_tensor_affine, is_dynamic=False
)
EXACT = QuantizationSpec(torch.uint8, MinMaxObserver.with_args(eps=EPS), 0, 255, torch.per_tensor_affine)
"""Keeps the smallest and the largest value, infinities too."""
SIGNED = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)


def per_channel(eps: float = EPS, axis: int = 0) -> QuantizationSpec:
    """One scale for each output channel."""
    observer = PerChannelMinMaxObserver.with_args(eps=eps)
    return QuantizationSpec(torch.int8, observer, -127, 127, torch.per_channel_symmetric, axis)


PER_TENSOR = QuantizationSpec(torch.int8, MinMaxObserver.with_args(eps=EPS), -127, 127, torch.per_tensor_symmetric)


class PlainQuantizer(Quantizer):  # type: ignore[misc]  # torchao is not typed
    """Rounds the inputs, weights and outputs of the ops of some kinds, each as it is told.

    Args:
        ops: kinds of op.
        inputs: for every input that is no weight.
        weights: for the weights of convolutions and linears.
        outputs: for the results; None for none.
        int32_bias: whether biases are rounded to steps of the input's scale times the weight's.
    """

    def __init__(
        self,
        ops: Sequence[str] = ("linear",),
        *,
        inputs: Any = AFFINE,
        weights: Any = PER_TENSOR,
        outputs: Any = None,
        int32_bias: bool = False,
    ) -> None:
        super().__init__()
        self.ops, self.inputs, self.weights, self.outputs, self.int32_bias = ops, inputs, weights, outputs, int32_bias

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and op_of(node.target) in self.ops:
                edges = {source: self._spec(node, source) for source in node.all_input_nodes}
                edges = {source: spec for source, spec in edges.items() if spec is not None}
                node.meta["quantization_annotation"] = QuantizationAnnotation(edges, self.outputs, _annotated=True)
        return model

    def _spec(self, node: Node, source: Node) -> Any:
        is_product = op_of(node.target).startswith(("conv", "linear"))
        if not is_product or source is node.args[0]:
            return self.inputs
        if source is node.args[1]:
            return self.weights
        derived = [(node.args[0], node), (node.args[1], node)]
        limits = torch.iinfo(torch.int32)
        return (
            DerivedQuantizationSpec(
                derived, _product_of_scales, torch.int32, limits.min, limits.max, torch.per_tensor_symmetric
            )
            if self.int32_bias
            else None
        )

    def validate(self, model: GraphModule) -> None:
        return None


def _product_of_scales(observers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    scale, other = (observer.calculate_qparams()[0] for observer in observers)
    return scale * other, torch.zeros(1, dtype=torch.int32)


def prepared(model: nn.Module, example: Any, quantizer: Any, batches: Sequence[Any] = ()) -> GraphModule:
    """A prepared graph after these batches."""
    graph = pt2qa.capture(model.eval(), example).module()
    result: GraphModule = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for batch in batches:
            result(*(batch if isinstance(batch, tuple) else (batch,)))
    return result


def foreign_pair(model: nn.Module, example: Any, quantizer: Any, batches: Sequence[Any] = ()) -> pt2qa.QuantizedPair:
    """A pair of graphs that were not made by ``pt2qa.quantize``: nothing is known but the graphs."""
    reference = pt2qa.capture(model.eval(), example).module()
    return pt2qa.pair(reference, convert_pt2e(prepared(model, example, quantizer, batches)))
