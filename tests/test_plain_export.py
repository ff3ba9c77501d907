"""Capture rewrites programs; where a quantizer then finds other ops than in a plain export, the reports say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.quantizer import Quantizer

import pt2qa
from pt2qa._graph.annotation import annotated_ops
from pt2qa._graph.handles import op_of
from pt2qa._quantize.quantization import _prepare
from pt2qa.overrides.edited import annotate
from pt2qa.plugins import resolve
from tests.flows import quantized_pair
from tests.models import images, residual


class Functional(nn.Module):
    """Two convolutions that no module of torch calls: x86 finds neither in a plain export."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(4, 4, 3, 3))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(F.conv2d(F.conv2d(x, self.first), self.second).mean((2, 3)))
        return result


def test_a_report_says_when_capture_changed_what_is_quantized() -> None:
    pair = quantized_pair(Functional(), images(), "x86")
    report = pt2qa.compare_layers(pair, [images()], progress=False)
    (note,) = (note for note in report.notes if "plain torch.export" in note)
    assert note == (
        "capture's rewriting changed how many ops x86 annotates, against a plain torch.export: conv2d 0 -> 2; export "
        "capture.program, not the model, to deploy what was measured"
    )


def test_a_quantizer_that_finds_the_same_ops_gives_no_note() -> None:
    """XNNPACK looks at ops alone."""
    pair = quantized_pair(Functional(), images(), "xnnpack")
    assert pair.capture is not None
    assert pair.capture.changes
    assert not any("plain torch.export" in note for note in pair.notes)


def test_the_plain_program_is_kept_where_something_changed_and_shares_its_parameters() -> None:
    captured = pt2qa.capture(Functional().eval(), images())
    assert captured.plain is not None
    assert not any("source_fn_stack" in node.meta for node in captured.plain.graph.nodes)
    mine, theirs = captured.program.state_dict, captured.plain.state_dict
    assert {name: tensor.data_ptr() for name, tensor in mine.items()} == {
        name: tensor.data_ptr() for name, tensor in theirs.items()
    }
    assert torch.equal(captured.plain.module()(images()), captured.module()(images()))
    untouched = pt2qa.capture(nn.Sequential(nn.Linear(4, 2)).eval(), torch.randn(1, 4))
    assert (untouched.changes, untouched.plain) == ((), None)


class Wary(Quantizer):  # type: ignore[misc]
    """torchao's x86 quantizer, which here fails on a convolution without a source."""

    def __init__(self) -> None:
        super().__init__()
        self.own = resolve("x86").build(GraphModule({}, Graph()), qat=False)

    def annotate(self, model: GraphModule) -> GraphModule:
        if any("source_fn_stack" not in node.meta for node in model.graph.nodes if op_of(node.target) == "conv2d"):
            raise ValueError("no source")
        annotated: GraphModule = self.own.annotate(model)
        return annotated

    def validate(self, model: GraphModule) -> None:
        return None


def test_a_quantizer_that_fails_on_the_plain_export_is_named() -> None:
    pair = quantized_pair(Functional(), images(), Wary())
    (note,) = (note for note in pair.notes if "plain torch.export" in note)
    assert note == (
        "Wary fails on the plain torch.export of the model (Wary could not annotate the model: ValueError: no source.)"
        "; export capture.program, not the model, to deploy what was measured"
    )


class Counting(Wary):
    """Counts how often it is asked to annotate a graph."""

    graphs = 0

    def annotate(self, model: GraphModule) -> GraphModule:
        self.graphs += 1
        annotated: GraphModule = self.own.annotate(model)
        return annotated


def test_a_quantizer_annotates_the_plain_export_once_for_each_capture() -> None:
    captures = [pt2qa.capture(Functional().eval(), images()) for _ in range(2)]
    quantizer, other = Counting(), Counting()
    plan = pt2qa.OverridePlan((pt2qa.Edit("float", ("conv2d_1",)),))

    def quantized(capture: pt2qa.Capture, quantizer: Quantizer, plan: pt2qa.OverridePlan | None = None) -> str:
        pair = pt2qa.quantize(capture, quantizer, [images()], overrides=plan, progress=False)
        return next(note for note in pair.notes if "plain torch.export" in note)

    notes = [quantized(captures[0], quantizer) for _ in range(2)]
    assert quantizer.graphs == 3  # prepare's graph twice, and the plain export
    notes.append(quantized(captures[0], quantizer, plan))
    assert quantizer.graphs == 4
    notes.append(quantized(captures[1], quantizer))
    assert quantizer.graphs == 6
    quantized(captures[0], other)
    assert other.graphs == 2
    assert len(set(notes)) == 1


def test_a_quantizer_that_was_configured_anew_annotates_the_plain_export_anew() -> None:
    capture, quantizer = pt2qa.capture(Functional().eval(), images()), Counting()
    pt2qa.quantize(capture, quantizer, [images()], progress=False)
    quantizer.own.set_module_type_qconfig(nn.Linear, None)
    pt2qa.quantize(capture, quantizer, [images()], progress=False)
    assert quantizer.graphs == 4


@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_what_a_quantizer_annotates_is_counted_as_prepare_asks_it(quantizer: str, qat: bool) -> None:
    capture, plugin = pt2qa.capture(residual(), images()), resolve(quantizer)
    counted = _prepare(plugin, capture.module(), (), capture.names, qat)[1].annotated
    again = annotate(capture.module(), plugin, (), capture.names, qat=qat)
    assert counted == annotated_ops(again.graph.nodes) != {}
