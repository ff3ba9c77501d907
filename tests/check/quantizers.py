"""Quantizers that annotate what a test asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)

INT8 = QuantizationSpec(torch.int8, HistogramObserver, -128, 127, torch.per_tensor_affine)
UINT8 = QuantizationSpec(torch.uint8, HistogramObserver, 0, 255, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)
DYNAMIC = QuantizationSpec(torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True)
UNIT = FixedQParamsQuantizationSpec(torch.uint8, 1 / 256, 0, 0, 255, torch.per_tensor_affine)


class Annotates(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Annotates with a function from the ops of a graph, by fx name, to each op's inputs and output."""

    def __init__(self, annotate: Callable[[dict[str, Node]], dict[Node, tuple[dict[Node, Any], Any]]]) -> None:
        super().__init__()
        self._annotate = annotate

    def annotate(self, model: GraphModule) -> GraphModule:
        """Writes what the function gives; edits ``model``."""
        nodes = {node.name: node for node in model.graph.nodes}
        for node, (inputs, output) in self._annotate(nodes).items():
            node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, output, _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        """Everything is allowed."""


def every(op: str, inputs: Any, output: Any = None, weight: Any = None) -> Annotates:
    """Asks for the same at every op whose fx name begins with ``op``: activations, output, weight."""

    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, Any], Any]]:
        return {
            node: (
                {source: weight if source.op == "get_attr" else inputs for source in node.all_input_nodes[:2]}
                if node.all_input_nodes
                else {},
                output,
            )
            for name, node in nodes.items()
            if node.op == "call_function" and name.startswith(op)
        }

    return Annotates(annotate)
