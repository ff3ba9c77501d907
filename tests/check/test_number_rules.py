"""Rules on the numbers: what is found, what looks alike and is fine, and what is said."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

import pt2qa
from pt2qa._check.report import Finding, Findings
from pt2qa._check.rules.calibration import masks_in
from pt2qa._check.rules.sites import clamp_cost
from pt2qa.plugins import available
from tests.check.plain_quantizer import (
    AFFINE,
    EXACT,
    SIGNED,
    PlainQuantizer,
    foreign_pair,
    per_channel,
    prepared,
)
from tests.flows import quantized_pair, residual_pair
from tests.models import images


def checked(rule: str, subject: Any, **options: Any) -> Findings:
    """One rule alone."""
    return pt2qa.check(subject, rules=[rule], progress=False, **options)


def found(rule: str, subject: Any, **options: Any) -> list[Finding]:
    """Its findings; that it applied is asserted."""
    findings = checked(rule, subject, **options)
    assert findings.rules[0].outcome != "not applied", findings.rules[0].reason
    return list(findings.rows)


def whys(rule: str, subject: Any, **options: Any) -> dict[str, str]:
    """What it says, by name."""
    return {row.name: row.why for row in found(rule, subject, **options)}


def linear(inputs: int = 4, outputs: int = 3) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs).eval()


NUMBER_RULES = (
    *("never-calibrated", "nonfinite-observed", "degenerate-scale", "dead-channel", "channel-range", "saturation"),
    *("range-outliers", "unused-range", "requantize-mismatch", "bias-overflow"),
)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_healthy_model_is_quiet(quantizer: str) -> None:
    findings = pt2qa.check(residual_pair(quantizer), batches=[images()], rules=NUMBER_RULES, progress=False)
    assert [(row.rule, row.name) for row in findings if row.rule != "unused-range"] == []


@pytest.mark.parametrize("rule", NUMBER_RULES)
def test_before_calibration_there_is_nothing_to_look_at(rule: str) -> None:
    outcome = checked(rule, pt2qa.capture(linear(), torch.randn(2, 4)), quantizer="x86").rules[0]
    assert outcome.outcome == "not applied"
    assert outcome.reason.startswith(("before", "without a quantized pair"))


# -- observers ---------------------------------------------------------------------------------------------------------


class TwoBranches(nn.Module):
    """Each input has a linear of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


BRANCHES = (torch.randn(2, 4), torch.randn(2, 4))
EMPTY = (torch.randn(2, 4), torch.randn(0, 4))


def test_trap_16_an_observer_that_saw_only_empty_batches_is_named() -> None:
    quantizer = PlainQuantizer(outputs=AFFINE)
    one = prepared(TwoBranches(), BRANCHES, quantizer, [EMPTY, EMPTY])
    rows = found("never-calibrated", one)
    assert [(row.name, row.severity) for row in rows] == [("y", "error"), ("right/linear", "error")]
    assert rows[0].why == "its observer saw no value, and gets the scale 1.0"
    assert found("never-calibrated", prepared(TwoBranches(), BRANCHES, quantizer, [BRANCHES])) == []


def test_trap_16_a_graph_that_was_never_run_is_one_finding() -> None:
    rows = found("never-calibrated", prepared(TwoBranches(), BRANCHES, PlainQuantizer()))
    assert [row.why for row in rows] == ["none of the 4 observers saw a value: no batch was run through this graph"]


def test_trap_16_fake_quantize_ops_are_observers_too() -> None:
    graph = pt2qa.capture(linear(), torch.randn(2, 4)).module()
    made: GraphModule = prepare_qat_pt2e(graph, available()["x86"].build(graph, qat=True))
    assert [row.name for row in found("never-calibrated", made)] == [""]
    made(torch.randn(2, 4))
    assert found("never-calibrated", made) == []


def test_trap_16_a_pair_that_was_converted_without_calibration() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="must run observer before calling calculate_qparams")
        half = foreign_pair(TwoBranches(), BRANCHES, PlainQuantizer(outputs=AFFINE), [EMPTY])
        none = foreign_pair(TwoBranches(), BRANCHES, PlainQuantizer(weights=None, outputs=AFFINE))
        with pytest.raises(pt2qa.PairingError, match=r"Its scale is 1\.0, as of an observer that saw no value: run"):
            foreign_pair(TwoBranches(), BRANCHES, PlainQuantizer())
    assert [row.why for row in found("never-calibrated", none)] == [
        "all 4 activations have the scale 1.0 and the zero point 0: nothing was calibrated"
    ]
    rows = found("never-calibrated", half)
    assert [(row.name, row.severity) for row in rows] == [("y", "warning"), ("right/linear", "warning")]
    assert rows[1].why == "its scale is 1.0 and its zero point 0, as from an observer that saw no value"
    assert rows[0].why == f"{rows[1].why}; correct for whole numbers only"


@pytest.mark.parametrize("size", [16, 2000])
def test_trap_16_a_weight_by_channel_that_was_never_calibrated(size: int) -> None:
    model, x = nn.Sequential(nn.Linear(size, size)).eval(), torch.randn(2, size)
    quantizer = available()["x86"].build(pt2qa.capture(model, x).module(), qat=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(pt2qa.PairingError, match=r"Its scale is 1\.0, as of an observer that saw no value: run"):
            foreign_pair(model, (x,), quantizer)


def test_a_scale_of_1_is_right_for_pixels_and_the_data_shows_it() -> None:
    pixels = torch.randint(0, 256, (4, 4)).float()
    pixels[0, :2] = torch.tensor([0.0, 255.0])
    pair = foreign_pair(linear(), pixels, PlainQuantizer(inputs=EXACT, outputs=AFFINE), [pixels])
    assert [row.name for row in found("never-calibrated", pair)] == ["input"]
    assert found("never-calibrated", pair, batches=[pixels]) == []
    assert found("never-calibrated", quantized_pair(linear(), pixels, PlainQuantizer(inputs=EXACT))) == []


def test_trap_23_an_activation_that_was_zero_in_calibration() -> None:
    zeros = torch.zeros(2, 4)
    assert whys("degenerate-scale", prepared(linear(), zeros, PlainQuantizer(), [zeros])) == {
        "input": "calibration saw only zeros here"
    }
    rows = found("degenerate-scale", quantized_pair(linear(), zeros, PlainQuantizer()))
    assert [(row.name, row.severity) for row in rows] == [("input", "warning")]
    assert rows[0].why == (
        "its scale 0.000244 is the smallest that an observer gives: calibration saw zeros, or values in less than the "
        "0.062 that it spans"
    )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_trap_23_a_scale_that_is_no_number(value: float) -> None:
    x = torch.ones(2, 4)
    pair = foreign_pair(linear(), x, PlainQuantizer(), [x])
    (node,) = [node for node in pair.quantized.graph.nodes if ".quantize_per_tensor" in str(node.target)]
    for one in (node, *node.users):
        one.update_arg(1, value)
    pair.quantized.recompile()
    rows = found("degenerate-scale", pt2qa.pair(pair.reference, pair.quantized))
    assert [(row.name, row.severity) for row in rows] == [("input", "error")]
    assert rows[0].why == f"the scale of its activation is {value}"


def test_trap_23_an_empty_channel_is_counted_along_the_axis_of_the_op() -> None:
    torch.manual_seed(0)
    model = nn.ConvTranspose2d(3, 5, 2).eval()
    with torch.no_grad():
        model.weight[:, 2] = 0
    quantizer = PlainQuantizer(("conv_transpose2d",), weights=per_channel(axis=1))
    expected = "1 of 5 channels of its weight are zero in float"
    rows = found("degenerate-scale", quantized_pair(model, images(), quantizer))
    assert [(row.severity, row.why) for row in rows] == [("note", expected)]
    rows = found("degenerate-scale", prepared(model, images(), quantizer, [images()]))
    assert [(row.severity, row.why) for row in rows] == [("note", expected)]


def test_the_channels_of_a_decomposed_transposed_convolution() -> None:
    torch.manual_seed(0)
    model = nn.ConvTranspose2d(3, 5, 2).eval()
    with torch.no_grad():
        model.weight[:, 2] = 0
    program = pt2qa.capture(model, images()).program.run_decompositions()
    graph = prepare_pt2e(program.module(), PlainQuantizer(("convolution",), weights=per_channel(axis=1)))
    graph(images())
    rows = found("degenerate-scale", pt2qa.pair(program, convert_pt2e(graph)))
    assert [row.why for row in rows] == ["1 of 5 channels of its weight are zero in float"]


def test_channels_that_an_eps_holds_at_a_large_scale() -> None:
    """Weights of 0.001 under a scale of at least 2**-12 have four steps on each side."""
    model, x = linear(4, 8), 100 * torch.randn(8, 4)
    with torch.no_grad():
        model.weight[:2] = torch.tensor([0.001, -0.001, 0.0005, 0.001])
    rows = found("degenerate-scale", quantized_pair(model, x, PlainQuantizer(weights=per_channel(), outputs=SIGNED)))
    assert [row.why for row in rows] == [
        "2 of 8 channels of its weight have the smallest scale that the observer gives, 0.000244, and fewer than 8 "
        "steps on each side"
    ]
    fine = PlainQuantizer(weights=per_channel(eps=1e-9), outputs=SIGNED)
    assert found("degenerate-scale", quantized_pair(model, x, fine)) == []


# -- weights -----------------------------------------------------------------------------------------------------------


def two_channels(small: float, large: float = 90.0) -> nn.Linear:
    """Trap 12: the largest weights of two channels are 90 and 0.14."""
    model = linear(4, 2)
    with torch.no_grad():
        model.weight[0] = large * torch.tensor([1.0, -0.5, 0.25, 0.1])
        model.weight[1] = small * torch.tensor([1.0, -0.5, 0.25, 0.1])
    return model


def test_trap_12_a_channel_that_one_scale_rounds_to_nothing() -> None:
    x = torch.randn(8, 4)
    rows = found("dead-channel", quantized_pair(two_channels(0.14), x, PlainQuantizer()))
    assert [row.why for row in rows] == [
        "1 of 2 channels of its weight are zero: none of their values reaches half a step of 0.709"
    ]
    assert "give each channel its own scale" in rows[0].fix
    assert found("dead-channel", quantized_pair(two_channels(0.14), x, PlainQuantizer(weights=per_channel()))) == []
    assert found("dead-channel", quantized_pair(two_channels(9.0), x, PlainQuantizer())) == []


def test_a_dead_channel_that_the_output_cannot_show_is_no_matter() -> None:
    """The output's step is set by the large channel: what the small one adds is less than half of it."""
    x = torch.randn(8, 4)
    pair = quantized_pair(two_channels(0.001), x, PlainQuantizer(outputs=AFFINE))
    assert next(row.dead_channels for row in pt2qa.compare_weights(pair).rows if row.attr == "weight") == 1
    assert found("dead-channel", pair) == []


def test_channels_of_different_range_under_one_scale() -> None:
    x = torch.randn(8, 4)
    rows = found("channel-range", quantized_pair(two_channels(0.9), x, PlainQuantizer()))
    assert [row.why for row in rows] == [
        "1 of 2 channels have less than 1/16 of the weight's range, the smallest 1/100"
    ]
    assert "Nagel et al. 2019" in rows[0].fix
    assert found("channel-range", quantized_pair(two_channels(9.0), x, PlainQuantizer())) == []
    # A dead channel is the other rule's.
    assert found("channel-range", quantized_pair(two_channels(0.14), x, PlainQuantizer())) == []
    outcome = checked("channel-range", quantized_pair(two_channels(0.9), x, PlainQuantizer(weights=per_channel())))
    assert outcome.rules[0].reason == "to models without weights that have one scale for the whole tensor"


def with_bias(bias: float) -> nn.Linear:
    model = linear()
    with torch.no_grad():
        model.weight.copy_(1e-5 * torch.eye(3, 4))
        model.bias.copy_(torch.tensor([0.0, bias, 0.001]))
    return model


@pytest.mark.parametrize(("int32_bias", "severity"), [(True, "error"), (False, "warning")])
def test_a_bias_that_exceeds_int32(int32_bias: bool, severity: str) -> None:
    x = 0.01 * torch.randn(8, 4)
    weights = per_tensor_without_eps()
    pair = quantized_pair(with_bias(100.0), x, PlainQuantizer(weights=weights, inputs=SIGNED, int32_bias=int32_bias))
    scales = {site.kind: float(site.params.largest_scale) for site in pair.sites}
    steps = 100 / np.float64(scales["activation"]) / np.float64(scales["weight"])
    assert steps > 2**31
    rows = found("bias-overflow", pair)
    assert [(row.name, row.severity) for row in rows] == [("linear", severity)]
    assert rows[0].value == pytest.approx(steps, rel=1e-5)
    assert rows[0].why.startswith(f"1 of 3 channels have a bias of up to {steps:.2g} steps of ")
    assert found("bias-overflow", quantized_pair(with_bias(0.01), x, PlainQuantizer(weights=weights))) == []


def per_tensor_without_eps() -> Any:
    from torchao.quantization.pt2e import MinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    observer = MinMaxObserver.with_args(eps=1e-12)
    return QuantizationSpec(torch.int8, observer, -127, 127, torch.per_tensor_symmetric)


# -- the data ----------------------------------------------------------------------------------------------------------


def batch(seed: int = 0) -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))


def test_values_beyond_the_calibrated_range() -> None:
    pair = quantized_pair(linear(16), batch(), PlainQuantizer())
    (row,) = found("saturation", pair, batches=[4 * batch(1)])
    layer = next(one for one in pt2qa.compare_layers(pair, [4 * batch(1)], progress=False).rows if one.name == "input")
    assert row.name == "input"
    assert row.why.startswith(f"{100 * layer.saturation:.2f} % of its values are clamped ({layer.ref_min:.3g}..")
    assert row.why.endswith(f"to {layer.rounding_sqnr:.1f} dB")
    assert found("saturation", pair, batches=[batch()]) == []
    assert found("saturation", pair, batches=[batch(1)]) == []


def test_what_a_clamp_costs_is_the_noise_above_that_of_rounding() -> None:
    pair = quantized_pair(linear(16), batch(), PlainQuantizer(inputs=EXACT))
    x = 1.3 * batch(2)
    row = next(one for one in pt2qa.compare_layers(pair, [x], progress=False).rows if one.name == "input")
    site = next(one for one in pair.sites if one.name == "input").params
    assert isinstance(site.scale, float)
    assert isinstance(site.zero_point, int)
    values = x.double().numpy()
    integers = np.clip(np.rint(values / site.scale) + site.zero_point, site.quant_min, site.quant_max)
    noise = np.mean((values - (integers - site.zero_point) * site.scale) ** 2)
    assert clamp_cost(row) == pytest.approx(10 * np.log10(noise / (site.scale**2 / 12)), abs=0.01)


def test_a_range_that_one_calibration_batch_has_blown_up() -> None:
    pair = quantized_pair(linear(16), batch(), PlainQuantizer(inputs=EXACT), batches=[batch(), 20 * batch(1)])
    (row,) = found("unused-range", pair, batches=[batch()])
    layer = next(one for one in pt2qa.compare_layers(pair, [batch()], progress=False).rows if one.name == "input")
    assert row.value == pytest.approx(-math.log2(layer.range_use))
    assert row.why == (
        f"the data spans {100 * layer.range_use:.2f} % of its range, which costs {row.value:.1f} bits and leaves "
        f"{layer.rounding_sqnr:.1f} dB"
    )


def test_a_pool_that_shares_its_inputs_scale_and_rounds_well_is_no_matter() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(self.conv(x).relu())

    pair = quantized_pair(Pooled(), images(), "x86")
    rows = {row.op: row for row in pt2qa.compare_layers(pair, [images()], progress=False).rows}
    assert rows["adaptive_avg_pool2d"].range_use < 0.5
    assert rows["adaptive_avg_pool2d"].rounding_sqnr > 30
    assert found("unused-range", pair, batches=[images()]) == []


def test_a_few_values_that_take_the_range_of_the_others() -> None:
    torch.manual_seed(0)
    x = 0.01 * torch.randn(256, 64)
    x[0, 0] = 4
    pair = quantized_pair(linear(64), x, PlainQuantizer(inputs=EXACT))
    (row,) = found("range-outliers", pair, batches=[x])
    rms = float(x.double().square().mean().sqrt()) / next(s.params.largest_scale for s in pair.sites)
    assert f"root mean square is {rms:.1f} steps" in row.why
    assert found("saturation", pair, batches=[x]) == found("unused-range", pair, batches=[x]) == []
    assert found("range-outliers", quantized_pair(linear(16), batch(), PlainQuantizer()), batches=[batch()]) == []


# -- masks -------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Scores, a mask in one of its spellings, softmax."""

    mask: Tensor
    kept: Tensor

    def __init__(self, apply: Callable[[Masked, Tensor], Tensor], value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(8, 4)
        self.apply_mask = apply
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, value]))
        self.register_buffer("kept", torch.tensor([True, True, True, False]))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_mask(self, self.scores(x)).softmax(-1)


SPELLINGS: dict[str, tuple[Callable[[Masked, Tensor], Tensor], str]] = {
    "added buffer": (lambda self, scores: scores + self.mask, "mask"),
    "masked_fill": (lambda self, scores: scores.masked_fill(~self.kept, self.value) + 0.5, "masked_fill"),
    "where": (lambda self, scores: torch.where(self.kept, scores, torch.full_like(scores, self.value)) + 0.5, "full"),
    "ones times a number": (lambda self, scores: scores + (1 - self.kept.float())[None] * self.value, "mul"),
}
ADDS = PlainQuantizer(("linear", "add"), inputs=EXACT, outputs=EXACT)
CLIPPING = PlainQuantizer(("linear", "add"), outputs=AFFINE)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("value", [-3.4e38, -1e9, -65504.0, -10000.0])
def test_trap_34_a_mask_that_takes_the_whole_range(spelling: str, value: float) -> None:
    apply, origin = SPELLINGS[spelling]
    x = torch.randn(2, 8)
    finite = found("nonfinite-observed", quantized_pair(Masked(apply, value), x, ADDS))
    assert {row.severity for row in finite} == {"error"}
    assert "add" in {row.name.partition("_")[0] for row in finite}
    row = next(row for row in finite if row.name.startswith("add"))
    assert "every other value becomes 0" in row.why
    assert f"for {value:.3g} from {origin}" in row.why
    seen = found("nonfinite-observed", prepared(Masked(apply, value), x, ADDS, [x]))
    assert any(row.name.startswith("add") and "every other value becomes 0" in row.why for row in seen)


@pytest.mark.filterwarnings("ignore:torch.inf detected in input tensor")
@pytest.mark.parametrize("spelling", ["masked_fill", "where"])
def test_trap_23_an_infinite_mask_becomes_the_smallest_score(spelling: str) -> None:
    """The observer drops infinities, so that nothing but the graph tells."""
    x = torch.randn(2, 8)
    apply, origin = SPELLINGS[spelling]
    pair = quantized_pair(Masked(apply, -math.inf), x, CLIPPING)
    row = next(row for row in found("nonfinite-observed", pair) if row.name == "add")
    low = min(site.params.largest_scale * -site.params.single_zero_point for site in pair.sites if site.name == "add")
    assert row.why == f"-inf from {origin} reaches it, which integers cannot represent: it becomes {low:.3g}".replace(
        "from full ", "from full_like "
    )
    assert row.value == math.inf
    rows = found("nonfinite-observed", prepared(Masked(apply, -math.inf), x, CLIPPING, [x]))
    assert any(row.name == "add" and "which integers cannot represent" in row.why for row in rows)


def test_a_mask_that_is_an_input_shows_in_the_scale_or_in_the_data() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(8, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.scores(x) + mask).softmax(-1)

    x, mask = torch.randn(2, 8), torch.tensor([0.0, 0.0, 0.0, torch.finfo(torch.float32).min])
    rows = found("nonfinite-observed", quantized_pair(Given(), (x, mask), ADDS))
    assert {row.name for row in rows} == {"mask", "add"}
    small = quantized_pair(Given(), (x, mask.clamp(min=-1)), ADDS)
    assert found("nonfinite-observed", small) == []
    infinite = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    rows = found("nonfinite-observed", small, batches=[(x, infinite)])
    assert {row.name: row.why for row in rows}[
        "mask"
    ] == "infinite or NaN values reach it, which integers cannot represent"
    assert {row.value for row in rows} == {math.inf}


def test_a_mask_that_stays_in_float_is_fine() -> None:
    x = torch.randn(2, 8)
    pair = quantized_pair(Masked(SPELLINGS["added buffer"][0], -3.4e38), x, "x86")
    assert found("nonfinite-observed", pair, batches=[x]) == []


def test_small_and_positive_constants_are_no_masks() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.clamp(min=-65504.0) + 100000.0).masked_fill(x > 0, -30.0) * 5000.0

    graph = pt2qa.capture(Sums().eval(), torch.randn(2, 4)).module()
    assert masks_in(graph) == {}


# -- rounded twice -----------------------------------------------------------------------------------------------------


class Moves(nn.Module):
    """Two linears with something between that moves values and changes none."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.move, self.last = nn.Linear(4, 4), move, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.move(self.first(x)))


UNEQUAL = PlainQuantizer(inputs=SIGNED, outputs=AFFINE)
UNCHANGED = "and no op between changes it"


def test_trap_18_a_dequantize_that_is_quantized_at_once_with_other_parameters() -> None:
    x = torch.randn(4, 4)
    (row,) = found("requantize-mismatch", foreign_pair(Moves(lambda y: y), x, UNEQUAL, [x]))
    assert row.name == "first/linear"
    assert row.why.startswith("is rounded twice: dtype uint8 then int8, quant_min 0 then -128, quant_max 255 then 127")
    assert "zero_point " in row.why


@pytest.mark.parametrize(
    ("move", "through"),
    [
        (lambda y: y.transpose(0, 1), "transpose and again after it"),
        (
            lambda y: y.reshape(1, 4, 4).permute(0, 2, 1),
            "reshape and again after permute, " + UNCHANGED,
        ),
        (lambda y: torch.cat([y, y]), "cat and again after it"),
        (lambda y: torch.max_pool2d(y[None], 1)[0], "unsqueeze and again after select, " + UNCHANGED),
    ],
    ids=["transpose", "reshape and permute", "cat", "max_pool2d"],
)
def test_trap_18_ops_that_preserve_values_between_different_parameters(
    move: Callable[[Tensor], Tensor], through: str
) -> None:
    x = torch.randn(4, 4)
    rows = found("requantize-mismatch", foreign_pair(Moves(move), x, UNEQUAL, [x]))
    assert {row.why.partition(":")[0] for row in rows} == {f"is rounded before {through}"}


def test_equal_parameters_and_values_that_changed_between_are_fine() -> None:
    x = torch.randn(4, 4)
    same = PlainQuantizer(inputs=EXACT, outputs=EXACT)
    assert found("requantize-mismatch", foreign_pair(Moves(lambda y: y), x, same, [x])) == []
    assert found("requantize-mismatch", foreign_pair(Moves(lambda y: y.transpose(0, 1)), x, same, [x])) == []
    assert found("requantize-mismatch", foreign_pair(Moves(lambda y: y.tanh()), x, UNEQUAL, [x])) == []


def test_what_the_annotation_tells_is_not_told_twice() -> None:
    x = torch.randn(4, 4)
    pair = quantized_pair(Moves(lambda y: y), x, UNEQUAL)
    assert found("requantize-mismatch", pair) == []
    assert [row.name for row in found("mixed-parameters", pair)] == ["first/linear"]


def test_trap_18_a_pass_that_changed_one_of_two_parameters() -> None:
    x = torch.randn(4, 4)
    graph = convert_pt2e(prepared(linear(), x, PlainQuantizer(), [x]))
    node = next(node for node in graph.graph.nodes if ".quantize_per_tensor" in str(node.target))
    node.update_arg(1, 2 * node.args[1])
    graph.recompile()
    pair = pt2qa.pair(pt2qa.capture(linear(), x).module(), graph)
    rows = [row for row in found("requantize-mismatch", pair) if row.severity == "error"]
    assert [row.name for row in rows] == ["input"]
    assert rows[0].why.startswith("is quantized and dequantized with different parameters: scale ")


def test_scales_of_each_batch_are_not_compared() -> None:
    pair = quantized_pair(linear(), torch.randn(2, 4), pt2qa.quantizer("x86", mode="dynamic"))
    outcome = checked("requantize-mismatch", pair).rules[0]
    assert (outcome.outcome, outcome.reason) == ("not applied", "to models without scales from calibration")
