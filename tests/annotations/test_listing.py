"""Every place of a model is listed, with what the quantizer asks for and what the converted model does."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.prepare import _get_edge_or_node_to_group_id, _get_edge_or_node_to_qspec

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.errors import SelectionError
from pt2qa.overrides.edited import annotate
from pt2qa.overrides.points import groups_of, read_specs
from pt2qa.plugins import resolve
from pt2qa.report import AnnotationReport, AnnotationRow
from tests.flows import quantized_pair
from tests.models import Conditional, KeywordInputs, Linears, NestedOutputs, Parameters, images
from tests.overrides.flows import captured, plain
from tests.overrides.strangers import STRANGERS
from tests.test_pairing import made_elsewhere

QUANTIZERS = ("xnnpack", "x86")
SOME = ("residual", "pooled", "two_users", "same_input_twice", "shared_norm")
"""Nets that differ in what this package sees; all of them are in the tests of overrides."""


def places(report: AnnotationReport, name: str) -> dict[tuple[str, int], AnnotationRow]:
    return {(row.role, row.argument): row for row in report.of(name)}


def check_sites(report: AnnotationReport, pair: pt2qa.QuantizedPair) -> None:
    """Each site of the pair is a place of its kind, and nothing else is rounded."""
    for kind, roles in (("weight", {"weight"}), ("bias", {"bias"}), ("activation", {"input", "output"})):
        expected = {site.index for site in pair.sites if site.kind == kind}
        assert {row.site for row in report.rows if row.role in roles} - {-1} == expected
    assert all(row.quantized == (row.site >= 0) for row in report.rows)
    for row in report.rows:
        if row.quantized:
            params = pair.sites[row.site].params
            assert row.dtype == params.dtype
            assert row.scale == params.largest_scale or math.isnan(params.largest_scale)
            assert (row.quant_min, row.quant_max) == (params.quant_min, params.quant_max)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", SOME)
def test_places_are_those_of_the_sites_and_of_all_ops(net: str, quantizer: str) -> None:
    pair = plain(net, quantizer)
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    assert {row.name for row in report.rows} == {name.name for name in pair.names.values()}
    assert all(row.dtype for row in report.rows)
    # Whoever asks is heard, and what is rounded was asked for.
    assert all(row.quantized for row in report.rows if row.annotated)
    assert all(row.observer for row in report.rows if row.quantized)
    counted = {kind.op: (kind.total, kind.quantized) for kind in report.coverage}
    assert counted == {kind.op: (kind.total, kind.quantized) for kind in pair.coverage}


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", SOME)
def test_before_calibration_all_but_the_scales_is_known(net: str, quantizer: str) -> None:
    before, after = pt2qa.annotations(captured(net)[0], quantizer), pt2qa.annotations(plain(net, quantizer))
    assert (before.basis, after.basis) == ("annotated", "annotated and converted")
    assert pt2qa.diff_annotations(before, after).equal
    assert before.modules == after.modules
    assert before.coverage == after.coverage
    assert before.environment == after.environment
    assert all(math.isnan(row.scale) for row in before.rows)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", SOME)
def test_shared_scales_are_those_of_torchao(net: str, quantizer: str) -> None:
    capture, _ = captured(net)
    graph = annotate(copy.deepcopy(capture.module()), resolve(quantizer), (), capture.names, qat=False)
    specs = _get_edge_or_node_to_qspec(graph)
    groups = {
        (point.name, "") if isinstance(point, torch.fx.Node) else (point[0].name, point[1].name): group
        for point, group in _get_edge_or_node_to_group_id(specs).items()
    }
    own = groups_of(read_specs(graph))
    asked = [point for point in groups if point in own]
    assert [(groups[a] == groups[b]) for a in asked for b in asked] == [own[a] == own[b] for a in asked for b in asked]


def test_a_value_names_those_whose_scale_it_has() -> None:
    report = pt2qa.annotations(plain("pooled", "xnnpack"))
    outputs = {row.name: row for row in report.rows if row.role == "output"}
    others = outputs["cat"].shares.split(", ")
    assert {"left/conv2d", "max_pool2d", "max_pool2d_1", "max_pool2d_2", "relu"} == set(others)
    assert {outputs[name].scale for name in (*others, "cat")} == {outputs["cat"].scale}
    assert outputs["x"].shares == ""


def test_one_op_with_its_places() -> None:
    pair = plain("residual", "xnnpack")
    rows = places(pt2qa.annotations(pair), "conv2/conv2d")
    assert list(rows) == [("input", 0), ("weight", 1), ("bias", 2), ("output", -1)]
    weight = rows["weight", 1]
    assert (weight.of, weight.axis, weight.scheme) == ("conv2.weight", 0, "per_channel_symmetric")
    assert (weight.observer, weight.quant_min, weight.quant_max) == ("PerChannelMinMaxObserver", -127, 127)
    folded = pair.reference.get_parameter("conv2.weight").detach().double().numpy()
    assert weight.scale == pytest.approx(np.abs(folded).reshape(8, -1).max(1).max() / 127, rel=1e-6)
    assert rows["input", 0].of == "relu/relu"
    assert rows["bias", 2].dtype == "float32"
    assert not rows["bias", 2].annotated
    assert rows["output", -1].annotated


def test_a_fused_relu_reads_float_and_a_folded_batch_norm_says_where_it_is() -> None:
    report = pt2qa.annotations(plain("residual", "xnnpack"))
    relu, norm = places(report, "relu/relu"), places(report, "bn1/batch_norm")
    assert [(row.dtype, row.quantized) for row in relu.values()] == [("float32", False), ("int8", True)]
    assert [(row.quantized, row.note) for row in norm.values()] == [(False, "folded into conv1/conv2d")]


def test_both_arguments_of_an_op_with_two_inputs_are_there() -> None:
    report = pt2qa.annotations(plain("same_input_twice", "xnnpack"))
    assert [(row.role, row.argument, row.of) for row in report.of("add")] == [
        ("input", 0, "cat"),
        ("input", 1, "cat"),
        ("output", -1, "add"),
    ]
    assert [row.argument for row in report.of("cat") if row.role == "input"] == [0, 0]


def test_an_op_that_asks_for_nothing_reads_what_is_rounded_for_all() -> None:
    report = pt2qa.annotations(plain("pooled", "x86"))
    (read, made) = report.of("flatten")
    assert (read.annotated, read.quantized, read.dtype) == (False, True, "uint8")
    assert (made.quantized, made.dtype) == (False, "float32")


class Shaken(nn.Module):
    """A value that a convolution reads rounded, and a sine reads in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        result: Tensor = self.conv(y) + torch.sin(y)
        return result


def test_who_reads_a_rounded_value_in_float_is_named() -> None:
    report = pt2qa.annotations(quantized_pair(Shaken(), images(), "x86"))
    made = places(report, "exp")["output", -1]
    assert (made.quantized, made.annotated, made.note) == (True, False, "read in float by sin")
    assert not places(report, "sin")["input", 0].quantized
    assert places(report, "conv/conv2d")["input", 0].quantized


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_dynamic_scales_are_said_to_be(quantizer: str) -> None:
    pair = quantized_pair(Linears(), torch.randn(3, 16), f"{quantizer}:mode=dynamic")
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    row = places(report, "first/linear")["input", 0]
    assert row.dynamic
    assert row.annotated
    assert math.isnan(row.scale)
    assert pt2qa.diff_annotations(pt2qa.annotations(pair.capture, f"{quantizer}:mode=dynamic"), report).equal


def test_weights_alone() -> None:
    pair = quantized_pair(Linears(), torch.randn(3, 16), "x86:mode=weight_only")
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    assert {row.role for row in report.rows if row.quantized} == {"weight"}


def test_training_places_are_called_as_after_conversion() -> None:
    pair = plain("residual", "xnnpack", qat=True)
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    assert all(row.quantized for row in report.rows if row.annotated)
    conv = places(report, "conv2/conv2d")
    assert conv["output", -1].annotated
    assert conv["output", -1].observer == "FusedMovingAvgObsFakeQuantize"
    assert conv["weight", 1].observer == "FusedMovingAvgObsFakeQuantize(MovingAveragePerChannelMinMaxObserver)"
    assert places(report, "bn2/batch_norm")["output", -1].note == "folded into conv2/conv2d"
    assert pt2qa.annotations(captured("residual")[0], "xnnpack", qat=True).quantizer == "xnnpack for QAT"


def test_keyword_inputs_and_nested_outputs() -> None:
    keyword = quantized_pair(KeywordInputs(), {"x": torch.randn(2, 16), "scale": torch.randn(2, 16)})
    report = pt2qa.annotations(keyword)
    check_sites(report, keyword)
    assert [row.of for row in report.of("mul") if row.role == "input"] == ["x", "scale"]
    nested = quantized_pair(NestedOutputs(), torch.randn(3, 16))
    report = pt2qa.annotations(nested)
    check_sites(report, nested)
    assert {row.name: row.dtype for row in report.rows if row.role == "output"}["argmax"] == "int64"


def test_parameters_are_weights_and_buffers_are_inputs() -> None:
    pair = quantized_pair(Parameters(), images())
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    for listed in (report, pt2qa.annotations(pair.capture, "xnnpack")):
        roles = {row.of: row.role for row in listed.rows if row.of in ("gain", "table")}
        assert roles == {"gain": "weight", "table": "input"}


def test_ops_of_nested_graphs_are_listed_with_the_reason() -> None:
    report = pt2qa.annotations(quantized_pair(Conditional(), torch.randn(3, 16)))
    nested = [row for row in report.rows if row.note.startswith("inside a nested graph")]
    assert {row.op for row in nested} == {"linear", "relu", "sub"}
    assert {row.dtype for row in nested} == {"float32"}
    assert {kind.op: kind.total for kind in report.coverage} == {
        "sum": 1,
        "gt": 1,
        "cond": 1,
        "getitem": 1,
        "linear": 1,
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("stranger", ["samsung", "cadence"])
def test_quantizers_of_others(stranger: str) -> None:
    make, qat = STRANGERS[stranger]
    pair = pt2qa.quantize(captured("pooled")[0], make(), [images()], qat=qat, progress=False)
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    assert all(row.annotated for row in report.rows if row.role == "weight")
    assert pt2qa.diff_annotations(make(), pair, capture=captured("pooled")[0]).equal
    if stranger == "cadence":
        bias = places(report, "left/conv2d")["bias", 2]
        assert (bias.dtype, bias.observer) == ("int32", "")
        assert bias.note == "its scale is derived from those of x, left.weight"


def test_overrides_are_listed() -> None:
    plan = OverridePlan((Edit("float", ("cat",)),))
    capture, batch = captured("pooled")
    pair = pt2qa.quantize(capture, "xnnpack", [batch], overrides=plan, progress=False)
    report = pt2qa.annotations(pair)
    assert not any(row.annotated for row in report.of("cat"))
    assert pt2qa.diff_annotations(report, pt2qa.annotations(capture, "xnnpack", overrides=plan)).equal
    assert "overrides: 1 float" in report.notes


def test_of_graphs_from_elsewhere_only_what_they_hold_is_said() -> None:
    capture, _ = captured("residual")
    _, converted = made_elsewhere(capture, images())
    pair = pt2qa.pair(capture.module(), converted)
    report = pt2qa.annotations(pair)
    check_sites(report, pair)
    assert report.basis == "converted"
    assert not any(row.annotated or row.observer or row.shares for row in report.rows)
    assert {row.scheme for row in report.rows if row.quantized} == {"per_tensor", "per_channel"}
    assert {kind.annotated for kind in report.coverage} == {-1}
    (note,) = report.notes
    assert note.startswith("the pair was not made by pt2qa.quantize: its annotations, observers and shared")
    ours = pt2qa.annotations(plain("residual", "xnnpack"))
    assert [(row.name, row.role, row.dtype, row.axis) for row in report.rows] == [
        (row.name, row.role, row.dtype, row.axis) for row in ours.rows
    ]


class Modules(nn.Module):
    """Called twice, called once, never called, and never called though its weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.once = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.read = nn.Linear(8, 8)
        self.again = self.once

    def forward(self, x: Tensor) -> Tensor:
        x = self.once(self.twice(self.twice(x)))
        return F.linear(x, self.read.weight)


def test_calls_of_modules_are_counted() -> None:
    report = pt2qa.annotations(pt2qa.capture(Modules().eval(), torch.randn(2, 8)), "xnnpack")
    calls = {module.path: (module.type, module.calls, module.ops, module.quantized) for module in report.modules}
    assert calls == {
        "twice": ("Sequential", 2, 4, 3),
        "twice.0": ("Linear", 2, 2, 2),
        # XNNPACK fuses linear and relu once for each weight, so that the second relu reads a rounded value.
        "twice.1": ("ReLU", 2, 2, 1),
        "once": ("Linear", 1, 1, 1),
        "never": ("", 0, 0, 0),
        "read": ("", 0, 0, 0),
    }
    notes = {module.path: module.note for module in report.modules if module.note}
    assert notes == {
        "never": "never called; nothing reads its parameters",
        "read": "never called; its parameters are read by linear",
    }


def test_batch_norms_are_called_and_leave_no_op() -> None:
    report = pt2qa.annotations(plain("residual", "xnnpack"))
    norm = next(module for module in report.modules if module.path == "bn1")
    assert (norm.type, norm.calls, norm.ops) == ("BatchNorm2d", 1, 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (lambda: (captured("residual")[0],), "got a capture without a quantizer. Call"),
        (lambda: (plain("residual", "xnnpack"), "x86"), "got a pair, made by xnnpack, and quantizer"),
        (lambda: (nn.ReLU(),), "got ReLU, expected what pt2qa.quantize or pt2qa.pair returned, or a capture"),
    ],
    ids=["capture alone", "pair with a quantizer", "neither"],
)
def test_what_it_cannot_list_is_refused(arguments, error: str) -> None:
    with pytest.raises(SelectionError, match=error):
        pt2qa.annotations(*arguments())
