"""Graphs whose ops carry no handles: matched by where torch says that they come from, else by name."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._graph.handles import assign_handles, copy_nodes, handle_of, remove_handles
from pt2qa._graph.internals.nodes import CUSTOM, PROVENANCE
from pt2qa._graph.matching import complete_handles, has_handles
from pt2qa.plugins import resolve
from tests.check.plain_quantizer import EXACT, PlainQuantizer
from tests.models import (
    Conditional,
    InPlaceViews,
    KeywordInputs,
    Linears,
    NestedOutputs,
    Recurrent,
    SameInputTwice,
    SharedConv,
    TwoUsers,
    images,
    residual,
)

ROWS = torch.linspace(-1, 1, 64).reshape(4, 16)
TOKENS = torch.arange(6).reshape(3, 2)
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "residual": (residual, images()),
    "linears": (Linears, ROWS),
    "two users": (TwoUsers, images()),
    "same input twice": (SameInputTwice, images()),
    "views in place": (InPlaceViews, images()),
    "nested outputs": (NestedOutputs, ROWS),
    "keyword": (KeywordInputs, {"x": ROWS, "scale": torch.rand(1, 16)}),
    "shared conv": (functools.partial(SharedConv, same_norm=True), (images(), images(seed=1))),
    "recurrent": (Recurrent, (TOKENS, torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))),
    "cond": (Conditional, ROWS),
}


def converted(graph: GraphModule, batch: Any, quantizer: str) -> GraphModule:
    """The flow of torchao."""
    prepared = prepare_pt2e(graph, resolve(quantizer).build(graph, qat=False))
    if isinstance(batch, dict):
        prepared(**batch)
    else:
        prepared(*(batch if isinstance(batch, tuple) else (batch,)))
    return convert_pt2e(prepared)


def without_handles(graph: GraphModule) -> GraphModule:
    plain = copy_nodes(graph)
    remove_handles(plain)
    return plain


def without_provenance(graph: GraphModule) -> GraphModule:
    plain = without_handles(graph)
    for node in plain.graph.nodes:
        node.meta.pop(PROVENANCE, None)
    return plain


def facts(pair: pt2qa.QuantizedPair, batch: Any) -> list[str]:
    """What pairing decides, and a table of an analysis; as text, in which nan equals nan."""
    rows = pt2qa.compare_layers(pair, [batch], progress=False).rows
    return [repr(each) for each in (*pair.pairing.pairs, *pair.pairing.unpaired, *pair.sites, *rows)]


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
@pytest.mark.parametrize("model", MODELS)
def test_provenance_names_and_handles_agree(model: str, quantizer: str) -> None:
    build, batch = MODELS[model]
    torch.manual_seed(0)
    capture = pt2qa.capture(build().eval(), batch)
    quantized = converted(capture.module(), batch, quantizer)
    expected = facts(pt2qa.pair(capture, quantized), batch)
    for plain in (without_handles, without_provenance):
        graphs = plain(capture.module()), plain(quantized)
        assert not any(map(has_handles, graphs))
        assert facts(pt2qa.pair(*graphs), batch) == expected, plain.__name__
    # Handles on one side alone are no use, whichever it is.
    assert facts(pt2qa.pair(capture, without_handles(quantized)), batch) == expected
    assert facts(pt2qa.pair(without_handles(capture.module()), quantized), batch) == expected


@functools.cache
def plain_flow() -> tuple[ExportedProgram, GraphModule]:
    """What somebody ran who never heard of pt2qa."""
    program = torch.export.export(residual(), (images(),))
    return program, converted(program.module(), images(), "xnnpack")


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


@pytest.mark.parametrize(
    "reference",
    [
        lambda program: program,
        lambda program: program.module(),
        lambda program: torch.export.export(residual(), (images(),)),
        lambda program: pt2qa.capture(residual(), images()),
        pt2qa.with_handles,
        copy.deepcopy,
        saved_and_loaded,
    ],
    ids=["program", "module", "another export", "capture", "with handles", "copy", "saved"],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph,
        copy.deepcopy,
        lambda graph: saved_and_loaded(torch.export.export(graph, (images(),))),
    ],
    ids=["converted", "copy", "saved"],
)
def test_a_flow_without_pt2qa_pairs(reference: Callable[[Any], Any], change: Callable[[Any], Any]) -> None:
    program, quantized = plain_flow()
    pairing = pt2qa.pair(reference(program), change(quantized)).pairing
    names = ["x", "conv1/conv2d", "relu/relu", "conv2/conv2d", "add", "relu/relu_1", "mean", "fc/linear"]
    assert [paired.name for paired in pairing.pairs] == names
    assert {(each.name, each.reason) for each in pairing.unpaired} == {
        ("bn1/batch_norm", "folded into conv1/conv2d, which is compared after it"),
        ("bn2/batch_norm", "folded into conv2/conv2d, which is compared after it"),
    }


def test_handles_of_one_graph_alone_do_not_count() -> None:
    program, quantized = plain_flow()
    numbered = copy_nodes(quantized)
    assign_handles(numbered)
    expected = pt2qa.pair(program, quantized).pairing
    assert repr(pt2qa.pair(program, numbered).pairing) == repr(expected)


def test_arguments_are_not_changed() -> None:
    program, quantized = plain_flow()
    pair = pt2qa.pair(program, quantized)
    assert not has_handles(quantized)
    assert not has_handles(program.module())
    assert pair.quantized is not quantized
    own, given = (dict(graph.state_dict()) for graph in (pair.quantized, quantized))
    assert {name: value.data_ptr() for name, value in own.items()} == {
        name: value.data_ptr() for name, value in given.items() if name in own
    }


class Calls(nn.Module):
    """One linear that is called several times, and another one after it."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.fc, self.relu, self.last, self.calls = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.relu(self.fc(x))
        return self.last(x)


def test_what_cannot_be_matched_is_listed() -> None:
    """The reference makes one call more: counts differ, so that what ops read has to say which call is which."""
    torch.manual_seed(0)
    once, twice = Calls(1).eval(), Calls(2).eval()
    once.load_state_dict(twice.state_dict())
    quantized = converted(torch.export.export(once, (ROWS,)).module(), ROWS, "xnnpack")
    pairing = pt2qa.pair(torch.export.export(twice, (ROWS,)), quantized).pairing
    assert [paired.name for paired in pairing.pairs] == ["x", "fc/linear", "relu/relu", "last/linear"]
    assert [each.name for each in pairing.unpaired] == ["fc/linear_1", "relu/relu_1"]


def test_graphs_of_other_models_are_refused() -> None:
    _, quantized = plain_flow()
    with pytest.raises(
        pt2qa.PairingError,
        match=r"the reference and the quantized graph have no op in common: none with the same handle, none that goes "
        r"back to the same node of an exported program, .* Expected graphs of one model\.$",
    ):
        pt2qa.pair(torch.export.export(nn.Tanh(), (images(),)), quantized)


@pytest.mark.parametrize("handled", [True, False])
def test_a_decomposed_reference_is_refused_as_such(handled: bool) -> None:
    """Its convolutions carry the handles of conv2d, and other constants stand where conv2d has its own."""
    if handled:
        program = pt2qa.capture(residual(), images()).program
        quantized = converted(program.module(), images(), "xnnpack")
    else:
        program, quantized = plain_flow()
    with pytest.raises(
        pt2qa.PairingError,
        match=r"the reference graph was decomposed \(2 convolution, 2 _native_batch_norm_legit_no_training, 1 addmm\), "
        r"and the quantized graph was not\. .*: export, prepare, convert, pair, and decompose after that\.",
    ):
        pt2qa.pair(program.run_decompositions(), quantized)
    after = torch.export.export(quantized, (images(),)).run_decompositions()
    names = [paired.name for paired in pt2qa.pair(program, after).pairing.pairs]
    assert names == ["x", "conv1/conv2d", "relu/relu", "conv2/conv2d", "add", "relu/relu_1", "mean", "fc/linear"]


def test_graphs_that_are_quantized_already_are_refused() -> None:
    _, quantized = plain_flow()
    exported = torch.export.export(quantized, (images(),))
    for given in (quantized, exported.module(), nn.Sequential(quantized)):
        with pytest.raises(
            pt2qa.CaptureError,
            match=r"the model is a graph that is quantized already \(.* Pass the float model; ",
        ):
            pt2qa.capture(given, images())
    for given in (quantized, exported):
        with pytest.raises(pt2qa.SelectionError, match="got a converted graph, expected a float or a prepared one"):
            pt2qa.check(given)


def test_a_plan_of_another_model_or_quantizer_is_noted() -> None:
    capture = pt2qa.capture(Linears().eval(), ROWS)
    edit = pt2qa.Edit("float", ("first/linear",))
    for made_for, notes in (
        (pt2qa.OverridePlan((edit,), "xnnpack", "Linears"), []),
        (
            pt2qa.OverridePlan((edit,), "x86", "ResNet"),
            [
                "the overrides were made for x86, and are applied to xnnpack",
                "the overrides were made for the model ResNet, and are applied to Linears",
            ],
        ),
    ):
        pair = pt2qa.quantize(capture, "xnnpack", [ROWS], overrides=made_for, progress=False)
        assert [note for note in pair.notes if "made for" in note] == notes


# -- torchao's switch between training and evaluation puts new ops in place of some ------------------------------------


class Dropouts(nn.Module):
    """Dropouts that read one value, that follow each other, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.a, self.b, self.c = nn.Dropout(0.1), nn.Dropout(0.2, inplace=True), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu()
        y = self.a(y).sin() + self.c(y).exp() + self.b(y * 2)
        return self.c(self.a(self.fc(y.mean((2, 3)))))


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_training_keeps_the_names_of_dropouts(quantizer: str) -> None:
    torch.manual_seed(0)
    capture = pt2qa.capture(Dropouts().eval(), images())
    pair = pt2qa.quantize(capture, quantizer, [images()], qat=True, progress=False)
    assert [(each.name, each.reason) for each in pair.pairing.unpaired] == [
        ("norm/batch_norm", "folded into conv/conv2d, which is compared after it")
    ]
    names = [name.name for name in capture.names.values() if name.op != "batch_norm"]
    assert [paired.name for paired in pair.pairing.pairs] == names
    reads = {
        pair.names[handle].name: next(iter(node.users)).target
        for node in pair.quantized.graph.nodes
        if (handle := node.meta.get("custom", {}).get("numeric_debug_handle")) in pair.names
    }
    if quantizer == "x86":
        assert reads["a/dropout"] is torch.ops.aten.sin.default
        assert reads["c/dropout"] is torch.ops.aten.exp.default
    rows = pt2qa.compare_layers(pair, [images()], progress=False).rows
    assert {row.name for row in rows} == set(names)


def test_an_edit_may_name_a_dropout_of_a_model_that_is_trained() -> None:
    capture = pt2qa.capture(nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 2)).eval(), ROWS)
    quantizer = PlainQuantizer(("linear", "dropout"), inputs=None, outputs=EXACT)
    edited = pt2qa.OverridePlan((pt2qa.Edit("float", ("1/dropout",)),))
    for plan, rounded in ((None, True), (edited, False)):
        pair = pt2qa.quantize(capture, quantizer, [ROWS], qat=True, overrides=plan, progress=False)
        assert ("1/dropout" in {site.name for site in pair.sites}) == rounded
        assert pair.pairing.unpaired == ()


class Twins(nn.Module):
    """Two ops of one kind read one value; what reads them tells one from the other."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().sigmoid() + x.relu().tanh()


def test_of_ops_that_read_the_same_the_readers_decide() -> None:
    known = torch.export.export(Twins(), (ROWS,)).module()
    assign_handles(known)
    graph = copy.deepcopy(known)
    first, second = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    wanted = handle_of(first), handle_of(second)
    first.prepend(second)
    for node in (first, second):
        node.meta[CUSTOM] = {}
    assert complete_handles(known, graph) == 2
    assert (handle_of(first), handle_of(second)) == wanted
