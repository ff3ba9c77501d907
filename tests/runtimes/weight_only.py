"""A quantizer of weights alone."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

SPEC = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=PerChannelMinMaxObserver,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
)


class WeightOnly(Quantizer):  # type: ignore[misc]
    """Eight-bit weights of linears, with a scale for each channel; inputs stay in float."""

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.meta["quantization_annotation"] = QuantizationAnnotation({node.args[1]: SPEC}, _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        pass
