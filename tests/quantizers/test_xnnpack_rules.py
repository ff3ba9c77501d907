"""What the rules say of XNNPACK's kernels is what the kernels do, and a healthy model gives none of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import pt2qa
from pt2qa._check.products import integer_products
from pt2qa._weights.sums import SumsOfWeights
from pt2qa.plugins import op_type
from pt2qa.report import Finding
from pt2qa_xnnpack import PLUGIN
from pt2qa_xnnpack.internals import executorch_release
from tests.flows import quantized_pair
from tests.models import images, residual
from tests.quantizers.device import XNNPACKDevice, lowered

RULES = [rule.id for rule in PLUGIN.rules()]


def found(rule: str, pair: pt2qa.QuantizedPair) -> list[Finding]:
    """What one rule finds in a pair, as for XNNPACK."""
    findings = pt2qa.check(pair, quantizer="xnnpack", rules=[rule], progress=False)
    assert findings.rules[0].outcome in ("found", "clear"), findings.rules[0].reason
    return list(findings.rows)


def spec(low: int = -128, high: int = 127, dtype: torch.dtype = torch.int8) -> QuantizationSpec:
    return QuantizationSpec(dtype, MinMaxObserver, low, high, torch.per_tensor_affine)


def weight(per_channel: bool) -> QuantizationSpec:
    if per_channel:
        return QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0)
    return QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)


class Around(Quantizer):
    """Rounds the inputs and the output of ops, each with a scale of its own; of products the weight as well."""

    def __init__(self, *ops: str, output: bool = True, per_channel: bool = True, **limits: Any) -> None:
        super().__init__()
        self.ops, self.output, self.per_channel, self.spec = ops, output, per_channel, spec(**limits)

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in model.graph.nodes:
            if op_type(node) in self.ops:
                inputs = {
                    source: weight(self.per_channel) if "weight" in source.name else self.spec
                    for source in node.all_input_nodes
                    if "bias" not in source.name
                }
                output = self.spec if self.output else None
                node.meta["quantization_annotation"] = QuantizationAnnotation(inputs, output, _annotated=True)
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


class Calls(nn.Module):
    """Any function as a model."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


# -- xnnpack-refused-scales --------------------------------------------------------------------------------------------

IMAGES = images()
MOVES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "view": (lambda x: x.view(2, 192), (IMAGES,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, 2), (IMAGES,)),
    "slice": (lambda x: x[:, 1:], (IMAGES,)),
    "transpose": (lambda x: x.transpose(1, 3), (IMAGES,)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (IMAGES, 2 * IMAGES)),
}
OTHERS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "select": (lambda x: x[:, 1], (IMAGES,)),
    "expand": (lambda x: x[:1].expand(4, 3, 8, 8), (IMAGES,)),
    "flatten": (lambda x: x.flatten(1), (torch.randn(4, 6),)),  # of what is flat
    "relu": (F.relu, (IMAGES,)),
    "add": (lambda x, y: x + y, (IMAGES, 2 * IMAGES)),
}


def rescale_output(pair: pt2qa.QuantizedPair, change: Callable[[float], float]) -> None:
    """Edits the scale with which a converted graph rounds its output, in place."""
    graph: Any = pair.quantized.graph
    (dequantize,) = graph.output_node().args[0]
    for node in (dequantize.args[0], dequantize):
        node.args = (node.args[0], change(node.args[1]), *node.args[2:])
    pair.quantized.recompile()


def with_unequal_scales(op: str) -> pt2qa.QuantizedPair:
    """An op whose output has half the scale that calibration gave it."""
    function, inputs = (MOVES | OTHERS)[op]
    pair = quantized_pair(Calls(function), inputs, Around(op))
    rescale_output(pair, lambda scale: scale / 2)
    return pair


@pytest.mark.parametrize("op", MOVES)
def test_a_move_between_unequal_scales_does_not_load(op: str) -> None:
    pair = with_unequal_scales(op)
    if op == "slice" and executorch_release() >= (1, 5):
        assert found("xnnpack-refused-scales", pair) == []
        assert torch.equal(XNNPACKDevice(pair.quantized, *MOVES[op][1])(*MOVES[op][1]), pair.quantized(*MOVES[op][1]))
        return
    (row,) = found("xnnpack-refused-scales", pair)
    assert (row.severity, op in row.why) == ("error", True)
    with pytest.raises(RuntimeError, match="Failed to load method forward, error: 0x:1"):
        XNNPACKDevice(pair.quantized, *MOVES[op][1])


@pytest.mark.parametrize("op", OTHERS)
def test_other_ops_do(op: str) -> None:
    pair = with_unequal_scales(op)
    assert found("xnnpack-refused-scales", pair) == []
    XNNPACKDevice(pair.quantized, *OTHERS[op][1])


def test_sizes_that_depend_on_the_batch_have_no_such_kernel() -> None:
    batch = {0: torch.export.Dim.AUTO}
    pair = quantized_pair(Calls(lambda x: x.flatten(1)), IMAGES, Around("flatten"), dynamic_shapes=((batch,),))
    rescale_output(pair, lambda scale: scale / 2)
    assert found("xnnpack-refused-scales", pair) == []
    assert len(found("xnnpack-refused-scales", with_unequal_scales("view"))) == 1


@pytest.mark.parametrize(("ratio", "loads"), [(255.0, True), (257.0, False)])
def test_the_scale_of_a_product_s_output_may_not_be_too_small(ratio: float, loads: bool) -> None:
    x = torch.randn(64, 4)
    pair = quantized_pair(nn.Linear(4, 3, bias=False), x, Around("linear"))
    (product,) = integer_products(pair, SumsOfWeights())
    assert product.input_params is not None
    assert isinstance(product.input_params.scale, float)
    steps = product.input_params.scale * float(product.scales.max())
    rescale_output(pair, lambda scale: steps / ratio)
    rows = found("xnnpack-refused-scales", pair)
    if loads:
        assert rows == []
        XNNPACKDevice(pair.quantized, x)
        return
    assert [row.value for row in rows] == [pytest.approx(ratio)]
    with pytest.raises(RuntimeError, match="Failed to load method forward, error: 0x:1"):
        XNNPACKDevice(pair.quantized, x)


# -- xnnpack-outside-product -------------------------------------------------------------------------------------------

LINEAR, CONV = nn.Linear(8, 4), nn.Conv2d(3, 4, 3)
OUTSIDE = {
    "float output": (LINEAR, torch.randn(4, 8), Around("linear", output=False)),
    "float gelu": (nn.Sequential(CONV, nn.GELU()), IMAGES, Around("conv2d", output=False)),
    "dynamic, per tensor": (LINEAR, torch.randn(4, 8), "xnnpack:mode=dynamic,per_channel=false"),
    "3-d": (nn.Conv3d(3, 4, 3), torch.randn(1, 3, 5, 6, 6), Around("conv3d")),
    "no batch axis": (CONV, IMAGES[0], Around("conv2d")),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_product_outside_of_the_delegate_has_no_kernel(case: str) -> None:
    model, x, quantizer = OUTSIDE[case]
    pair = quantized_pair(model, x, quantizer)
    (row,) = found("xnnpack-outside-product", pair)
    assert row.severity == "error"
    with pytest.raises(RuntimeError, match="Missing out variants"):
        XNNPACKDevice(pair.quantized, x)


def test_a_convolution_outside_of_it_with_one_weight_scale_computes_zeros() -> None:
    pair = quantized_pair(nn.Conv2d(3, 4, 3, bias=False), IMAGES, Around("conv2d", output=False, per_channel=False))
    (row,) = found("xnnpack-outside-product", pair)
    assert (row.severity, row.why.endswith("the program then runs, and its output is wrong")) == ("error", True)
    assert float(XNNPACKDevice(pair.quantized, IMAGES)(IMAGES).abs().max()) == 0


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_linear_outside_of_it_with_one_weight_scale_does_not_load(bias: bool) -> None:
    x = torch.randn(4, 8)
    pair = quantized_pair(nn.Linear(8, 4, bias=bias), x, Around("linear", output=False, per_channel=False))
    (row,) = found("xnnpack-outside-product", pair)
    assert (row.severity, row.why.endswith("the program then does not load")) == ("error", True)
    with pytest.raises(RuntimeError, match="Failed to load method forward"):
        XNNPACKDevice(pair.quantized, x)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh()], ids=["relu", "relu6", "hardtanh"])
def test_a_fused_activation_may_stand_between(activation: nn.Module) -> None:
    pair = quantized_pair(nn.Sequential(CONV, activation), IMAGES, "xnnpack")
    assert found("xnnpack-outside-product", pair) == []


# -- xnnpack-scalar ----------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A linear times something."""

    def __init__(self, scale: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(8, 4), scale

    def forward(self, x: Tensor, *inputs: Tensor) -> Tensor:
        y = self.fc(x)
        return y * self.scale(y, *inputs)


ROWS, HALF = torch.linspace(-1, 1, 32).reshape(4, 8), torch.tensor(0.5)
SCALARS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], list[str]]] = {
    "input": (lambda y, t: t, (ROWS, HALF), ["inputs_0"]),
    "mean": (lambda y: y.mean(), (ROWS,), ["mean"]),
    "element": (lambda y: y[0, 0], (ROWS,), ["select_1"]),
    "axis of size one": (lambda y, t: t.reshape(1), (ROWS, HALF), []),
    "mean that keeps axes": (lambda y: y.mean((0, 1), keepdim=True), (ROWS,), []),
    "made in the delegate": (lambda y: y[:1, :1].reshape(()), (ROWS,), []),
}


@pytest.mark.parametrize("case", SCALARS)
def test_a_value_without_axes_that_a_delegate_reads_rounded_is_not_lowered(case: str) -> None:
    scale, inputs, names = SCALARS[case]
    pair = quantized_pair(Scaled(scale), inputs, "xnnpack")
    assert [row.name for row in found("xnnpack-scalar", pair)] == names
    if names:
        with pytest.raises(pt2qa.DeploymentError, match="invalid index of a 0-dim tensor"):
            pt2qa.compare_deployed(pair, [inputs], progress=False)
    else:
        assert pt2qa.compare_deployed(pair, [inputs], progress=False).suspects == ()


# -- the other rules ---------------------------------------------------------------------------------------------------


def test_other_types_than_int8_have_no_kernel() -> None:
    x = torch.randn(4, 8)
    pair = quantized_pair(Calls(F.relu), x, Around("relu", low=0, high=255, dtype=torch.uint8))
    assert [row.why for row in found("xnnpack-dtype", pair)] == ["is quantized to uint8, and XNNPACK has int8 only"] * 2
    with pytest.raises(RuntimeError, match="Missing out variants"):
        XNNPACKDevice(pair.quantized, x)


def test_a_pool_without_a_stride_cannot_be_lowered_before_executorch_1_5() -> None:
    pair = quantized_pair(nn.Sequential(CONV, Calls(lambda x: F.max_pool2d(x, 2))), IMAGES, "xnnpack")
    if executorch_release() >= (1, 5):
        findings = pt2qa.check(pair, quantizer="xnnpack", rules=["xnnpack-pool-stride"], progress=False)
        assert findings.rules[0].outcome == "not applied"
        assert XNNPACKDevice(pair.quantized, IMAGES)(IMAGES).shape == pair.quantized(IMAGES).shape
        return
    assert [row.name for row in found("xnnpack-pool-stride", pair)] == ["1/max_pool2d"]
    with pytest.raises(IndexError, match="tuple index out of range"):
        XNNPACKDevice(pair.quantized, IMAGES)


@pytest.mark.parametrize("op", ["linear", "add", "relu"])
def test_every_kernel_clamps_at_the_limits_of_int8(op: str) -> None:
    x = torch.randn(64, 8)
    model = {"linear": nn.Linear(8, 4), "add": Calls(lambda x: x + x), "relu": Calls(F.relu)}[op]
    pair = quantized_pair(model, x, Around(op, low=-64, high=63))
    rows = found("xnnpack-ignored-range", pair)
    assert {row.why for row in rows} == {"its range is -64..63, and the kernels clamp at -128..127"}
    beyond = XNNPACKDevice(pair.quantized, x)(10 * x)
    (site,) = [site for site in pair.sites if site.op == op and site.kind == "activation"]
    reached = beyond / float(site.params.scale) + int(site.params.zero_point)
    assert reached.max() > 120
    assert pair.simulator.run([10 * x])[0].max() < beyond.max()


RUN = """
import sys, torch
from executorch.runtime import Runtime
method = Runtime.get().load_program(sys.argv[1]).load_method("forward")
x, expected = torch.load(sys.argv[2])
assert torch.allclose(method.execute([x])[0].float(), expected.float(), atol=0.1)
"""


@pytest.mark.parametrize("half", [True, False])
def test_a_model_in_float16_with_static_scales_dies_or_is_wrong_in_a_process_of_its_own(
    half: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    if half:
        model, x = model.half(), x.half()
    pair = quantized_pair(model, x, "xnnpack")
    assert [row.name for row in found("xnnpack-float16", pair)] == ["0/conv2d"] * half
    program, values = tmp_path / "model.pte", tmp_path / "values.pt"
    program.write_bytes(lowered(pair.quantized, x))
    torch.save((x, pair.quantized(x).detach()), values)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN, program, values], capture_output=True)
    assert (done.returncode != 0) == half, done.stderr[-2000:]


def test_a_range_that_is_one_step_shorter_is_a_note() -> None:
    pair = quantized_pair(nn.Linear(8, 4), torch.randn(4, 8), Around("linear", low=-127))
    assert {row.severity for row in found("xnnpack-ignored-range", pair)} == {"note"}


def bias_pair(bias: float) -> pt2qa.QuantizedPair:
    """A linear with the smallest weight scale that an observer gives, 2**-23, and one bias for every output."""
    model = nn.Linear(8, 4)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, bias)
    return quantized_pair(model, torch.rand(16, 8), Around("linear", per_channel=False))


def test_a_bias_beyond_32_bits_changes_its_sign() -> None:
    x = torch.rand(16, 8)
    for bias, beyond in ((0.5, False), (2.0, True)):  # 2**31 steps of 1 / 255 * 2**-23 are 1.004
        pair = bias_pair(bias)
        rows = found("bias-overflow", pair)
        assert [row.severity for row in rows] == ["error"] * beyond
        # The output's range begins at 0, where a negative value is cut off.
        expected = torch.full((16, 4), 0.0 if beyond else bias)
        assert torch.allclose(XNNPACKDevice(pair.quantized, x)(x), expected)


class Portable(nn.Module):
    """A mean that XNNPACK does not take, between a convolution and a linear, and a sort at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu_().mean((2, 3))).flip(1)


def test_portable_ops_are_those_between_delegates() -> None:
    pair = quantized_pair(Portable(), IMAGES, "xnnpack")
    (row,) = found("xnnpack-portable-op", pair)
    assert (row.name, row.severity) == ("mean", "note")
    assert row.why == "runs in aten::mean, in float, with 0.0% of the multiply-adds"


class Gathers(nn.Module):
    """First of all an op of two inputs that differ in dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.head(self.stem(x).gather(1, places))


def test_an_op_of_unlike_inputs_is_asked_about_with_each_in_its_place() -> None:
    batch = torch.randn(5, 6), torch.tensor([[0, 2, 1]]).expand(5, 3).contiguous()
    (row,) = found("xnnpack-portable-op", quantized_pair(Gathers(), batch, "xnnpack"))
    assert (row.name, row.why.partition(",")[0]) == ("gather", "runs in aten::gather")


@pytest.mark.parametrize("quantizer", ["xnnpack", "xnnpack:per_channel=false"])
def test_a_healthy_model_has_nothing_to_warn_of(quantizer: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8)
    )
    for healthy in (residual(), nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))):
        pair = quantized_pair(healthy, IMAGES, quantizer)
        findings = pt2qa.check(pair, rules=[*RULES, "bias-overflow"], progress=False)
        assert {finding.severity for finding in findings} <= {"note"}, findings
        assert "failed" not in {rule.outcome for rule in findings.rules}
