"""The fused op equals the pair of converted ops in every bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401  registers the ops that the fused one must equal

from pt2qa._metrics import CHUNK, value_range
from pt2qa._simulator.fused import RoundingStats, is_exact, quantize_dequantize

RANGES = {
    "int8": (-128, 127, torch.int8),
    "int8 narrow": (-127, 127, torch.int8),
    "uint8": (0, 255, torch.uint8),
    "7 bit": (0, 127, torch.uint8),
    "int16": (-32768, 32767, torch.int16),
}


def converted(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    ops = torch.ops.quantized_decomposed
    integers = ops.quantize_per_tensor(x, scale, zero_point, low, high, dtype)
    return ops.dequantize_per_tensor(integers, scale, zero_point, low, high, dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", RANGES)
@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=64),
    scale=st.floats(2**-20, 2**10),
    share=st.floats(0, 1),
)
def test_every_bit_equals_the_converted_ops(name: str, values: list[float], scale: float, share: float) -> None:
    low, high, dtype = RANGES[name]
    zero_point = round(low + share * (high - low))
    x = torch.tensor(values)
    expected = converted(x, scale, zero_point, low, high, dtype)
    assert torch.equal(bits(quantize_dequantize(x, scale, zero_point, low, high)), bits(expected))


@pytest.mark.parametrize("shape", [(1_500_000,), (8, 3, 300, 301)], ids=str)
def test_large_tensors_in_chunks(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for layout in (x, x.transpose(0, -1), x[..., ::2]):
        expected = converted(layout, 0.021, 3, -128, 127, torch.int8)
        assert torch.equal(bits(quantize_dequantize(layout, 0.021, 3, -128, 127)), bits(expected))


def test_special_values() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, -1e-9, 1e-9])
    for zero_point in (-11, 0, 5):
        expected = converted(x, 0.02, zero_point, -128, 127, torch.int8)
        assert torch.equal(bits(quantize_dequantize(x, 0.02, zero_point, -128, 127)), bits(expected))


def test_an_infinity_beside_the_infinite_scale_that_it_makes() -> None:
    """The scale of a dynamic site; only one end of its range is then NaN in steps."""
    for x in (torch.tensor([1.0, math.inf]), torch.tensor([-math.inf, 1.0]), torch.tensor([0.0, 1.0])):
        expected = converted(x, math.inf, 3, -128, 127, torch.int8)
        result = quantize_dequantize(x, math.inf, 3, -128, 127, stats=RoundingStats())
        assert torch.equal(bits(result.nan_to_num()), bits(expected.nan_to_num()))


def test_rounding_ties_go_where_the_converted_ops_round_them() -> None:
    """Trap 13: scale 1, zero point 1, x 0.5: rounding before adding gives 1, after it 2."""
    assert quantize_dequantize(torch.tensor([0.5]), 1.0, 1, -128, 127).item() == 0.0
    assert converted(torch.tensor([0.5]), 1.0, 1, -128, 127, torch.int8).item() == 0.0


def test_in_place_overwrites_and_otherwise_does_not() -> None:
    x = torch.randn(100)
    before = x.clone()
    result = quantize_dequantize(x, 0.1, 0, -128, 127)
    assert torch.equal(x, before)
    assert quantize_dequantize(x, 0.1, 0, -128, 127, out=x) is x
    assert torch.equal(x, result)


def test_int32_is_not_claimed_to_be_exact() -> None:
    assert is_exact(-128, 127, 0)
    assert is_exact(-32768, 32767, 100)
    assert not is_exact(-(2**31), 2**31 - 1, 0)


def test_clamped_values_are_those_outside_the_range_after_rounding() -> None:
    def clamped(x: Tensor, scale: float, low: int, high: int) -> int:
        stats = RoundingStats()
        quantize_dequantize(x, scale, 0, low, high, stats=stats)
        return stats.clamped

    x = torch.tensor([-1.04, -1.0, 0.0, 0.94, 0.96, 2.0])
    assert clamped(x, 0.1, -10, 9) == 2  # 0.96 and 2.0 round to 10 and 20; -1.04 rounds to -10
    assert clamped(torch.empty(0), 0.1, -10, 9) == 0
    large = torch.randn(700_000)
    steps = (large * (1 / 0.02)).round()
    assert clamped(large, 0.02, -128, 127) == int(((steps < -128) | (steps > 127)).sum())


@pytest.mark.parametrize("name", RANGES)
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=8),
    scale=st.floats(2**-20, 2**10),
    share=st.floats(0, 1),
    known=st.booleans(),
)
def test_looking_at_the_values_changes_no_bit(
    name: str, values: list[float], scale: float, share: float, known: bool
) -> None:
    """With a range at hand the clamp and the search for NaN are left out where they would do nothing."""
    low, high, dtype = RANGES[name]
    zero_point = round(low + share * (high - low))
    x = torch.tensor(values)
    stats = RoundingStats(source=value_range(x) if known else None)
    result = quantize_dequantize(x, scale, zero_point, low, high, stats=stats)
    assert torch.equal(bits(result), bits(converted(x, scale, zero_point, low, high, dtype)))
    assert stats.range == value_range(result)


def test_bounds_up_to_which_the_fused_op_is_exact() -> None:
    most = 1 << 22
    for place in range(3):
        given = [0, 0, 0]
        for bound, exact in ((most, True), (-most, True), (most + 1, False), (-most - 1, False)):
            given[place] = bound
            assert is_exact(*given) is exact


CHUNKED = torch.randn(2, CHUNK + 100, generator=torch.Generator().manual_seed(3))
"""Values of more than two chunks, whose ends are in the second and in the last one."""


@pytest.mark.parametrize("what", ["finite", "a NaN", "infinities", "none to clamp", "not plain"])
@pytest.mark.parametrize("zero_point", [0, -20])
@pytest.mark.parametrize("known", [False, True])
def test_what_is_noted_of_a_value_of_several_chunks(what: str, zero_point: int, known: bool) -> None:
    x = CHUNKED.clone() * (0.1 if what == "none to clamp" else 1)
    x[0, -1], x[1, -1] = -9, 11
    if what == "none to clamp":
        x[0, -1], x[1, -1] = -0.5, 0.5
    if what == "not plain":
        x = x.t()
    if what == "a NaN":
        x[0, 5] = math.nan
    if what == "infinities":
        x[0, 5], x[1, 7] = math.inf, -math.inf
    stats = RoundingStats(source=value_range(x) if known and what != "a NaN" else None)
    result = quantize_dequantize(x, 0.021, zero_point, -128, 127, stats=stats)
    expected = converted(x, 0.021, zero_point, -128, 127, torch.int8)
    assert torch.equal(bits(result), bits(expected))
    assert stats.range == (float(expected.min()), float(expected.max()))
    steps = (x * (1 / 0.021)).round().nan_to_num(nan=-zero_point, posinf=math.inf, neginf=-math.inf) + zero_point
    assert stats.clamped == int(((steps < -128) | (steps > 127)).sum())
    silent = RoundingStats(count=False)
    quantize_dequantize(x, 0.021, zero_point, -128, 127, stats=silent)
    assert (silent.clamped, silent.range) == (0, stats.range)
