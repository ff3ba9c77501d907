"""Small models that capture has to deal with, and what quantizers make of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2qa._capture.program import Capture, capture
from pt2qa._graph.handles import handle_of
from pt2qa._metrics import error_sums

IMAGE = (2, 3, 8, 8)
QUANTIZERS = ("x86", "xnnpack")


class Forward(nn.Module):
    """A module whose forward is a function of the module and one input, with the submodules that it needs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Residual(nn.Module):
    """Two convolutions with batch norm, one ReLU module called twice, an in-place add, pooling and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(x))
        y += x
        return self.fc(self.pool(self.relu(y)).flatten(1))


def image(batch: int = 2) -> Tensor:
    """Normal random pictures."""
    return torch.randn(batch, *IMAGE[1:])


def quantizer(name: str, *, qat: bool = False) -> Any:
    """torchao's own quantizer in its default static configuration."""
    if name == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=qat))
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    from pt2qa_xnnpack.regions import LeanXNNPACKQuantizer

    return LeanXNNPACKQuantizer().set_global(xnnpack.get_symmetric_quantization_config(is_qat=qat))


def prepared(graph: GraphModule, name: str, *batches: Any) -> GraphModule:
    """A graph after ``prepare_pt2e`` and calibration; ``graph`` is used up."""
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    result: GraphModule = prepare_pt2e(graph, quantizer(name))
    with torch.no_grad():
        for batch in batches:
            result(*(batch if isinstance(batch, tuple) else (batch,)))
    return result


def converted(graph: GraphModule, name: str, *batches: Any) -> GraphModule:
    """A graph after ``prepare_pt2e``, calibration and ``convert_pt2e``; ``graph`` is used up."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    result: GraphModule = convert_pt2e(prepared(graph, name, *batches))
    return result


def quantized_sqnr(captured: Capture, model: nn.Module, name: str, x: Tensor) -> float:
    """dB of the smallest output of the quantized graph, against the eager model."""
    graph = converted(captured.module(), name, x)
    with torch.no_grad():
        pairs = zip(torch.utils._pytree.tree_leaves(model(x)), torch.utils._pytree.tree_leaves(graph(x)), strict=True)
        return min(error_sums(reference, quantized).sqnr for reference, quantized in pairs)


def annotated(graph: GraphModule, name: str) -> list[tuple[int | None, str, int, bool]]:
    """What a quantizer annotates: handle, op, number of annotated inputs, and whether the output; uses ``graph`` up."""
    from torchao.quantization.pt2e.utils import _fuse_conv_bn_

    _fuse_conv_bn_(graph)
    torchao_quantizer = quantizer(name)
    graph = torchao_quantizer.transform_for_annotation(graph)
    torchao_quantizer.annotate(graph)
    found = []
    for node in graph.graph.nodes:
        annotation = node.meta.get("quantization_annotation")
        if node.op == "call_function" and annotation is not None and annotation._annotated:
            has_output = annotation.output_qspec is not None
            found.append((handle_of(node), str(node.target), len(annotation.input_qspec_map), has_output))
    return found


def annotated_names(model: nn.Module, x: Any, name: str, *, strict: bool = False) -> set[str]:
    """The names of the ops that a quantizer annotates in a captured model."""
    captured = capture(model, x, strict=strict)
    return {captured.names[handle].name for handle, *_ in annotated(captured.module(), name) if handle is not None}


def rules(captured: Capture) -> list[tuple[str, str]]:
    """Rule and name of each change."""
    return [(change.rule, change.name) for change in captured.changes]
