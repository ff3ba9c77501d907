"""A quantizer that annotates random edges and outputs with random specs; the same seed and graph give the same."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from pt2qa._graph.handles import op_of

LIMITS = {
    "int8": (torch.int8, -128, 127),
    "narrow int8": (torch.int8, -127, 127),
    "int4": (torch.int8, -8, 7),
    "uint8": (torch.uint8, 0, 255),
    "7 bits": (torch.uint8, 0, 127),
    "int16": (torch.int16, -32768, 32767),
}
WEIGHTED = ("linear", "conv1d", "conv2d", "conv_transpose2d")


class RandomQuantizer(Quantizer):  # type: ignore[misc]  # torchao is not typed
    """Annotates at random.

    Args:
        seed: of all that is random.
        whole_ops: ops are annotated with all their inputs and outputs, and weights by channel, as backends do it; else
            each edge and output is drawn by itself.
        plain: names of nodes that get no annotation.
    """

    def __init__(self, seed: int, *, whole_ops: bool = False, plain: Collection[str] = ()) -> None:
        super().__init__()
        self.seed, self.whole_ops, self.plain = seed, whole_ops, plain

    def annotate(self, model: GraphModule) -> GraphModule:
        style = random.Random(self.seed)
        self.density = style.choice((0.3, 0.6, 0.9))
        self.dtypes = [style.choice(list(LIMITS)) for _ in range(style.choice((1, 1, 2, 3)))]
        self.dynamic = style.random() < 0.15
        previous: Node | None = None
        for node in model.graph.nodes:
            if node.op != "call_function" or node.name in self.plain or not _is_float(node):
                continue
            chance = random.Random(f"{self.seed} {node.name}")
            if chance.random() > self.density and op_of(node.target) not in WEIGHTED:
                continue
            edges = {source: self._edge(node, source, chance) for source in node.all_input_nodes if _is_float(source)}
            edges = {source: spec for source, spec in edges.items() if spec is not None}
            output = None if self.dynamic else self._output(node, edges, previous, chance)
            node.meta["quantization_annotation"] = QuantizationAnnotation(edges, output, _annotated=True)
            if isinstance(output, QuantizationSpec):
                previous = node
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to check."""

    def _edge(self, node: Node, source: Node, chance: random.Random) -> Any:
        if not self.whole_ops and chance.random() < 0.3:
            return None
        is_product = op_of(node.target) in WEIGHTED
        if is_product and len(node.args) > 2 and source is node.args[2]:
            return self._bias(node, chance)
        if source.op == "get_attr" and (is_product or chance.random() < 0.5):
            return self._weight(node, source, chance)
        if self.dynamic:
            dtype, low, high = LIMITS[chance.choice(("int8", "uint8"))]
            observer = PlaceholderObserver.with_args(is_dynamic=True, eps=2**-12)
            return QuantizationSpec(dtype, observer, low, high, torch.per_tensor_affine, is_dynamic=True)
        first = next(iter(node.all_input_nodes))
        if source is not first and _is_float(first) and chance.random() < 0.2 and first.op != "get_attr":
            return SharedQuantizationSpec((first, node))
        return self._activation(source, chance)

    def _activation(self, source: Node, chance: random.Random) -> Any:
        dtype, low, high = LIMITS[chance.choice(self.dtypes)]
        symmetric = dtype != torch.uint8 and chance.random() < 0.4
        if not self.whole_ops and chance.random() < 0.1 and source.meta["val"].dim() > 1:
            scheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
            axis = chance.randrange(source.meta["val"].dim())
            return QuantizationSpec(dtype, PerChannelMinMaxObserver.with_args(eps=2**-12), low, high, scheme, axis)
        scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
        if chance.random() < 0.05:
            zero_point = 0 if symmetric else (low + high) // 2
            return FixedQParamsQuantizationSpec(dtype, 4 / (high - low), zero_point, low, high, scheme)
        kinds = (MinMaxObserver, MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)
        observer = chance.choice(kinds).with_args(eps=chance.choice((2**-12, 1e-7)))
        return QuantizationSpec(dtype, observer, low, high, scheme, is_dynamic=False)

    def _weight(self, node: Node, source: Node, chance: random.Random) -> Any:
        dtype, low, high = LIMITS[chance.choice(("int8", "narrow int8", "int4", "uint8", "int16"))]
        if chance.random() < 0.6 and source.meta["val"].dim() > 1:
            scheme = torch.per_channel_affine if dtype == torch.uint8 else torch.per_channel_symmetric
            axis = 1 if op_of(node.target).startswith("conv_transpose") else 0
            axis = axis if self.whole_ops else chance.randrange(source.meta["val"].dim())
            return QuantizationSpec(dtype, PerChannelMinMaxObserver.with_args(eps=2**-12), low, high, scheme, axis)
        scheme = torch.per_tensor_affine if dtype == torch.uint8 else torch.per_tensor_symmetric
        return QuantizationSpec(dtype, MinMaxObserver.with_args(eps=2**-12), low, high, scheme)

    def _bias(self, node: Node, chance: random.Random) -> Any:
        if self.dynamic or not self.whole_ops or chance.random() < 0.5:
            return None
        limits = torch.iinfo(torch.int32)
        return DerivedQuantizationSpec(
            [(node.args[0], node), (node.args[1], node)],
            _product_of_scales,
            torch.int32,
            limits.min,
            limits.max,
            torch.per_tensor_symmetric,
        )

    def _output(self, node: Node, edges: dict[Node, Any], previous: Node | None, chance: random.Random) -> Any:
        drawn = chance.random()
        if drawn < 0.4:
            return None
        specified = [source for source, spec in edges.items() if isinstance(spec, QuantizationSpec) and not
                     isinstance(spec, SharedQuantizationSpec) and source.op != "get_attr"]  # fmt: skip
        if drawn < 0.55 and specified:
            return SharedQuantizationSpec((specified[0], node))
        if drawn < 0.6 and previous is not None:
            return SharedQuantizationSpec(previous)
        return self._activation(node, chance)


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype == torch.float32


def _product_of_scales(observers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    scale, other = (observer.calculate_qparams()[0] for observer in observers)
    return (scale * other).reshape(-1)[:1], torch.zeros(1, dtype=torch.int32)
