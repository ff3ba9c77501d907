"""XNNPACK's quantizer with a fault in what it annotates at the second linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, Quantizer, SharedQuantizationSpec

KEY = "quantization_annotation"


class Faulty(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """XNNPACK's quantizer, with another annotation at the second linear."""

    def __init__(self, fault: Callable[[Node], None]) -> None:
        self.own = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
        self.fault = fault

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return self.own.transform_for_annotation(model)  # type: ignore[no-any-return]

    def annotate(self, model: GraphModule) -> GraphModule:
        model = self.own.annotate(model)
        self.fault([node for node in model.graph.nodes if "linear" in str(node.target)][1])
        return model

    def validate(self, model: GraphModule) -> None:
        return None


def fixed(node: Node) -> None:
    node.meta[KEY].output_qspec = FixedQParamsQuantizationSpec(torch.int8, 1 / 256, 0, -128, 127)


def shared(node: Node) -> None:
    node.meta[KEY].output_qspec = SharedQuantizationSpec((node.args[0], node))  # type: ignore[arg-type]


def reduced(node: Node) -> None:
    node.meta[KEY].output_qspec = dataclasses.replace(node.meta[KEY].output_qspec, quant_min=-8, quant_max=7)


def coarse(node: Node) -> None:
    inputs = node.meta[KEY].input_qspec_map
    maker, scheme = MinMaxObserver.with_args(), torch.per_tensor_symmetric
    inputs[node.args[1]] = dataclasses.replace(
        inputs[node.args[1]], quant_min=-8, quant_max=7, qscheme=scheme, observer_or_fake_quant_ctr=maker, ch_axis=None
    )


FAULTS: tuple[Callable[[Node], None], ...] = (fixed, shared, reduced, coarse)
