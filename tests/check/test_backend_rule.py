"""The rule backend-spec: an op by name, the line that it breaks, and what to write instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import pt2qa
from pt2qa.plugins import BackendSpec, OpSpec, TensorSpec
from pt2qa.report import Finding
from tests.check.quantizers import INT8, UINT8, WEIGHT, Annotates, every
from tests.flows import residual_pair

ACTIVATION = TensorSpec("int8", "affine", None, -128, 127)
NPU = BackendSpec(
    "npu",
    (
        OpSpec(
            ops=("conv2d",),
            input=(ACTIVATION,),
            weight=(TensorSpec("int8", "symmetric", 0, -127, 127),),
            bias=(TensorSpec("float32"),),
            output=(ACTIVATION,),
            fused=("relu",),
        ),
        OpSpec(ops=("max_pool2d",), one_scale=True),
    ),
)
GOOD = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0)
WIDE = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_symmetric, ch_axis=0)


def check(quantizer: Any, *layers: nn.Module) -> Any:
    model, example = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    return pt2qa.check(model, example, quantizer=quantizer, rules=["backend-spec", "mixed-parameters"], progress=False)


def found(quantizer: Annotates, *layers: nn.Module) -> tuple[Finding, ...]:
    quantizer.spec = NPU
    return check(quantizer, *layers).of("backend-spec")


@pytest.mark.parametrize(
    ("quantizer", "severity", "why", "fix"),
    [
        (
            every("conv2d", INT8, INT8, WEIGHT),
            "error",
            'its weight is int8, per tensor, symmetric, -127..127; the spec of npu says "conv2d: weight int8, per '
            'channel (axis 0), symmetric, -127..127"',
            "in the quantizer, give it QuantizationSpec(torch.int8, quant_min=-127, quant_max=127, "
            "qscheme=torch.per_channel_symmetric, ch_axis=0)",
        ),
        (
            every("conv2d", UINT8, None, GOOD),
            "error",
            'its input is uint8, per tensor, affine, 0..255; the spec of npu says "conv2d: input int8, per tensor, '
            'affine, -128..127"',
            "in the quantizer, give it QuantizationSpec(torch.int8, quant_min=-128, quant_max=127, "
            "qscheme=torch.per_tensor_affine)",
        ),
        (
            every("conv2d", INT8, None, WIDE),
            "warning",
            'its weight is int8, per channel (axis 0), symmetric, -128..127; the spec of npu says "conv2d: weight '
            'int8, per channel (axis 0), symmetric, -127..127"',
            "in the quantizer, give it QuantizationSpec(torch.int8, quant_min=-127, quant_max=127, "
            "qscheme=torch.per_channel_symmetric, ch_axis=0)",
        ),
        (
            every("conv2d", INT8, INT8, GOOD),
            "warning",
            'it is rounded before the relu; the spec of npu says "conv2d: fused with the relu after it"',
            "in the quantizer, annotate the output of the activation, and not that of the conv2d before it",
        ),
    ],
    ids=["weight", "input", "range", "fusion"],
)
def test_names_the_op_quotes_the_line_and_says_what_to_write(
    quantizer: Annotates, severity: str, why: str, fix: str
) -> None:
    layers = (nn.Conv2d(3, 4, 1), *((nn.ReLU(),) if "relu" in why else ()))
    (finding,) = found(quantizer, *layers)
    assert (finding.name, finding.severity, finding.why, finding.fix) == ("0/conv2d", severity, why, fix)


def test_a_bias_that_is_rounded_is_to_be_left_out() -> None:
    def annotate(nodes: dict[str, Any]) -> Any:
        conv = nodes["conv2d"]
        return {conv: ({conv.args[2]: WEIGHT}, None)}

    (finding,) = found(Annotates(annotate), nn.Conv2d(3, 4, 1))
    assert finding.why.endswith('says "conv2d: bias float32"')
    assert finding.fix == "in the quantizer, leave the bias of the conv2d out of input_qspec_map"


def test_two_scales_around_a_move_are_reported_once() -> None:
    quantizer = every("max_pool2d", INT8, INT8)
    assert [row.rule for row in check(quantizer, nn.MaxPool2d(2, 2))] == ["mixed-parameters"]
    quantizer.spec = NPU
    (row,) = check(quantizer, nn.MaxPool2d(2, 2))
    assert (row.rule, row.name) == ("backend-spec", "0/max_pool2d")
    assert row.why == (
        "separate scales for its input and its output; the spec of npu says "
        '"max_pool2d: one scale for all inputs and the output"'
    )
    assert "SharedQuantizationSpec" in row.fix


def test_a_quantizer_without_a_spec_is_not_judged() -> None:
    (outcome, _) = check(every("conv2d", INT8), nn.Conv2d(3, 4, 1)).rules
    assert (outcome.outcome, outcome.reason) == (
        "not applied",
        "to quantizers without a spec of what their backend takes",
    )


@pytest.fixture(scope="module")
def affine_pair() -> pt2qa.QuantizedPair:
    """A convolution with affine weights, as somebody's own quantizer asks for."""
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Conv2d(3, 4, 1)).eval(), torch.randn(2, 3, 8, 8)
    weight = replace(GOOD, qscheme=torch.per_channel_affine)
    return pt2qa.quantize(pt2qa.capture(model, example), every("conv2d", UINT8, None, weight), [example])


def test_a_pair_is_held_against_the_backend_that_is_named(affine_pair: pt2qa.QuantizedPair) -> None:
    (row,) = pt2qa.check(affine_pair, quantizer="x86", rules=["backend-spec"])
    assert (row.name, row.severity) == ("0/conv2d", "error")
    assert row.why.startswith("its weight is int8, per channel (axis 0), affine, -127..127; the spec of x86 says")
    rows = pt2qa.check(affine_pair, quantizer="xnnpack", rules=["backend-spec"])
    assert [row.why.split(" is ")[0] for row in rows] == ["its input", "its weight"]


def test_a_pair_that_was_made_elsewhere_is_held_against_it_by_its_weights(affine_pair: pt2qa.QuantizedPair) -> None:
    assert affine_pair.float_graph is not None
    elsewhere = pt2qa.pair(affine_pair.float_graph, affine_pair.quantized)
    (row,) = pt2qa.check(elsewhere, quantizer="x86", rules=["backend-spec"])
    assert (row.name, row.severity) == ("0/conv2d", "error")
    assert row.why.startswith("its weight is int8, per channel (axis 0), affine, -127..127; the spec of x86 says")
    (outcome,) = pt2qa.check(elsewhere, rules=["backend-spec"]).rules
    assert (outcome.outcome, outcome.reason) == ("not applied", "without a quantizer: pass quantizer=")


@pytest.mark.parametrize("quantizer", ["x86", "xnnpack"])
def test_a_sound_pair_that_was_made_elsewhere_is_clear(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    assert pair.float_graph is not None
    elsewhere = pt2qa.pair(pair.float_graph, pair.quantized)
    (outcome,) = pt2qa.check(elsewhere, quantizer=quantizer, rules=["backend-spec"]).rules
    assert outcome.outcome == "clear"
