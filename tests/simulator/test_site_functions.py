"""The functions that round at sites, and the ops with a scale for each slice of a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED as OPS
from pt2qa._simulator import quant_ops, slice_ops
from pt2qa._simulator.fused import RoundingStats, converted_site, fused_site, is_elementwise
from pt2qa._simulator.products import FlopCounter, own_multiply_adds
from tests.simulator.test_quant_ops import Nodes

X = torch.linspace(-90, 90, 24).reshape(2, 3, 4)
INT8 = (-128, 127, torch.int8)


@pytest.mark.parametrize(
    ("values", "scale", "zero_point"),
    [
        ([-1.0, 0.5, 3.0], 4 / 255, -64),  # -128 + 63.75
        ([-3.0, 0.5, 1.0], 4 / 255, 63),  # 127 - 63.75
        ([1.0, 2.0, 3.0], 3 / 255, -128),
        ([-1.0, -2.0, -3.0], 3 / 255, 127),
        ([0.0, 0.0, 0.0], 1.0, 127),
    ],
)
def test_a_scale_maps_the_range_of_a_slice_and_zero(values: list[float], scale: float, zero_point: int) -> None:
    x = torch.stack([torch.tensor(values), torch.tensor([5.0, -2.0, 0.0])])
    scales, zeros = slice_ops.choose_qparams_per_slice(x, [1], -128, 127)
    assert scales.shape == zeros.shape == (2, 1)
    assert (scales.dtype, zeros.dtype) == (torch.float64, torch.float32)
    assert (float(scales[0]), float(zeros[0])) == (pytest.approx(scale, rel=1e-6), zero_point)
    integers = slice_ops.quantize_per_slice(x, scales, zeros, [1], *INT8)
    expected = ((x.double() / scales).round() + zeros).clamp(-128, 127)
    assert torch.equal(integers, expected.to(torch.int8))
    back = slice_ops.dequantize_per_slice(integers, scales, zeros, [1], *INT8)
    assert (back.dtype, back.shape) == (torch.float32, x.shape)
    torch.testing.assert_close(back.double(), (integers.double() - zeros) * scales, rtol=1e-6, atol=0)
    assert bool(((back - x).abs() <= scales * 0.75).all())
    assert float(back[1, 2]) == 0


def test_slices_are_apart_from_each_other() -> None:
    whole = slice_ops.choose_qparams_per_slice(X, [1, 2], -128, 127)
    for number, part in enumerate(X):
        alone = slice_ops.choose_qparams_per_slice(part[None], [1, 2], -128, 127)
        assert [float(each[number]) for each in whole] == [float(each) for each in alone]
    # Of many values the integers stay in their range.
    scales, zeros = (torch.full((2, 1, 1), each) for each in (0.1, 3.0))
    integers = slice_ops.quantize_per_slice(X, scales.double(), zeros, [1, 2], -8, 7, torch.int8)
    assert (int(integers.min()), int(integers.max())) == (-8, 7)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


def site(nodes: Nodes, node: Node, **changes: Any) -> Any:
    for name, value in changes.items():
        node.meta[name] = value
    return fused_site(node, quant_ops.read_params(node, nodes.constants.get))


def test_which_sites_have_a_fused_form(nodes: Nodes) -> None:
    fused = {name for name, node in vars(nodes).items() if isinstance(node, Node) and quant_ops.is_quantize(node)}
    known = {name for name in fused if site(nodes, getattr(nodes, name)) is not None}
    assert known == {"static", "packet", "dynamic"}
    assert is_elementwise(site(nodes, nodes.static))
    assert not is_elementwise(site(nodes, nodes.dynamic))
    assert not is_elementwise(torch.relu)
    for value, exact in ((torch.ones(2), True), (torch.ones(2).half(), False), (7, True)):
        nodes.x.meta["val"] = value
        assert (site(nodes, nodes.static) is not None) == exact
        assert (site(nodes, nodes.dynamic) is not None) == exact


@pytest.mark.parametrize("args", [(0.0, 3, *INT8), (-0.5, 3, *INT8), (0.5, 3, -(2**31), 2**31 - 1, torch.int32)])
def test_parameters_that_the_fused_form_does_not_take(nodes: Nodes, args: tuple[Any, ...]) -> None:
    nodes.static.args = (nodes.x, *args)
    assert site(nodes, nodes.static) is None


def test_wide_integers_of_a_dynamic_scale(nodes: Nodes) -> None:
    for bits, exact in ((16, True), (21, True), (22, True), (23, False)):
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        nodes.dynamic.args = (*nodes.dynamic.args[:3], low, high, torch.int32)
        assert (site(nodes, nodes.dynamic) is not None) == exact, bits


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_both_functions_of_a_site_give_the_same_bits(nodes: Nodes, name: str) -> None:
    quantize = getattr(nodes, name)
    target = OPS.dequantize_per_tensor.tensor if name == "dynamic" else OPS.dequantize_per_tensor.default
    dequantize = quantize.graph.call_function(target, (quantize, *quantize.args[1:]))
    converted = converted_site(quantize, dequantize, nodes.constants.__getitem__)
    fused = site(nodes, quantize)
    expected = converted(X)
    assert torch.equal(fused(X), expected)
    assert torch.equal(converted(X, out=torch.empty_like(X), stats=RoundingStats()), expected)
    stats, own = RoundingStats(), X.clone()
    assert fused(own, out=own, stats=stats) is own
    assert torch.equal(own, expected)
    assert stats.range == (float(expected.min()), float(expected.max()))
    scale, zero_point = OPS.choose_qparams(X, -128, 127, 1e-6, torch.int8) if name == "dynamic" else (0.5, 3)
    steps = (X * (1 / float(scale))).round() + int(zero_point)
    assert stats.clamped == int(((steps < -128) | (steps > 127)).sum()) > 0
    held = quantize.graph.call_function(OPS.dequantize_per_tensor.tensor, (nodes.held, *nodes.held.args[1:]))
    assert torch.equal(
        converted_site(nodes.held, held, nodes.constants.__getitem__)(X),
        OPS.dequantize_per_tensor(OPS.quantize_per_tensor(X, 0.5, 3, *INT8), 0.5, 3, *INT8),
    )


def test_multiply_adds_by_hand() -> None:
    ones = torch.ones
    assert own_multiply_adds("linear", [ones(2, 3), ones(4, 3)]) is None
    assert own_multiply_adds("bilinear", [ones(5, 2, 3), ones(5, 2, 4), ones(6, 3, 4)]) == 5 * 2 * 6 * 3 * 4
    assert own_multiply_adds("gru", [ones(7, 2, 3), ones(1, 2, 4), ones(12, 3), ones(12, 4), ones(12)]) == 14 * 12 * 7
    attention = [ones(2, 5, 8), ones(2, 7, 8), ones(2, 7, 3)]
    assert own_multiply_adds("scaled_dot_product_attention", attention) == 2 * 5 * 7 * 8 + 2 * 5 * 7 * 3


def test_flops_of_composite_and_other_ops_add_up() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x @ x.t(), torch.ones(4, 3)).relu().sum()

    with FlopCounter() as counter:
        run(torch.ones(3, 5))
    assert counter.total == 2 * 3 * 5 * 3 + 2 * 3 * 3 * 4
