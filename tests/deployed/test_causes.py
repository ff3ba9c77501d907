"""Faults planted in a region: the experiment names each, and nothing where no hypothesis fits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

import pt2qa
from pt2qa._deployed.causes import Region, cause_of
from pt2qa._graph.handles import op_of
from pt2qa._simulator.quant_ops import is_quantize
from tests.flows import quantized_pair

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1


@functools.cache
def pair() -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    return quantized_pair(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), X)


def deployed(change: Callable[[Node, tuple[Any, ...]], tuple[Any, ...] | Tensor | None]) -> Region:
    """The region of the convolution, whose deployed value is computed with other arguments, or is another result."""
    graph = pair().quantized
    first, last = (node for node in graph.graph.nodes if is_quantize(node))
    values: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = X
        elif node.op == "get_attr":
            values[node] = attrgetter(str(node.target))(graph)
        elif node.op == "call_function":
            args = tuple(values.get(arg, arg) if isinstance(arg, Node) else arg for arg in node.args)
            changed = change(node, args)
            values[node] = changed if isinstance(changed, Tensor) else node.target(*(changed or args))  # type: ignore[operator]
    return Region.of(graph, last, {first: values[first]}, values[last], lambda node: str(node))


def is_conv(node: Node) -> bool:
    return op_of(node.target) == "conv2d"


def lost_bias(node: Node, args: tuple[Any, ...]) -> Any:
    return (*args[:2], 0 * args[2], *args[3:]) if is_conv(node) else None


def no_relu(node: Node, args: tuple[Any, ...]) -> Any:
    return args[0].clone() if op_of(node.target) == "relu" else None


def integer_zero(node: Node, args: tuple[Any, ...]) -> Any:
    if not is_conv(node):
        return None
    scale, zero_point = node.args[0].args[1:3]  # type: ignore[union-attr]
    around = torch.full((4, 3, 10, 10), -zero_point * scale)  # type: ignore[operator]
    around[:, :, 1:-1, 1:-1] = args[0]
    return torch.ops.aten.conv2d.default(around, *args[1:3])


def in_bfloat16(node: Node, args: tuple[Any, ...]) -> Any:
    short = [each.bfloat16() if isinstance(each, Tensor) else each for each in args]
    return node.target(*short).float() if is_conv(node) else None  # type: ignore[operator]


def noise(node: Node, args: tuple[Any, ...]) -> Any:
    return torch.randn(4, 8, 8, 8) if is_conv(node) else None


def turned(node: Node, args: tuple[Any, ...]) -> Any:
    return node.target(*args).permute(0, 2, 3, 1).reshape(4, 8, 8, 8) if is_conv(node) else None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lost_bias, "its bias is held at 0 times its value"),
        (no_relu, "the limits of relu are lost"),
        (integer_zero, "its padding is the integer 0, not the zero point"),
        (turned, "it is returned with the channels last, as if they were first"),
        (noise, ""),
    ],
)
def test_a_planted_fault_is_named(change: Callable[..., Any], cause: str) -> None:
    region = deployed(change)
    assert not region.gives(region.run())
    told = cause_of(region)
    # The factor that fits best is not zero to the last digit.
    assert told == cause or (change is lost_bias and told.startswith("its bias is held at "))
    if change is lost_bias:
        assert abs(float(told.split()[5])) < 0.02


def test_arithmetic_in_16_bits_is_named() -> None:
    region = deployed(in_bfloat16)
    assert not region.gives(region.run())
    assert cause_of(region) == "it is computed in bfloat16"


def test_the_region_of_a_right_kernel_gives_its_value() -> None:
    region = deployed(lambda node, args: None)
    assert torch.equal(region.run(), region.deployed)
