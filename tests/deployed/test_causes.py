"""Faults planted in a region: the experiment names each, and nothing where no hypothesis fits."""

from __future__ import annotations

import copy
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
from tests.flows import quantized_pair, unedited_pair

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
    return Region(graph, last, {first: values[first]}, values[last], {})


def is_conv(node: Node) -> bool:
    return op_of(node.target) == "conv2d"


def lost_bias(node: Node, args: tuple[Any, ...]) -> Any:
    return (*args[:2], 0 * args[2], *args[3:]) if is_conv(node) else None


def integer_zero(node: Node, args: tuple[Any, ...]) -> Any:
    if not is_conv(node):
        return None
    scale, zero_point = node.args[0].args[1:3]  # type: ignore[union-attr]
    around = torch.full((4, 3, 10, 10), -zero_point * scale)  # type: ignore[operator]
    around[:, :, 1:-1, 1:-1] = args[0]
    return torch.ops.aten.conv2d.default(around, *args[1:3])


def noise(node: Node, args: tuple[Any, ...]) -> Any:
    return torch.randn(4, 8, 8, 8) if is_conv(node) else None


def turned(node: Node, args: tuple[Any, ...]) -> Any:
    return node.target(*args).permute(0, 2, 3, 1).reshape(4, 8, 8, 8) if is_conv(node) else None  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lost_bias, "its bias is held at 0 times its value"),
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


@pytest.mark.parametrize("cause", ["it is computed in bfloat16", "the limits of hardtanh are lost"])
def test_a_fault_of_a_float_kernel_is_named(cause: str) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3)
    graph = torch.export.export(nn.Sequential(conv, nn.Hardtanh(-0.5, 0.5)), (X,)).module(check_guards=False)
    (x,) = graph.graph.find_nodes(op="placeholder")
    (last,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.hardtanh.default)
    with torch.no_grad():
        value = conv(X)
        if "bfloat16" in cause:
            value = copy.deepcopy(conv).bfloat16()(X.bfloat16()).float().clamp(-0.5, 0.5)
        region = Region(graph, last, {x: X}, value, {})
        assert not region.gives(region.run())
        assert cause_of(region) == cause


class Pooled(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 3, 2, 1, count_include_pad=self.counts)


@pytest.mark.parametrize("counts", [True, False])
def test_padding_that_a_pooling_counts_otherwise_is_named(counts: bool) -> None:
    graph = torch.export.export(Pooled(counts), (X,)).module(check_guards=False)
    (x,) = graph.graph.find_nodes(op="placeholder")
    region = Region(graph, last_of(graph, "avg_pool2d"), {x: X}, Pooled(not counts)(X), {})
    assert not region.gives(region.run())
    assert cause_of(region) == f"its padding is {'not counted' if counts else 'counted'} in its means"


@pytest.mark.parametrize("fault", ["it has the weights of linear_1", "its weight is read in another order of memory"])
def test_other_weights_are_named(fault: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 16)
    graph = quantized_pair(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), x).quantized
    quantize = [node for node in graph.graph.nodes if is_quantize(node)]
    first, second = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    with torch.no_grad():
        own, others = (Region(graph, each.args[1], {}, x, {}).run() for each in (first, second))
        given = {quantize[0]: quantize[0].target(x, *quantize[0].args[1:])}
        weight = others if "linear_1" in fault else own.t()
        value = Region(graph, quantize[1], given, x, {}).run({first: lambda x, _, bias: first.target(x, weight, bias)})
        region = Region(graph, quantize[1], given, value, {})
        assert not region.gives(region.run())
        assert cause_of(region) == fault


def test_exact_sums_are_named_where_those_of_float32_depend_on_their_order() -> None:
    torch.manual_seed(0)
    x = 1e6 * torch.randn(4, 512)
    linear = nn.Linear(1024, 3, bias=False)
    x = torch.cat([x, x + torch.randn(4, 512) * 1e-1], 1)
    linear.weight.data[:, 512:] = -linear.weight.data[:, :512]
    graph = torch.export.export(linear, (x,)).module(check_guards=False)
    (given,) = graph.graph.find_nodes(op="placeholder")
    with torch.no_grad():
        value = copy.deepcopy(linear).double()(x.double()).float()
        region = Region(graph, last_of(graph, "linear"), {given: x}, value, {})
        assert not region.gives(region.run())
        assert cause_of(region) == "its sums are exact, and the converted graph's, in another order, are not"


@pytest.mark.parametrize("quantizer", ["x86", "xnnpack"])
@pytest.mark.parametrize("op", ["linear", "conv2d"])
def test_sums_that_saturate_at_16_bits_are_named(op: str, quantizer: str) -> None:
    """Products of 255 and 127, added to their neighbours' in 16 bits; of int8 inputs after 128 is added to them."""
    model = nn.Linear(5, 3) if op == "linear" else nn.Conv2d(5, 3, 3, padding=1)
    nn.init.ones_(model.weight)
    x = torch.rand(4, 5, *([6, 6] if op == "conv2d" else []), generator=torch.Generator().manual_seed(0))
    graph = quantized_pair(nn.Sequential(model), x, quantizer).quantized
    first, last = next(node for node in graph.graph.nodes if is_quantize(node)), last_of(graph, op)
    integers = first.target(x, *first.args[1:])  # type: ignore[operator]
    scales, weights = (region_constant(last, number) for number in (1, 0))
    more = 128 if integers.dtype is torch.int8 else 0
    rows, zero_point = integers.double() + more, first.args[2] + more  # type: ignore[operator]
    if op == "conv2d":
        rows = nn.functional.pad(rows, [1] * 4, value=float(zero_point))
        rows = torch.stack([rows[:, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3)], 1)
        rows = rows.permute(0, 3, 4, 1, 2)
    weights = weights.double().flatten(2).permute(0, 2, 1) if op == "conv2d" else weights.double()
    products = rows.unsqueeze(-weights.dim()) * weights  # (..., outputs, pixels, channels)
    pairs = nn.functional.pad(products, (0, 1)).unflatten(-1, (3, 2)).sum(-1).clamp(-32768, 32767)
    sums = pairs.flatten(-2 if op == "conv2d" else -1).sum(-1) - zero_point * weights.flatten(1).sum(1)
    value = (sums * first.args[1] * scales).float() + model.bias  # type: ignore[operator]
    value = (value.permute(0, 3, 1, 2) if op == "conv2d" else value).detach()
    with torch.no_grad():
        region = Region(graph, last, {first: integers}, value, {})
        assert not region.gives(region.run())
        assert cause_of(region) == "sums of two of its products saturate at 16 bits"


def last_of(graph: torch.fx.GraphModule, op: str) -> Node:
    return next(node for node in graph.graph.nodes if op_of(node.target) == op)


def region_constant(product: Node, argument: int) -> Tensor:
    """The integers (0) or the scales (1) of a product's weight."""
    dequantize: Any = product.args[1]
    found: Tensor = attrgetter(str(dequantize.args[argument].target))(product.graph.owning_module)
    return found


def test_the_region_of_a_right_kernel_gives_its_value() -> None:
    region = deployed(lambda node, args: None)
    assert torch.equal(region.run(), region.deployed)


class Flat(nn.Module):
    """A value that a convolution with dynamic scales reads, and its elements in order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return self.conv(y).flatten(1) + y.flatten(1)


def test_an_image_that_is_read_turned_is_named() -> None:
    report = pt2qa.compare_deployed(unedited_pair(Flat(), X, "dynamic"), [X], backend="xnnpack", progress=False)
    assert [(row.op, row.cause) for row in report.suspects] == [
        ("flatten", "it reads an image with the channels last, as if they were first")
    ]


def test_dynamic_scales_without_an_explanation_have_no_cause() -> None:
    torch.manual_seed(0)
    pairs = [quantized_pair(nn.Linear(8, 4), X, mode) for mode in ("xnnpack:mode=dynamic", "x86:mode=dynamic")]
    for dynamic in (*pairs, pairs[0].as_deployed()):
        graph = dynamic.quantized
        values: dict[Node, Any] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = X
        last = [node for node in graph.graph.nodes if op_of(node.target) == "linear"][-1]
        region = Region(graph, last, values, torch.randn(4, 3, 8, 4), {})
        with torch.no_grad():
            assert not region.gives(region.run())
            assert cause_of(region) == ""
