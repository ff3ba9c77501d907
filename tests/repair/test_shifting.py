"""Offsets of a norm's channels that are moved into the biases around it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._repair.shifting import Shifting
from pt2qa._simulator.data import Data
from pt2qa._trials.outcome import Folds
from pt2qa.overrides.parameters import norms_in
from pt2qa.overrides.plan import in_base64
from tests.flows import direct_sqnr, quantized_pair
from tests.repair.kept import check_plan, check_reference
from tests.repair.nets import post_norm_pair, sequences

QUANTIZERS = ("xnnpack:per_channel=false", "x86", "xnnpack:mode=dynamic")
HELD_OUT = sequences(seed=9)


def measured(pair: pt2qa.QuantizedPair) -> float:
    reference, quantized = ([graph(x) for x in HELD_OUT] for graph in (pair.float_graph, pair.quantized))
    return direct_sqnr(torch.cat(reference), torch.cat(quantized))


@pytest.fixture(scope="module", params=QUANTIZERS)
def repaired(request: pytest.FixtureRequest) -> pt2qa.Reconfiguration:
    pair = post_norm_pair(request.param, 30.0)
    return pt2qa.repair(pair, HELD_OUT, methods=["shifting"], progress=False)


def test_planted_offsets_are_taken_back(repaired: pt2qa.Reconfiguration) -> None:
    without, planted = (measured(post_norm_pair(repaired.quantizer, offset)) for offset in (0.0, 30.0))
    assert planted < without - 6
    assert measured(repaired.pair) > without - 1


def test_the_reference_is_the_users_model_but_for_float_rounding(repaired: pt2qa.Reconfiguration) -> None:
    check_reference(post_norm_pair(repaired.quantizer, 30.0), repaired, HELD_OUT)


def test_the_plan_and_the_printed_code_give_the_same(repaired: pt2qa.Reconfiguration) -> None:
    assert Counter(edit.kind for edit in repaired.plan.edits) == {"shift": 3 if repaired.quantizer == "x86" else 4}
    check_plan(post_norm_pair(repaired.quantizer, 30.0), repaired, HELD_OUT)


def test_any_flow_that_takes_a_quantizer_can_shift() -> None:
    pair, batches = post_norm_pair("x86", 30.0), sequences()
    assert pair.capture is not None
    assert pair.capture.eager is not None
    fit = Shifting.look(pair, Folds(pair, Data("calibration", batches))).fit((0, 1))
    plan = OverridePlan(fit.edits)
    expected = pt2qa.quantize(pair.capture, "x86", batches, overrides=plan, progress=False)
    graph = torch.export.export(pair.capture.eager, (batches[0],)).module()
    assert isinstance(graph, GraphModule)
    prepared = prepare_pt2e(graph, plan.apply_to("x86"))
    for batch in batches:
        prepared(batch)
    assert torch.equal(convert_pt2e(prepared)(batches[0]), expected.quantized(batches[0]))


class Block(nn.Module):
    """A norm, and what else of it is read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(8, bias=kind != "norm without bias")
        self.offset = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=kind != "linear without bias")
        self.third = nn.Linear(8, 8)
        if kind == "tied":
            self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        found = x * 2 + self.offset if self.kind == "written out" else self.norm(x)
        if self.kind == "mixed":
            found = found.reshape(-1, 4, 2).transpose(1, 2).reshape(-1, 8)
        result: Tensor = self.first(found) * self.second(found)
        if self.kind == "residual":
            return found + self.third(result).unsqueeze(0).squeeze(0)
        if self.kind == "residual of an activation":
            return found + self.third(result).relu()
        if self.kind == "residual that is read twice":
            other = self.third(result)
            return found + other + other
        return result * found if self.kind == "multiplied" else result


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("plain", True),
        ("written out", True),
        ("residual", True),
        ("residual of an activation", False),
        ("residual that is read twice", False),
        ("multiplied", False),
        ("mixed", True),
        ("tied", False),
        ("norm without bias", False),
        ("linear without bias", False),
    ],
)
@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_which_norms_can_be_shifted(kind: str, possible: bool, quantizer: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    pair = quantized_pair(Block(kind), x, quantizer)
    assert pair.float_graph is not None
    found = norms_in(pair.float_graph, pair.names).chains
    assert len(found) == possible
    if not possible:
        with pytest.raises(pt2qa.SelectionError, match="no quantized norm has a bias that the biases around"):
            Shifting.look(pair, Folds(pair, Data("calibration", [x])))
    for each in found:
        plan = OverridePlan((Edit("shift", each.ops, values=in_base64([float(number) for number in range(8)])),))
        assert pair.capture is not None
        new = pt2qa.quantize(pair.capture, quantizer, [x], overrides=plan, progress=False)
        assert direct_sqnr(pair.reference(x), new.reference(x)) > 100
        assert not torch.equal(new.quantized(x), pair.quantized(x))


@pytest.mark.parametrize("kinds", [("shift", "scale"), ("scale", "shift")])
def test_edits_of_a_norm_are_made_in_their_order(kinds: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    pair = quantized_pair(Block("plain"), x, "x86")
    assert pair.capture is not None
    ops = ("norm/layer_norm", "first/linear", "second/linear")
    values = {"shift": [float(number) for number in range(8)], "scale": [2.0**power for power in range(-4, 4)]}
    plan = OverridePlan(tuple(Edit(kind, ops, values=in_base64(values[kind])) for kind in kinds))  # type: ignore[arg-type]
    new = pt2qa.quantize(pair.capture, "x86", [x], overrides=plan, progress=False)
    assert direct_sqnr(pair.reference(x), new.reference(x)) > 100
    last = new.reference.get_parameter("norm.bias").detach()
    shift, factors = (torch.tensor(values[kind]) for kind in ("shift", "scale"))
    own = Block("plain").norm.bias.detach()
    assert torch.equal(last, (own - shift) / factors if kinds[0] == "shift" else own / factors - shift)


def test_what_cannot_be_shifted_is_said() -> None:
    x = torch.randn(6, 8)
    pair = quantized_pair(Block("residual"), x, "xnnpack")
    assert pair.capture is not None
    ops = ("norm/layer_norm", "first/linear", "second/linear", "third/linear")
    for kind, names, count, message in (
        ("shift", ops[:3], 8, "these are not a norm and all that reads it, linears with weights, or are added to it"),
        ("shift", ops[1:], 8, "these are not a norm and all that reads it"),
        ("shift", ops, 4, r"norm/layer_norm has 8 channels to shift"),
        ("scale", ops, 8, "these are not all ops that write and read the same channels, with weights of their own"),
    ):
        plan = OverridePlan((Edit(kind, names, values=in_base64([2.0] * count)),))  # type: ignore[arg-type]
        with pytest.raises(pt2qa.QuantizeError, match=message):
            pt2qa.quantize(pair.capture, "xnnpack", [x], overrides=plan, progress=False)


def test_norms_that_stay_as_they_are_are_counted() -> None:
    # x86's quantizer leaves the projection of an nn.MultiheadAttention in float, which reads the second norm.
    pair = post_norm_pair("x86", 30.0)
    look = Shifting.look(pair, Folds(pair, Data("calibration", sequences())))
    assert [chain.ops[0] for chain in look.chains] == [
        f"layers.{norm}/layer_norm" for norm in ("0.norm1", "1.norm1", "1.norm2")
    ]
    assert look.left_out == ("1 of 4 norms unchanged: not quantized, or no biases to absorb a shift")
