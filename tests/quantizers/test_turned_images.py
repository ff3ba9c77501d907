"""Images that ExecuTorch's XNNPACK delegate turns too early or too late: the runtime alone is the witness."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from pt2qa._quantize.plain_flow import plain_flow
from pt2qa_xnnpack import for_xnnpack
from tests.flows import direct_sqnr, quantized_pair
from tests.quantizers.device import XNNPACKDevice

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
RULE = "xnnpack-turned-image"
TURNED = "turned for all that read"
IN_FLOAT = "read in float by ops of a delegate and by others"


class Net(nn.Module):
    """Convolutions of two sizes, as ``way`` calls them."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other, self.third = (nn.Conv2d(4, 4, size, padding=size // 2) for size in (3, 1, 3))
        self.norm, self.linear, self.way = nn.BatchNorm2d(4), nn.Linear(6, 6), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def rounded(net: Any, x: Tensor) -> Tensor:
    """What a softmax of images that are not turned gives."""
    y = net.conv(x)
    return y.flatten(0, 1).softmax(-1).view_as(y)


def residual(first: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A value, read by a convolution and added to what that gives."""

    def way(net: Any, x: Tensor) -> Tensor:
        value = first(net, x)
        result: Tensor = net.other(value) + value
        return result

    return way


WAYS: dict[str, tuple[str, Callable[[Any, Tensor], Tensor], str]] = {
    "softmax": ("static", lambda net, x: net.conv(x).softmax(-1), "over the channels"),
    "softmax of a pool": (
        "static",
        lambda net, x: F.max_pool2d(net.conv(x), 2, 2).relu().softmax(-1),
        "over the channels",
    ),
    "softmax, flat": ("static", rounded, ""),
    "softmax of channels": ("static", lambda net, x: net.conv(x).softmax(1), ""),
    "mish": ("static", lambda net, x: F.mish(net.conv(x)), IN_FLOAT),
    "prelu": ("static", lambda net, x: F.prelu(net.conv(x), net.other.bias), ""),
    "two readers": ("static", lambda net, x: (lambda v: torch.where(v > 0, F.gelu(v), v))(net.conv(x)), IN_FLOAT),
    "silu": ("static", lambda net, x: F.silu(net.conv(x)), ""),
    "static, residual": ("static", residual(lambda net, x: net.conv(x)), ""),
    "softmax first": ("static", lambda net, x: net.conv(x.softmax(-1)), ""),
    "dynamic, residual": ("dynamic", lambda net, x: net.conv(x.relu()) + x.relu(), ""),
    "dynamic, one value": (
        "dynamic",
        lambda net, x: (lambda v: net.conv(v) + v)(x.relu()),
        TURNED,
    ),
    "dynamic, pool": ("dynamic", lambda net, x: (lambda v: net.conv(F.max_pool2d(v, 1, 1)) + v)(x.relu()), ""),
    "dynamic, flat": (
        "dynamic",
        lambda net, x: (lambda v: net.conv(v).flatten(1) + v.flatten(1))(x.relu()),
        TURNED,
    ),
    "dynamic, softmax": ("dynamic", lambda net, x: net.conv(x.softmax(-1)), TURNED),
    "dynamic, softmax of channels": ("dynamic", residual(lambda net, x: x.softmax(1)), ""),
    "dynamic, batch norm": ("dynamic", residual(lambda net, x: net.norm(x)), ""),
    "dynamic, mean": ("dynamic", residual(lambda net, x: x.mean((2, 3), keepdim=True)), ""),
    "dynamic, portable op": ("dynamic", residual(lambda net, x: x.roll(1, 1)), ""),
    "dynamic, sum": ("dynamic", residual(lambda net, x: x.relu() + x.tanh()), TURNED),
    "dynamic, permute": ("dynamic", lambda net, x: net.conv(x.transpose(2, 3)), TURNED),
    "dynamic, input": ("dynamic", lambda net, x: net.conv(x) + x.relu(), ""),
    "dynamic, two": ("dynamic", lambda net, x: (lambda v: net.conv(v) + net.other(v))(x.tanh()), "by pixel"),
    "dynamic, two of an input": ("dynamic", lambda net, x: net.conv(x) + net.other(x), "by pixel"),
    "dynamic, two alike": ("dynamic", lambda net, x: (lambda v: net.conv(v) + net.third(v))(x.tanh()), ""),
    "dynamic, input read before": ("dynamic", lambda net, x: x.relu() + net.conv(x), TURNED),
    "dynamic, input normed": ("dynamic", lambda net, x: net.conv(x - net.linear.bias), TURNED),
    "dynamic, matmul": ("dynamic", lambda net, x: net.conv(x @ x), TURNED),
    "dynamic, instance norm": ("dynamic", lambda net, x: net.conv(F.instance_norm(x)), TURNED),
    "dynamic, by pixel": ("dynamic", lambda net, x: (lambda v: net.third(v) + net.other(v))(net.conv(x)), "by pixel"),
    "dynamic, linear": ("dynamic", lambda net, x: net.linear(net.conv(x)), "between rounding and kernel"),
    "dynamic, after another": ("dynamic", lambda net, x: (lambda v: net.other(v) + v)(net.conv(x).relu()), ""),
}


def plain(mode: str, way: Callable[[Any, Tensor], Tensor]) -> tuple[Any, Any]:
    """The exported program and the converted graph of a flow of torchao and ExecuTorch alone."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=mode == "dynamic")
    program = torch.export.export(Net(way).eval(), (X,))
    prepared = prepare_pt2e(program.module(), XNNPACKQuantizer().set_global(config))
    prepared(X)
    return program, convert_pt2e(prepared)


def apart(expected: Tensor, graph: Any) -> float:
    try:
        return direct_sqnr(expected, XNNPACKDevice(graph, X)(X))
    except RuntimeError:
        return 0.0


@pytest.mark.parametrize("case", WAYS)
def test_a_plain_flow_gives_a_wrong_program_where_the_rule_speaks_and_quantize_a_right_one(case: str) -> None:
    mode, way, expected = WAYS[case]
    pair = quantized_pair(Net(way).eval(), X, pt2qa.quantizer("xnnpack", mode=mode))
    deployed = pair.as_deployed().quantized(X)
    program, graph = plain(mode, way)
    assert torch.equal(pair.quantized(X), graph(X))
    assert pt2qa.check(pair, rules=[RULE]).rows == () == tuple(for_xnnpack(pair.quantized))
    found = pt2qa.check(pt2qa.pair(program, graph, quantizer="xnnpack"), quantizer="xnnpack", rules=[RULE]).rows
    assert {expected in row.why for row in found} == ({True} if expected else set())
    assert any("edited for" in note for note in pair.notes) == bool(expected)
    assert (apart(deployed, graph) < 20) == bool(expected)
    if expected:
        assert apart(deployed, pair.quantized) > 100
        assert len(for_xnnpack(graph)) == len(found)
        assert torch.equal(pair.quantized(X), graph(X))


@pytest.mark.parametrize(
    "case", ["softmax", "two readers", "dynamic, one value", "dynamic, by pixel", "dynamic, linear"]
)
def test_the_analyses_know_the_edited_ops_and_the_printed_code_edits_them_too(case: str) -> None:
    mode, way, _ = WAYS[case]
    pair = quantized_pair(Net(way).eval(), X, pt2qa.quantizer("xnnpack", mode=mode))
    costs = {row.name: row.flops_share for row in pt2qa.sensitivity(pair, [X], progress=False).rows}
    assert math.isclose(sum(costs.values()), 1.0), "an inserted op has taken the name of the op before it"
    own = [row for row in pt2qa.compare_deployed(pair, [X], progress=False).rows if row.handle < 0]
    assert all(row.delegated for row in own)
    flow = plain_flow(pair)
    assert flow.equal, flow.verified
    assert "for_xnnpack(prepared)" in flow.code


def test_the_float_model_is_wrong_as_well_without_quantization() -> None:
    model = Net(WAYS["softmax"][1]).eval()
    graph = torch.export.export(model, (X,)).module()
    assert direct_sqnr(model(X), XNNPACKDevice(graph, X)(X)) < 10
    flat = torch.export.export(Net(rounded).eval(), (X,)).module()
    assert direct_sqnr(model(X), XNNPACKDevice(flat, X)(X)) > 100
