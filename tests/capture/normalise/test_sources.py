from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional as F

from pt2qa import capture
from pt2qa._capture.changes import Change
from tests.capture.models import (
    Forward,
    Residual,
    annotated,
    annotated_names,
    image,
    prepared,
    quantized_sqnr,
    quantizer,
    rules,
)


class MyConv(nn.Conv2d):
    """A subclass with a forward of its own, as "same" padding is often written."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=1)


class MyLinear(nn.Linear):
    """A subclass that changes nothing."""


def subclasses() -> nn.Module:
    return Forward(lambda m, x: m.fc(F.relu(m.conv(x)).mean((2, 3))), conv=MyConv(3, 4, 3), fc=MyLinear(4, 2))


def functions() -> nn.Module:
    weights = {"w": nn.Parameter(torch.randn(4, 3, 3, 3)), "v": nn.Parameter(torch.randn(2, 4))}
    return Forward(lambda m, x: F.linear(F.relu(F.conv2d(x, m.w)).mean((2, 3)), m.v), **weights)


def shared_relu() -> nn.Module:
    return Forward(lambda m, x: m.relu(m.b(m.relu(m.a(x)))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 4, 3), relu=nn.ReLU())


def shared_conv() -> nn.Module:
    return Forward(lambda m, x: m.conv(m.conv(x)), conv=nn.Conv2d(3, 3, 3))


def shared_pool() -> nn.Module:
    convs = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(4, 4, 1)}
    return Forward(lambda m, x: m.pool(m.b(m.pool(m.a(x)))), pool=nn.AdaptiveAvgPool2d(2), **convs)


def attention() -> nn.Module:
    return Forward(lambda m, x: m.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(8, 2))


# XNNPACK finds most ops by what they compute, so two models are enough for it; x86 matches sources everywhere.
MODELS = [(make, "x86") for make in (Residual, subclasses, functions, shared_relu, shared_conv, shared_pool)]
MODELS += [(Residual, "xnnpack"), (shared_pool, "xnnpack")]


@pytest.mark.parametrize(("make", "name"), MODELS)
def test_both_modes_annotate_the_same_ops_traps_14_and_28(make: Any, name: str) -> None:
    model, x = make(), image()
    found = [annotated(capture(model, x, strict=strict).module(), name) for strict in (False, True)]
    assert found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("strict", [False, True])
def test_qat_annotates_what_it_annotates_of_a_strict_export(strict: bool) -> None:
    model, x = Residual(), image()
    graphs = (capture(model, x, strict=strict).module(), export(model, (x,), strict=True).module(check_guards=False))
    found = []
    for graph in graphs:
        quantizer("x86", qat=True).annotate(graph)
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.append([str(node.target) for node in nodes if "quantization_annotation" in node.meta])
    assert found[0] == found[1]
    assert "aten.batch_norm.default" in found[0]


def test_without_capture_a_shared_relu_stops_x86_trap_14() -> None:
    with pytest.raises(ValueError, match="more than one output node"):
        prepared(export(shared_relu(), (image(),)).module(check_guards=False), "x86")


def test_a_shared_relu_is_matched_call_by_call_trap_14() -> None:
    captured = capture(shared_relu(), image())
    assert Change("shared module", "relu", "its 2 calls of relu are matched one by one") in captured.changes
    assert annotated_names(shared_relu(), image(), "x86") == {"a/conv2d", "b/conv2d", "relu/relu", "relu/relu_1"}


def test_without_capture_x86_leaves_subclasses_and_functions_float_trap_28() -> None:
    for make in (subclasses, functions):
        assert annotated(export(make(), (image(),)).module(check_guards=False), "x86") == []


def test_subclasses_are_matched_by_what_they_compute_trap_28() -> None:
    assert annotated_names(subclasses(), image(), "x86") == {"conv/conv2d", "relu", "fc/linear"}
    captured = capture(subclasses(), image())
    assert Change("op source", "conv/conv2d", "matched as Conv2d; its caller is MyConv") in captured.changes
    assert quantized_sqnr(captured, captured.module(), "x86", image()) > 20


def test_functions_are_matched_by_what_they_compute_trap_28() -> None:
    assert annotated_names(functions(), image(), "x86") == {"conv2d", "relu", "linear"}


def test_every_call_of_a_shared_pool_is_annotated_by_xnnpack_trap_14() -> None:
    names = annotated_names(shared_pool(), image(), "xnnpack")
    assert {"pool/adaptive_avg_pool2d", "pool/adaptive_avg_pool2d_1"} <= names


@pytest.mark.parametrize("strict", [False, True])
def test_conv_plus_number_is_no_fused_add_trap_29(strict: bool) -> None:
    """``conv(x) + 3`` stops x86 with a bare AssertionError when torch says that it came from ``operator.add``."""
    model = Forward(lambda m, x: F.relu6(m.conv(x) + 3), conv=nn.Conv2d(3, 4, 3))
    with pytest.raises(AssertionError):
        prepared(export(model, (image(),), strict=True).module(check_guards=False), "x86")
    assert annotated_names(model, image(), "x86", strict=strict) == {"conv/conv2d"}


@pytest.mark.parametrize("strict", [False, True])
def test_conv_with_circular_padding_is_one_convolution(strict: bool) -> None:
    model = Forward(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"))
    with pytest.raises(ValueError, match="pad is not an aten conv2d operator"):
        prepared(export(model, (image(),), strict=True).module(check_guards=False), "x86")
    assert annotated_names(model, image(), "x86", strict=strict) == {"conv/conv2d"}


@pytest.mark.parametrize("strict", [False, True])
def test_composite_modules_keep_their_source_trap_35(strict: bool) -> None:
    """As strict export has it: x86 leaves MultiheadAttention float."""
    x = torch.randn(5, 2, 8)
    assert annotated_names(attention(), x, "x86", strict=strict) == set()
    graph = capture(attention(), x, strict=strict).program.graph
    sources = {node.meta["source_fn_stack"][0] for node in graph.nodes if node.op == "call_function"}
    assert [source for _, source in sources] == [nn.MultiheadAttention]


def test_each_op_has_one_source_and_parameters_have_none() -> None:
    program = capture(Residual(), image()).program
    for node in program.graph.nodes:
        assert len(node.meta.get("source_fn_stack", [])) == (node.op == "call_function")
    labels = [node.meta["source_fn_stack"][0][0] for node in program.graph.nodes if node.op == "call_function"]
    assert len(set(labels)) == len(labels)


def test_sources_survive_a_file() -> None:
    program = capture(functions(), image()).program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for graph in (program, loaded):
        assert [n.meta["source_fn_stack"][0][1] for n in graph.graph.nodes if n.op == "call_function"] == [
            nn.Conv2d,
            nn.ReLU,
            torch.mean,
            nn.Linear,
        ]


def test_a_plain_model_is_not_reported() -> None:
    model = Forward(lambda m, x: m.relu(m.conv(x)), conv=nn.Conv2d(3, 4, 3), relu=nn.ReLU())
    assert rules(capture(model, image())) == []
