"""Images that ExecuTorch's XNNPACK delegate turns too early or too late: the runtime alone is the witness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from tests.flows import direct_sqnr, quantized_pair
from tests.quantizers.device import XNNPACKDevice

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
RULE = "xnnpack-turned-image"


class Net(nn.Module):
    """Convolutions of two sizes, as ``way`` calls them."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.other, self.third = (nn.Conv2d(4, 4, size, padding=size // 2) for size in (3, 1, 3))
        self.norm, self.way = nn.BatchNorm2d(4), way

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
    "softmax first": ("static", lambda net, x: net.conv(x.softmax(-1)), ""),
    "dynamic, residual": ("dynamic", lambda net, x: net.conv(x.relu()) + x.relu(), ""),
    "dynamic, one value": (
        "dynamic",
        lambda net, x: (lambda v: net.conv(v) + v)(x.relu()),
        "before relu, which others",
    ),
    "dynamic, pool": ("dynamic", lambda net, x: (lambda v: net.conv(F.max_pool2d(v, 1, 1)) + v)(x.relu()), ""),
    "dynamic, flat": (
        "dynamic",
        lambda net, x: (lambda v: net.conv(v).flatten(1) + v.flatten(1))(x.relu()),
        "before relu, which others",
    ),
    "dynamic, softmax": ("dynamic", lambda net, x: net.conv(x.softmax(-1)), "before softmax"),
    "dynamic, softmax of channels": ("dynamic", residual(lambda net, x: x.softmax(1)), ""),
    "dynamic, batch norm": ("dynamic", residual(lambda net, x: net.norm(x)), ""),
    "dynamic, mean": ("dynamic", residual(lambda net, x: x.mean((2, 3), keepdim=True)), ""),
    "dynamic, portable op": ("dynamic", residual(lambda net, x: x.roll(1, 1)), ""),
    "dynamic, sum": ("dynamic", residual(lambda net, x: x.relu() + x.tanh()), "before add, which others"),
    "dynamic, permute": ("dynamic", lambda net, x: net.conv(x.transpose(2, 3)), "before transpose"),
    "dynamic, input": ("dynamic", lambda net, x: net.conv(x) + x.relu(), ""),
    "dynamic, two": ("dynamic", lambda net, x: (lambda v: net.conv(v) + net.other(v))(x.tanh()), "before tanh, which"),
    "dynamic, two of an input": ("dynamic", lambda net, x: net.conv(x) + net.other(x), "before x, which others"),
    "dynamic, two alike": ("dynamic", lambda net, x: (lambda v: net.conv(v) + net.third(v))(x.tanh()), ""),
    "dynamic, after another": ("dynamic", lambda net, x: (lambda v: net.other(v) + v)(net.conv(x).relu()), ""),
}


@pytest.mark.parametrize("case", WAYS)
def test_where_the_rule_speaks_the_program_fails_or_is_wrong_and_elsewhere_it_is_right(case: str) -> None:
    mode, way, expected = WAYS[case]
    pair = quantized_pair(Net(way), X, pt2qa.quantizer("xnnpack", mode=mode)).as_deployed()
    found = pt2qa.check(quantized_pair(Net(way), X, pt2qa.quantizer("xnnpack", mode=mode)), rules=[RULE]).rows
    assert {expected in row.why for row in found} == ({True} if expected else set())
    graph = pair.quantized if pair.origin is None else pair.origin.graph
    try:
        apart = direct_sqnr(pair.quantized(X), XNNPACKDevice(graph, X)(X))
    except RuntimeError:
        apart = 0.0
    assert (apart < 20) == bool(expected), apart


def test_the_float_model_is_wrong_as_well_without_quantization() -> None:
    model = Net(WAYS["softmax"][1]).eval()
    graph = torch.export.export(model, (X,)).module()
    assert direct_sqnr(model(X), XNNPACKDevice(graph, X)(X)) < 10
    flat = torch.export.export(Net(rounded).eval(), (X,)).module()
    assert direct_sqnr(model(X), XNNPACKDevice(flat, X)(X)) > 100
