"""Stock quantizers, and subclasses that each break one line of their backend's spec: check and conformance quote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import executorch.backends.xnnpack.quantizer.xnnpack_quantizer as xnnpack
import pytest
import torch
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, QuantizationAnnotation, QuantizationSpec
from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

import pt2qa
from pt2qa.plugins import describe, resolve, spec_of
from pt2qa.testing import ConformanceModel, check_quantizer

Change = Callable[[Node, QuantizationAnnotation], None]


class ChangedX86(x86.X86InductorQuantizer):  # type: ignore[misc]  # torchao is not typed
    """torchao's quantizer, whose annotations are changed."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self.set_global(x86.get_default_x86_inductor_quantization_config())
        self.change = change

    def annotate(self, model: GraphModule) -> GraphModule:
        return changed(super().annotate(model), self.change)


class ChangedXNNPACK(xnnpack.XNNPACKQuantizer):  # type: ignore[misc]  # ditto
    """ExecuTorch's quantizer, whose annotations are changed."""

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self.set_global(xnnpack.get_symmetric_quantization_config(is_per_channel=True))
        self.change = change

    def annotate(self, model: GraphModule) -> GraphModule:
        return changed(super().annotate(model), self.change)


def changed(model: GraphModule, change: Change | None) -> GraphModule:
    for node in model.graph.nodes:
        if change is not None and (annotation := node.meta.get("quantization_annotation")) is not None:
            change(node, annotation)
    return model


BACKENDS = {"x86": ChangedX86, "XNNPACK": ChangedXNNPACK}


def spec(dtype: torch.dtype, low: int, high: int, qscheme: torch.qscheme, axis: int | None = None) -> QuantizationSpec:
    observer = MinMaxObserver if axis is None else PerChannelMinMaxObserver
    return QuantizationSpec(dtype, observer, low, high, qscheme, axis)


def argument(op: str, index: int, wanted: QuantizationSpec) -> Change:
    """Another spec for an argument of an op."""

    def change(node: Node, annotation: QuantizationAnnotation) -> None:
        if str(node.target) == f"aten.{op}.default":
            annotation.input_qspec_map[node.args[index]] = wanted

    return change


def rounded_before_relu(node: Node, annotation: QuantizationAnnotation) -> None:
    if str(node.target) == "aten.conv2d.default":
        annotation.output_qspec = spec(torch.int8, -128, 127, torch.per_tensor_affine)


def cat_not_shared(node: Node, annotation: QuantizationAnnotation) -> None:
    if str(node.target) == "aten.cat.default":
        own = annotation.input_qspec_map[node.all_input_nodes[0]]
        annotation.input_qspec_map = dict.fromkeys(node.all_input_nodes, own)
        annotation.output_qspec = own


def dynamic_with_a_static_weight(node: Node, annotation: QuantizationAnnotation) -> None:
    if str(node.target) == "aten.linear.default":
        annotation.input_qspec_map[node.args[1]] = spec(torch.int8, -127, 127, torch.per_tensor_symmetric)
        own = annotation.input_qspec_map[node.args[0]]
        observer = PlaceholderObserver.with_args(is_dynamic=True)
        wanted = replace(own, observer_or_fake_quant_ctr=observer, is_dynamic=True, dtype=torch.int8)
        annotation.input_qspec_map[node.args[0]] = wanted


INT8 = spec(torch.int8, -127, 127, torch.per_channel_symmetric, 0)
FAULTS: dict[str, tuple[Change, dict[str, str]]] = {
    "weight per tensor, affine": (
        argument("conv2d", 1, spec(torch.int8, -128, 127, torch.per_tensor_affine)),
        dict.fromkeys(BACKENDS, "its weight is int8, per tensor, affine, -128..127"),
    ),
    "wrong axis": (
        argument("conv2d", 1, replace(INT8, ch_axis=1)),
        dict.fromkeys(BACKENDS, "its weight is int8, per channel (axis 1), symmetric, -127..127"),
    ),
    "weight reaches -128": (
        argument("linear", 1, replace(INT8, quant_min=-128)),
        {"XNNPACK": "its weight is int8, per channel (axis 0), symmetric, -128..127"},
    ),
    "weight in four bits": (
        argument("conv2d", 1, replace(INT8, quant_min=-8, quant_max=7)),
        dict.fromkeys(BACKENDS, "its weight is int8, per channel (axis 0), symmetric, -8..7"),
    ),
    "weight uint8": (
        argument("linear", 1, spec(torch.uint8, 0, 255, torch.per_tensor_symmetric)),
        dict.fromkeys(BACKENDS, "its weight is uint8, per tensor, symmetric, 0..255"),
    ),
    "bias": (
        argument("conv2d", 2, spec(torch.int8, -128, 127, torch.per_tensor_affine)),
        dict.fromkeys(BACKENDS, "its bias is int8, per tensor, affine, -128..127"),
    ),
    "int16 activations": (
        argument("conv2d", 0, spec(torch.int16, -32768, 32767, torch.per_tensor_affine)),
        dict.fromkeys(BACKENDS, "its input is int16, per tensor, affine, -32768..32767"),
    ),
    "uint8 symmetric activations": (
        argument("linear", 0, spec(torch.uint8, 0, 255, torch.per_tensor_symmetric)),
        {"XNNPACK": "its input is uint8, per tensor, symmetric, 0..255"},
    ),
    "activations per channel": (
        argument("linear", 0, spec(torch.uint8, 0, 255, torch.per_channel_affine, 1)),
        dict.fromkeys(BACKENDS, "its input is uint8, per channel (axis 1), affine, 0..255"),
    ),
    "rounded before the relu": (
        rounded_before_relu,
        dict.fromkeys(BACKENDS, "it is rounded before the relu"),
    ),
    "cat not shared": (cat_not_shared, dict.fromkeys(BACKENDS, "separate scales for its input")),
    "dynamic with a static weight": (
        dynamic_with_a_static_weight,
        dict.fromkeys(BACKENDS, "its weight is int8, per tensor, symmetric, -127..127"),
    ),
}
CASES = [(fault, backend) for fault, (_, backends) in FAULTS.items() for backend in backends]


class Net(nn.Module):
    """An op of each kind that a fault is planted in."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        return self.head(nn.functional.adaptive_avg_pool2d(joined, 1).flatten(1))


def images() -> tuple[Tensor]:
    return (torch.randn(2, 3, 8, 8),)


@pytest.fixture(scope="module")
def capture() -> pt2qa.Capture:
    return pt2qa.capture(Net().eval(), *images())


@pytest.mark.parametrize(("fault", "backend"), CASES)
def test_each_fault_is_found_and_the_line_quoted(capture: pt2qa.Capture, fault: str, backend: str) -> None:
    change, wanted = FAULTS[fault]
    rows = pt2qa.check(capture, quantizer=BACKENDS[backend](change), rules=["backend-spec"])
    assert any(wanted[backend] in row.why for row in rows)
    assert all(f'; the spec of {backend} says "' in row.why for row in rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["wrong axis", "cat not shared", "rounded before the relu"])
def test_conformance_finds_it_too(fault: str, backend: str) -> None:
    change, wanted = FAULTS[fault]
    model = ConformanceModel("net", "two branches", Net, images)
    made = lambda: BACKENDS[backend](change)  # noqa: E731
    (row,) = check_quantizer(made, models=[model], properties=["backend_spec"], progress=False).rows
    assert row.outcome == "failed"
    assert wanted[backend] in row.why


@pytest.mark.parametrize("backend", BACKENDS)
def test_stock_quantizers_are_clear(capture: pt2qa.Capture, backend: str) -> None:
    (outcome,) = pt2qa.check(capture, quantizer=BACKENDS[backend](), rules=["backend-spec"]).rules
    assert outcome.outcome == "clear"


def test_the_spec_is_no_option_in_the_name() -> None:
    assert describe(resolve(ChangedX86())) == "ChangedX86"


def test_a_composed_quantizer_has_the_spec_that_all_its_parts_have() -> None:
    parts = {backend: quantizer() for backend, quantizer in BACKENDS.items()}
    alike = spec_of(resolve(ComposableQuantizer([parts["x86"], ChangedX86()])))
    assert alike is not None
    assert alike.name == "x86"
    assert spec_of(resolve(ComposableQuantizer(list(parts.values())))) is None
    embeddings = EmbeddingQuantizer()  # of no backend
    beside = spec_of(resolve(ComposableQuantizer([embeddings, parts["XNNPACK"]])))
    assert beside is not None
    assert beside.name == "XNNPACK"
    assert spec_of(resolve(ComposableQuantizer([embeddings]))) is None
