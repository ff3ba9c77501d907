"""Capture rewrites programs; where a quantizer then finds other ops than in a plain export, the reports say so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torchao.quantization.pt2e.quantizer import Quantizer

import pt2qa
from pt2qa._graph.handles import op_of
from pt2qa._quantize.plain_export import annotated_ops
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


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_prepared_program_shows_what_the_quantizer_annotated(quantizer: str) -> None:
    capture, plugin = pt2qa.capture(residual(), images()), resolve(quantizer)
    prepared = _prepare(plugin, capture.module(), (), capture.names, False)
    again = annotate(capture.module(), plugin, (), capture.names, qat=False)
    assert annotated_ops(prepared) == annotated_ops(again) != {}
