"""Weights of linears that are another tensor's transpose, on oneDNN's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer

import pt2qa
from pt2qa._quantize.plain_flow import plain_flow
from pt2qa_x86 import for_x86
from tests.flows import NARROW, direct_sqnr

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the kernels are oneDNN's")


def strided() -> nn.Module:
    torch.manual_seed(0)
    linear = nn.Linear(6, 6)
    linear.weight = nn.Parameter(torch.randn(6, 6).t())
    return linear.eval()


class Tied(nn.Module):
    """A linear, and another one by the transpose of its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.linear(x).relu(), self.linear.weight.t())


def plain(dynamic: bool) -> tuple[Any, Any]:
    """A flow of torchao alone: the prepared and the converted graph."""
    config = x86_inductor_quantizer.get_default_x86_inductor_quantization_config(
        is_dynamic=dynamic, reduce_range=NARROW
    )
    quantizer = x86_inductor_quantizer.X86InductorQuantizer().set_global(config)
    prepared = prepare_pt2e(torch.export.export(strided(), (X,)).module(), quantizer)
    prepared(X)
    return prepared, convert_pt2e(prepared)


@ONEDNN
@pytest.mark.parametrize("dynamic", [False, True])
def test_torchao_alone_gives_a_wrong_model_and_a_right_one_once_edited(dynamic: bool) -> None:
    _, graph = plain(dynamic)
    expected = graph(X)
    assert direct_sqnr(strided()(X), expected) > 30
    assert direct_sqnr(expected, lower_pt2e_quantized_to_x86(graph, (X,))(X)) < 5
    _, graph = plain(dynamic)
    pair = pt2qa.pair(torch.export.export(strided(), (X,)), graph, quantizer="x86")
    (finding,) = pt2qa.check(pair, quantizer="x86", rules=["x86-strided-weight"]).rows
    assert [row.name for row in pt2qa.compare_deployed(pair, [X], progress=False).suspects[:1]] == [finding.name]
    ((node, done),) = for_x86(graph)
    assert (str(node), done) == ("linear", "has its weight in the order of memory")
    # Some CPUs sum a matrix in another layout in another order.
    assert direct_sqnr(expected, graph(X)) > 120
    assert for_x86(graph) == []
    assert direct_sqnr(expected, lower_pt2e_quantized_to_x86(graph, (X,))(X)) > 100


@ONEDNN
@pytest.mark.parametrize("make", [strided, Tied])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_quantize_edits_it_and_the_printed_code_does_too(make: Any, mode: str) -> None:
    quantizer = pt2qa.quantizer("x86", mode=mode, reduce_range=NARROW)
    pair = pt2qa.quantize(pt2qa.capture(make().eval(), X), quantizer, [X], progress=False)
    assert any("linear has its weight in the order of memory" in note for note in pair.notes)
    assert pt2qa.check(pair, rules=["x86-strided-weight"]).rows == ()
    assert pt2qa.compare_deployed(pair, [X], progress=False).suspects == ()
    assert all(row.handle >= 0 for row in pt2qa.compare_layers(pair, [X], progress=False).rows)
    flow = plain_flow(pair)
    assert flow.equal, flow.verified
    assert "for_x86(prepared)" in flow.code


def test_a_model_without_one_is_not_edited() -> None:
    pair = pt2qa.quantize(pt2qa.capture(nn.Linear(6, 6).eval(), X), "x86", [X], progress=False)
    assert not any("edited for" in note for note in pair.notes)
    assert "for_x86" not in plain_flow(pair, verify=False).code
