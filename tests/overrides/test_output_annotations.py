"""Quantizers that annotate the graph's output node, as those of Arm do: it is a place like any other."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, SharedQuantizationSpec

import pt2qa
from pt2qa import Edit, OverridePlan
from pt2qa.overrides import annotations_of, edited
from tests.check.plain_quantizer import PER_TENSOR, SIGNED, PlainQuantizer
from tests.overrides.flows import check_prediction, places

WIDE = QuantizationSpec(torch.int16, MinMaxObserver, -32768, 32767, torch.per_tensor_affine)


class AtTheEnds(PlainQuantizer):
    """Rounds what linears read, the model's inputs and its outputs.

    Args:
        shared: whether outputs have the scale of an input.
        fine: whether only the outputs have 8 bits: the rest has 16.
    """

    def __init__(self, *, shared: bool = False, fine: bool = False) -> None:
        super().__init__(inputs=WIDE if fine else SIGNED, weights=None if fine else PER_TENSOR)
        self.shared = shared

    def annotate(self, model: GraphModule) -> GraphModule:
        super().annotate(model)
        (first, *_), end = model.graph.find_nodes(op="placeholder"), model.graph.output_node()
        first.meta["quantization_annotation"] = QuantizationAnnotation({}, self.inputs, _annotated=True)
        spec = SharedQuantizationSpec(first) if self.shared else SIGNED
        edges = dict.fromkeys(end.all_input_nodes, spec)
        end.meta["quantization_annotation"] = QuantizationAnnotation(edges, None, _annotated=True)
        return model


class TwoOutputs(nn.Module):
    """Returns a value that a tanh reads too, the tanh, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return {"y": y, "z": torch.tanh(y), "table": self.table * 2}


BATCH = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@functools.cache
def captured() -> pt2qa.Capture:
    torch.manual_seed(0)
    return pt2qa.capture(TwoOutputs().eval(), BATCH)


@functools.cache
def quantized(shared: bool = False) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(captured(), AtTheEnds(shared=shared), [BATCH], progress=False)


def test_outputs_are_rounded_and_every_analysis_takes_the_pair() -> None:
    pair = quantized()
    assert {site.name for site in pair.sites if site.kind == "activation"} >= {"x", "second/linear", "tanh"}
    pair.verify(BATCH)
    layers = pt2qa.compare_layers(pair, [BATCH], progress=False)
    assert {row.name: row.observed_at for row in layers.rows}["tanh"] == "dq"
    sensitivities = pt2qa.sensitivity(pair, [BATCH], method="exact", progress=False)
    assert {row.name for row in sensitivities.rows if row.value < 60} >= {"second/linear", "tanh", "output"}
    assert not [rule for rule in pt2qa.check(pair, batches=[BATCH]).rules if rule.outcome == "failed"]
    assert "at output.y" in str(pt2qa.diagnose(pair, [BATCH], progress=False))


def test_the_list_says_that_the_output_is_asked_for_before_and_after_conversion() -> None:
    for report in (pt2qa.annotations(captured(), AtTheEnds()), pt2qa.annotations(quantized())):
        outputs = {row.name: row for row in report.rows if row.role == "output"}
        for name in ("second/linear", "tanh"):
            assert (outputs[name].dtype, outputs[name].annotated, outputs[name].quantized) == ("int8", True, True)
        assert not any(row.op == "output" for row in report.rows)


def test_a_site_stays_until_the_output_is_in_float_too() -> None:
    annotations, pair = annotations_of(captured(), AtTheEnds()), quantized()
    assert annotations.sites_on(pair.sites) == set(range(len(pair.sites)))
    edit = Edit("float", ("output",))
    after = pt2qa.quantize(captured(), AtTheEnds(), [BATCH], overrides=OverridePlan((edit,)), progress=False)
    check_prediction(annotations.with_edits([edit]), pair, after)
    gone = places(pair.sites) - places(after.sites)
    assert set(gone) == {("activation", "second/linear"), ("activation", "tanh"), ("activation", "output")}


def test_an_output_that_shares_the_scale_of_an_input_keeps_it_when_the_input_goes() -> None:
    pair = quantized(shared=True)
    scales = {site.name: site.params.scale for site in pair.sites if site.kind == "activation"}
    assert scales["x"] == scales["second/linear"] == scales["tanh"]
    plan = OverridePlan((Edit("float", ("x",)),))
    annotations_of(captured(), AtTheEnds(shared=True), plan.edits)
    after = pt2qa.quantize(captured(), AtTheEnds(shared=True), [BATCH], overrides=plan, progress=False)
    assert {site.name for site in after.sites} >= {"second/linear", "tanh"}


def test_reconfigure_leaves_an_output_in_float_where_its_rounding_is_the_error() -> None:
    pair = pt2qa.quantize(captured(), AtTheEnds(fine=True), [BATCH], progress=False)
    found = pt2qa.reconfigure(pair, [BATCH], target="sqnr>=60", progress=False)
    assert found.plan.edits == (Edit("float", ("output",)),)


def test_what_goes_wrong_around_a_quantizer_is_not_said_to_be_the_quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise KeyError("output")

    monkeypatch.setattr(edited, "read_annotations", broken)
    with pytest.raises(KeyError, match="output"):
        pt2qa.quantize(captured(), AtTheEnds(), [BATCH], progress=False)
    with pytest.raises(KeyError, match="output"):
        annotations_of(captured(), AtTheEnds())


class Careless(PlainQuantizer):
    """Lets an op share the scale of a place that has none, which torchao's prepare refuses."""

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in super().annotate(model).graph.nodes:
            if node.op == "call_function":
                spec = SharedQuantizationSpec(model.graph.output_node())
                node.meta["quantization_annotation"] = QuantizationAnnotation({}, spec, _annotated=True)
        return model


class Strict(PlainQuantizer):
    """Refuses what it has annotated."""

    def validate(self, model: GraphModule) -> None:
        raise RuntimeError("no kernel for linear")


@pytest.mark.parametrize(
    ("quantizer", "text"),
    [
        (Careless(), "^torchao could not prepare the model as Careless annotated it: KeyError"),
        (Strict(), "^Strict could not annotate the model: RuntimeError: no kernel for linear"),
    ],
)
def test_an_error_of_prepare_is_torchaos_and_one_of_the_quantizers_methods_the_quantizers(
    quantizer: PlainQuantizer, text: str
) -> None:
    with pytest.raises(pt2qa.QuantizeError, match=text):
        pt2qa.quantize(captured(), quantizer, [BATCH], progress=False)
