"""Outliers of norms that are moved into weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._repair.smoothing import Smoothing
from pt2qa._simulator.data import Data
from pt2qa._trials.folds import Folds
from pt2qa.overrides.norms import norms_in
from pt2qa.overrides.plan import in_base64
from tests.flows import direct_sqnr, quantized_pair
from tests.repair.nets import encoder_pair, sequences

QUANTIZERS = ("xnnpack:per_channel=false", "xnnpack", "x86", "xnnpack:mode=dynamic")
HELD_OUT = sequences(seed=9)


def measured(pair: pt2qa.QuantizedPair) -> float:
    reference, quantized = ([graph(x) for x in HELD_OUT] for graph in (pair.float_graph, pair.quantized))
    return direct_sqnr(torch.cat(reference), torch.cat(quantized))


@pytest.fixture(scope="module", params=QUANTIZERS)
def repaired(request: pytest.FixtureRequest) -> pt2qa.Reconfiguration:
    return pt2qa.repair(encoder_pair(request.param, 50.0), HELD_OUT, progress=False)


def test_planted_outliers_are_taken_back(repaired: pt2qa.Reconfiguration) -> None:
    without, planted = (measured(encoder_pair(repaired.quantizer, factor)) for factor in (1.0, 50.0))
    assert planted < without - 10
    assert measured(repaired.pair) > without - 1


def test_the_reference_is_the_users_model(repaired: pt2qa.Reconfiguration) -> None:
    pair = encoder_pair(repaired.quantizer, 50.0)
    assert pair.capture is not None
    model = pair.capture.module()
    for x in HELD_OUT:
        assert torch.equal(repaired.pair.reference(x), pair.reference(x))
        assert torch.equal(repaired.pair.reference(x), model(x))

    def ops(each: pt2qa.QuantizedPair) -> Counter[str]:
        return Counter(str(node.target) for node in each.quantized.graph.nodes if node.op == "call_function")

    assert ops(repaired.pair) == ops(pair)


def test_norms_that_stay_as_they_are_are_counted() -> None:
    pair = encoder_pair("x86", 50.0)
    look = Smoothing.look(pair, Folds.of(pair, Data("calibration", sequences())))
    assert look.left_out == "2 of 5 norms unchanged: not read by quantized linears only"


def test_the_plan_and_the_printed_code_give_the_same(repaired: pt2qa.Reconfiguration) -> None:
    # x86's quantizer leaves the projection of an nn.MultiheadAttention in float.
    assert Counter(edit.kind for edit in repaired.plan.edits)["smooth"] == (3 if repaired.quantizer == "x86" else 5)
    assert repaired.code_verified == "equal"
    pair = encoder_pair(repaired.quantizer, 50.0)
    assert pair.capture is not None
    assert pair.capture.eager is not None
    plan = OverridePlan.from_json(repaired.plan_json)
    again = pt2qa.quantize(
        pt2qa.capture(pair.capture.eager, sequences()[0]), pair.quantizer, sequences(), overrides=plan, progress=False
    )
    for x in HELD_OUT:
        assert torch.equal(again.quantized(x), repaired.pair.quantized(x))


def test_any_flow_that_takes_a_quantizer_can_smooth() -> None:
    pair, batches = encoder_pair("xnnpack", 50.0), sequences()
    assert pair.capture is not None
    assert pair.capture.eager is not None
    fit = Smoothing.look(pair, Folds.of(pair, Data("calibration", batches))).fit((0, 1))
    plan = OverridePlan(fit.edits)
    expected = pt2qa.quantize(pair.capture, "xnnpack", batches, overrides=plan, progress=False)
    graph = torch.export.export(pair.capture.eager, (batches[0],)).module()
    assert isinstance(graph, GraphModule)
    prepared = prepare_pt2e(graph, plan.apply_to("xnnpack"))
    for batch in batches:
        prepared(batch)
    assert torch.equal(convert_pt2e(prepared)(batches[0]), expected.quantized(batches[0]))
    assert torch.equal(pair.capture.eager(batches[0]), pair.reference(batches[0]))


class Block(nn.Module):
    """A norm, and what else of it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(8, elementwise_affine=kind != "without weights")
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        if kind == "tied":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "written out":
            found = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True)))
        else:
            found = self.norm(x)
        if self.kind == "mixed":
            found = found.reshape(-1, 4, 2).transpose(1, 2).reshape(-1, 8)
        elif self.kind == "rearranged":
            found = found.unsqueeze(0).transpose(0, 1)[:, 0].reshape(2, -1, 8).permute(1, 0, 2).flatten(0, 1)
        result: Tensor = self.first(found) * self.second(found)
        return result + found if self.kind == "residual" else result


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("plain", True),
        ("written out", True),
        ("rearranged", True),
        ("mixed", False),
        ("residual", False),
        ("tied", False),
        ("without weights", False),
    ],
)
def test_which_norms_can_be_smoothed(kind: str, possible: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    pair = quantized_pair(Block(kind), x, "xnnpack")
    assert pair.float_graph is not None
    found = [each for each in norms_in(pair.float_graph, pair.names) if each.can_smooth]
    assert len(found) == possible
    if not possible:
        with pytest.raises(pt2qa.SelectionError, match="no norm with a weight is read by quantized linears only"):
            Smoothing.look(pair, Folds.of(pair, Data("calibration", [x])))
    for each in found:
        plan = OverridePlan((Edit("smooth", each.ops, values=in_base64([2.0**power for power in range(-4, 4)])),))
        assert pair.capture is not None
        new = pt2qa.quantize(pair.capture, "xnnpack", [x], overrides=plan, progress=False)
        assert torch.equal(new.reference(x), pair.reference(x))
        assert not torch.equal(new.quantized(x), pair.quantized(x))


def test_what_cannot_be_smoothed_is_said() -> None:
    x = torch.randn(6, 8)
    pair = quantized_pair(Block("plain"), x, "xnnpack")
    assert pair.capture is not None
    ops = ("norm/layer_norm", "first/linear", "second/linear")
    for names, count, message in (
        (ops[:2], 8, "these are not a norm and all that reads it"),
        (ops[1:], 8, "these are not a norm and all that reads it"),
        (ops, 4, r"norm.weight has the shape \(8,\)"),
    ):
        plan = OverridePlan((Edit("smooth", names, values=in_base64([2.0] * count)),))
        with pytest.raises(pt2qa.QuantizeError, match=message):
            pt2qa.quantize(pair.capture, "xnnpack", [x], overrides=plan, progress=False)
