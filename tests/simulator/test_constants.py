"""Ops that compute with constants alone: their reference is what the float model computes, in every report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa._graph.handles import op_of
from pt2qa._simulator.simulator import tensors_equal
from pt2qa.overrides import annotations_of
from tests.check.plain_quantizer import PER_TENSOR, SIGNED
from tests.flows import direct_sqnr, quantized_pair
from tests.models import Parameters, images
from tests.overrides.strangers import samsung


class Positions(nn.Module):
    """Words, their places and their kind looked up and added, as every BERT does; places and kinds are constants."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(30, 16), nn.Embedding(12, 16), nn.Embedding(2, 16)
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("ids", torch.arange(12)[None])

    def forward(self, tokens: Tensor) -> Tensor:
        ids = self.ids[:, : tokens.shape[1]]
        result: Tensor = self.fc(self.norm(self.word(tokens) + self.kind(torch.zeros_like(ids)) + self.place(ids)))
        return result


class Rounds(Quantizer):  # type: ignore[misc]  # torchao is not typed
    """Rounds every floating-point input of some kinds of op, parameters too, and every result."""

    def __init__(self, *ops: str) -> None:
        super().__init__()
        self.ops = ops

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and op_of(node.target) in self.ops:
                sources = [source for source in node.all_input_nodes if source.meta["val"].is_floating_point()]
                edges = {source: PER_TENSOR if source.op == "get_attr" else SIGNED for source in sources}
                node.meta["quantization_annotation"] = QuantizationAnnotation(edges, SIGNED, _annotated=True)
        return model

    def validate(self, model: GraphModule) -> None:
        return None


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(seed))


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "own": lambda: Rounds("embedding", "add", "linear"),
    "samsung": samsung,
}


@pytest.fixture(params=QUANTIZERS)
def pair(request: pytest.FixtureRequest) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(Positions(), tokens(), QUANTIZERS[request.param]())


def test_an_op_on_constants_alone_is_compared_like_any_other(pair: pt2qa.QuantizedPair) -> None:
    assert pair.program.notes == ()
    report = pt2qa.compare_layers(pair, [tokens(), tokens(1)], progress=False)
    rows = {row.name: row for row in report.rows}
    assert {"word/embedding", "place/embedding", "kind/embedding"} <= rows.keys()
    expected: Tensor = pair.reference.get_parameter("place.weight")[:8][None]
    site = next(site for site in pair.sites if (site.kind, site.name) == ("activation", "place/embedding"))
    weight = next(c.quantized for c in pair.program.constants if c.attribute == "place.weight")
    args = (site.params.scale, site.params.zero_point, site.params.quant_min, site.params.quant_max)
    rounded = torch.fake_quantize_per_tensor_affine(weight[:8][None], *args)
    assert rows["place/embedding"].sqnr == pytest.approx(direct_sqnr(expected, rounded), abs=1e-6)
    assert report.sqnr == pytest.approx(
        direct_sqnr(*(torch.cat([graph(tokens()), graph(tokens(1))]) for graph in (pair.reference, pair.quantized))),
        abs=1e-6,
    )


def test_its_weight_is_compared_and_its_sites_are_ranked(pair: pt2qa.QuantizedPair) -> None:
    weights = {(row.name, row.attr): row for row in pt2qa.compare_weights(pair).rows if row.quantized}
    table = weights["place/embedding", "weight"]
    assert table.shape == (12, 16)
    assert table.max_lsb <= 0.5 + 1e-4
    exact, projection = (
        pt2qa.sensitivity(pair, [tokens()], method=method, progress=False).rows  # type: ignore[arg-type]
        for method in ("exact", "projection")
    )
    places = {(row.kind, row.name) for row in exact}
    assert {("weight", "place/embedding"), ("activation", "place/embedding")} <= places
    assert {(row.kind, row.name) for row in projection} == places
    (reference,) = pair.simulator.run([tokens()], on=False)
    for row in exact:
        (alone,) = pair.simulator.run([tokens()], on={row.site})
        assert row.value == pytest.approx(direct_sqnr(reference, alone), abs=1e-6), row.name
    assert all(row.value > 20 for row in projection)


def test_no_rule_of_the_check_fails_on_it(pair: pt2qa.QuantizedPair) -> None:
    assert not [rule for rule in pt2qa.check(pair).rules if rule.outcome == "failed"]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_edits_know_its_sites(quantizer: str) -> None:
    capture, make = pt2qa.capture(Positions().eval(), tokens()), QUANTIZERS[quantizer]
    before = pt2qa.quantize(capture, make(), [tokens()], progress=False)
    annotations = annotations_of(capture, make())
    assert annotations.sites_on(before.sites) == set(range(len(before.sites)))
    edit = Edit("float", ("place/embedding",))
    after = pt2qa.quantize(capture, make(), [tokens()], overrides=OverridePlan((edit,)), progress=False)
    predicted = before.simulator.run([tokens()], on=annotations.with_edits([edit]).sites_on(before.sites))
    assert len(after.sites) == len(before.sites) - 1
    assert torch.equal(predicted[0], after.quantized(tokens()))
    assert pt2qa.compare_layers(after, [tokens()], progress=False).notes[1:] == ()


class LooksUp(nn.Module):
    """A linear on the input and one on a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(16, 8)
        self.register_buffer("table", torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) + self.b(self.table)
        return result


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_linear_on_a_buffer(mode: str) -> None:
    """Scales that dynamic quantization chooses from a constant are constants."""
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    pair = quantized_pair(LooksUp(), x, f"xnnpack:mode={mode}")
    report = pt2qa.compare_layers(pair, [x], progress=False)
    assert report.sqnr == pytest.approx(direct_sqnr(pair.reference(x), pair.quantized(x)), abs=1e-6)
    assert "b/linear" in {row.name for row in report.rows}
    table = next(row for row in pt2qa.compare_weights(pair).rows if row.attr == "table")
    scale = float(np.ptp(pair.reference.get_buffer("table").numpy())) / 255
    assert table.scale == pytest.approx(scale, rel=0.01)


class Reshaped(nn.Module):
    """Weights that are cut and turned before they are read, one of them an output as well."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.returned = returned
        self.both = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Any:
        weight = self.both * 1.0
        left, right = weight.chunk(2)
        result = x @ left.t() + x @ right.t()
        return (result, weight) if self.returned else result


@pytest.mark.parametrize("returned", [False, True])
def test_parts_of_a_rounded_constant_have_parts_of_the_float_one_as_reference(returned: bool) -> None:
    torch.manual_seed(0)
    model, x = Reshaped(returned), torch.randn(3, 16)
    pair = quantized_pair(model, x, Rounds("mul", "add"))
    assert pair.program.notes == ()
    report = pt2qa.compare_layers(pair, [x], progress=False)
    reference, quantized = pair.reference(x), pair.quantized(x)
    if returned:
        assert torch.equal(reference[1], model.both)
        assert [output.sqnr for output in report.outputs] == pytest.approx(
            [direct_sqnr(ref, quant) for ref, quant in zip(reference, quantized, strict=True)], abs=1e-6
        )
    else:
        assert report.sqnr == pytest.approx(direct_sqnr(reference, quantized), abs=1e-6)


def test_parameters_are_told_from_buffers_and_literals() -> None:
    pair = quantized_pair(Parameters(), images())
    found = {constant.attribute: constant.is_parameter for constant in pair.program.constants if constant.attribute}
    assert found == {"conv.weight": True, "conv.bias": True, "gain": True, "table": False}


class Selects(Rounds):
    """Looks words up by ``index_select``, as Arm's does: ops that it puts in without handles."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            weight, words = node.args
            with model.graph.inserting_before(node):
                flat = model.graph.call_function(torch.ops.aten.reshape.default, (words, [-1]))
                found = model.graph.call_function(torch.ops.aten.index_select.default, (weight, 0, flat))
                shaped = model.graph.call_function(
                    torch.ops.aten.reshape.default, (found, list(node.meta["val"].shape))
                )
            value = node.meta["val"]
            flat.meta["val"], shaped.meta["val"] = words.meta["val"].reshape(-1), value
            found.meta["val"] = value.reshape(-1, value.shape[-1])
            node.replace_all_uses_with(shaped)
            model.graph.erase_node(node)
        model.recompile()
        return model


def test_constants_that_ops_without_a_handle_read_have_their_float_value() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    words = torch.arange(10).reshape(2, 5)
    pair = quantized_pair(model, words, Selects("index_select", "linear"))
    assert not [note for note in pair.program.notes if "no float value" in note]
    report = pt2qa.compare_layers(pair, [words], progress=False)
    with torch.no_grad():
        assert report.outputs[0].sqnr == pytest.approx(direct_sqnr(model(words), pair.quantized(words)), abs=1e-3)
    (table,) = (site for site in pair.sites if site.kind == "weight" and site.op == "index_select")
    exact = pt2qa.sensitivity(pair, [words], method="exact", progress=False)
    (row,) = (row for row in exact.rows if row.site == table.index)
    assert 20 < row.value < 80


def test_a_rounded_weight_may_stand_for_two_of_the_float_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data + 0.01
    pair = quantized_pair(model, x)
    shared = copy.deepcopy(pair.quantized)
    first, second = (node for node in shared.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))
    second.args = (second.args[0], first.args[1], *second.args[2:])
    shared.graph.eliminate_dead_code()
    shared.recompile()
    made = pt2qa.pair(pair.reference, shared)
    assert tensors_equal(made.simulator.run([x], on=False), made.reference(x))
    assert tensors_equal(made.simulator.run([x], on=True), made.quantized(x))
