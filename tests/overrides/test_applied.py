"""A plan in a flow that pt2qa does not run: the user's own export, prepare, calibration and convert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import pt2qa
from pt2qa import Edit, OverridePlan, PluginError, QuantizeError, SelectionError
from pt2qa._graph.handles import names_of, op_of
from tests.models import Loop
from tests.overrides.flows import captured, edited
from tests.overrides.nets import NETS

FIRST = ("conv1/conv2d", "bn1/batch_norm", "relu/relu")
STEM = Edit("fuse", ("stem.0/conv2d", "stem.2/hardtanh"))
EDITS = [
    ("residual", "xnnpack", (Edit("float", FIRST),)),
    ("mobile", "x86", (Edit("float", ("blocks.0.project.0/conv2d", "blocks.0.project.1/batch_norm")),)),
    ("pooled", "xnnpack", (Edit("float", ("max_pool2d_1", "cat")),)),
    ("linear_twice", "x86", (Edit("float", ("fc/linear_1",)),)),
    ("mobile", "xnnpack", (STEM,)),
    ("mobile", "xnnpack", (Edit("dynamic", ("fc/linear",)),)),
    ("mobile", "x86", (Edit("dynamic", ("fc/linear",)),)),
    ("mobile", "xnnpack", (Edit("observer", ("blocks.0/add",), "minmax"), STEM, Edit("float", ("mean",)))),
    ("mobile", "x86", (Edit("observer", ("stem.0/conv2d", "fc/linear"), "minmax"),)),
    ("mobile", "object", (Edit("int16", ("blocks.0.project.0/conv2d", "fc/linear")),)),
]
QAT_EDITS = [
    ("residual", "xnnpack", (Edit("float", FIRST),)),
    ("mobile", "x86", (Edit("float", ("fc/linear",)),)),
    ("mobile", "xnnpack", (STEM,)),
]


def given(quantizer: str) -> Any:
    """A name, or a torchao object for backends that say nothing about themselves."""
    if quantizer != "object":
        return quantizer
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())


def plain(net: str, *, strict: bool) -> GraphModule:
    model, batch = NETS[net]()
    graph = torch.export.export(model, batch, strict=strict).module()
    assert isinstance(graph, GraphModule)
    return graph


def exported_again(net: str) -> GraphModule:
    capture, batch = captured(net)
    graph = torch.export.export(capture.module(), batch, strict=True).module()
    assert isinstance(graph, GraphModule)
    return graph


GRAPHS: dict[str, Callable[[str], GraphModule]] = {
    "plain": lambda net: plain(net, strict=False),
    "plain strict": lambda net: plain(net, strict=True),
    "captured": lambda net: copy.deepcopy(captured(net)[0].module()),
    "exported again": exported_again,
}


def converted(graph: GraphModule, quantizer: Quantizer, batch: tuple[Tensor, ...], *, qat: bool = False) -> GraphModule:
    """What a flow without pt2qa does."""
    prepared = (prepare_qat_pt2e if qat else prepare_pt2e)(graph, quantizer)
    if qat:
        move_exported_model_to_eval(prepared)
    prepared(*batch)
    result: GraphModule = convert_pt2e(prepared)
    return result


def rounding(graph: GraphModule) -> list[tuple[str, tuple[Any, ...]]]:
    """Each op of a graph in order, with its numbers: those of a quantize op are scale, zero point and range."""
    return [
        (op_of(node.target), tuple(arg for arg in node.args if isinstance(arg, int | float | torch.dtype)))
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize("graph", ["plain", "plain strict", "exported again"])
@pytest.mark.parametrize(("net", "quantizer", "edits"), EDITS)
def test_the_outputs_are_those_of_quantize(net: str, quantizer: str, edits: tuple[Edit, ...], graph: str) -> None:
    _, batch = captured(net)
    theirs = converted(GRAPHS[graph](net), OverridePlan(edits).apply_to(given(quantizer)), batch)
    ours = edited(net, given(quantizer), *edits).quantized
    assert torch.equal(theirs(*batch), ours(*batch))
    assert rounding(theirs) == rounding(ours) != rounding(edited(net, given(quantizer)).quantized)
    assert bool(names_of(theirs)) == ("plain" not in graph)


@pytest.mark.parametrize("graph", ["plain", "captured"])
@pytest.mark.parametrize(("net", "quantizer", "edits"), QAT_EDITS)
def test_so_it_is_for_training(net: str, quantizer: str, edits: tuple[Edit, ...], graph: str) -> None:
    _, batch = captured(net)
    theirs = converted(GRAPHS[graph](net), OverridePlan(edits).apply_to(quantizer, qat=True), batch, qat=True)
    ours = edited(net, quantizer, *edits, qat=True).quantized
    assert torch.equal(theirs(*batch), ours(*batch))
    assert rounding(theirs) == rounding(ours)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", ["plain", "exported again"])
@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (("conv1/conv",), "the model has no op 'conv1/conv'; did you mean 'conv1/conv2d'"),
        (("conv1/conv2d", "bn9/batch_norm"), "the model has no op 'bn9/batch_norm'; did you mean"),
        (("bn1/batch_norm",), "bn1/batch_norm is not in the graph that is quantized: it was folded into"),
    ],
)
def test_an_op_that_the_graph_does_not_have_is_named(ops: tuple[str, ...], message: str, graph: str) -> None:
    quantizer = OverridePlan((Edit("float", ops),)).apply_to("xnnpack")
    with pytest.raises(SelectionError, match=message):
        prepare_pt2e(GRAPHS[graph]("residual"), quantizer)


def test_what_cannot_be_done_is_said_in_prepare() -> None:
    with pytest.raises(PluginError, match="Inductor has no int16"):
        prepare_pt2e(plain("mobile", strict=True), OverridePlan((Edit("int16", ("fc/linear",)),)).apply_to("x86"))
    with pytest.raises(QuantizeError, match="changes nothing"):
        prepare_pt2e(plain("residual", strict=True), OverridePlan((Edit("float", ("mean",)),)).apply_to("x86"))


def test_a_quantizer_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(PluginError, match="no quantizer is named 'xnpack'; did you mean 'xnnpack'"):
        OverridePlan(()).apply_to("xnpack")


# -- several models, several quantizers --------------------------------------------------------------------------------


def test_one_quantizer_edits_one_model_after_the_other() -> None:
    """Also after a model that it could not edit."""
    _, batch = captured("mobile")
    quantizer = OverridePlan((STEM,)).apply_to("xnnpack")
    ours = edited("mobile", "xnnpack", STEM).quantized
    with pytest.raises(SelectionError, match=r"no op 'stem.0/conv2d'"):
        prepare_pt2e(plain("residual", strict=True), quantizer)
    for _ in range(2):
        assert rounding(converted(plain("mobile", strict=True), quantizer, batch)) == rounding(ours)


def test_two_of_them_are_composed() -> None:
    """The first annotates linear alone, the second what is left."""
    _, batch = captured("mobile")
    dynamic = Edit("dynamic", ("fc/linear",))
    linear = OverridePlan((dynamic,)).apply_to(pt2qa.quantizer("xnnpack", op_types={"conv2d": None, "add": None}))
    rest = OverridePlan((STEM,)).apply_to(pt2qa.quantizer("xnnpack", op_types={"linear": None}))
    theirs = converted(plain("mobile", strict=True), ComposableQuantizer([linear, rest]), batch)
    assert rounding(theirs) == rounding(edited("mobile", "xnnpack", dynamic, STEM).quantized)
    assert names_of(theirs) == {}


def test_quantize_takes_it_too() -> None:
    capture, batch = captured("mobile")
    pair = pt2qa.quantize(capture, OverridePlan((STEM,)).apply_to("xnnpack"), [batch], progress=False)
    assert rounding(pair.quantized) == rounding(edited("mobile", "xnnpack", STEM).quantized)


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # dynamo, of the loop's inputs
def test_the_body_of_a_loop_is_not_taken_for_another_model() -> None:
    batch = (torch.randn(2, 4),)
    model = Loop().eval()
    graph = torch.export.export(model, batch, strict=False).module()
    edit = Edit("float", ("first/linear",))
    theirs = converted(graph, OverridePlan((edit,)).apply_to("xnnpack"), batch)
    plan = OverridePlan((edit,))
    ours = pt2qa.quantize(pt2qa.capture(model, batch), "xnnpack", [batch], overrides=plan, progress=False).quantized
    assert torch.equal(theirs(*batch), ours(*batch))
