"""A quantizer that rounds the inputs and the output of every op, to reach kernels that no backend's quantizer uses."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

EPS: Final = {"eps": 2**-12}
ACTIVATION: Final = QuantizationSpec(
    torch.int8, MinMaxObserver.with_args(**EPS), -128, 127, torch.per_tensor_affine, is_dynamic=False
)
MOVES: Final = ("permute", "view", "reshape", "cat", "slice", "pad", "max_pool2d", "flatten")
"""Ops that keep the scale of what they read."""
FUSED: Final = ("relu", "hardtanh")
"""Rounded together with the op before, if that has weights or adds."""


class Everything(Quantizer):  # type: ignore[misc]
    """int8 in, int8 out, at every op; weights per channel or per tensor."""

    def __init__(self, per_channel: bool = True) -> None:
        super().__init__()
        self.per_channel = per_channel

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            inputs = {source: self._spec(node, source) for source in node.all_input_nodes if _is_float(source)}
            output: Any = ACTIVATION
            before = node.all_input_nodes[0]
            if _op(node) in FUSED and _starts_region(before):
                before.meta["quantization_annotation"].output_qspec = None
                inputs = {}
            elif _op(node) in MOVES:
                first = next(iter(inputs))
                shared = SharedQuantizationSpec((first, node))
                inputs = {source: ACTIVATION if source is first else shared for source in inputs}
                output = shared
            node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, output, _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to check."""

    def _spec(self, node: Node, source: Node) -> QuantizationSpec | None:
        if source.op != "get_attr":
            return ACTIVATION
        if node.args[1] is not source or _op(node) == "layer_norm":
            return None
        axis = 1 if _op(node).startswith("conv_transpose") else 0
        observer = PerChannelMinMaxObserver if self.per_channel else MinMaxObserver
        scheme = torch.per_channel_symmetric if self.per_channel else torch.per_tensor_symmetric
        return QuantizationSpec(
            torch.int8, observer.with_args(**EPS), -127, 127, scheme, axis if self.per_channel else None
        )


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _op(node: Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0].rstrip("_")


def _starts_region(node: Node) -> bool:
    return _op(node).startswith(("conv", "linear", "add"))
