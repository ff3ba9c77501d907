"""Quantize and dequantize ops that run piece by piece return what they return for the whole value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._metrics import CHUNK
from pt2qa._simulator.graph_run import call_op
from pt2qa._simulator.strides import is_plain

QUANTIZE, DEQUANTIZE = QUANTIZED_DECOMPOSED.quantize_per_tensor, QUANTIZED_DECOMPOSED.dequantize_per_tensor
BY_CHANNEL = QUANTIZED_DECOMPOSED.quantize_per_channel.default
PER_CHANNEL = QUANTIZED_DECOMPOSED.dequantize_per_channel.default
DTYPES = {
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
    torch.int16: (-32768, 32767),
    torch.int32: (-(2**31), 2**31 - 1),
}


def large(layout: str) -> Tensor:
    x = torch.randn(3, 5, 200, CHUNK // 1400, generator=torch.Generator().manual_seed(0))
    x.view(-1)[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.05, -0.05, -0.0])
    if layout == "channels last":
        return x.to(memory_format=torch.channels_last)
    return x.transpose(2, 3) if layout == "not plain" else x


def equal(left: Tensor, right: Tensor) -> bool:
    same_bits = torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    return same_bits and left.dtype == right.dtype and left.stride() == right.stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "not plain"])
def test_pieces_have_the_bits_and_strides_of_the_whole(layout: str) -> None:
    x = large(layout)
    assert x.numel() > 2 * CHUNK
    assert is_plain(x) == (layout != "not plain")
    for dtype, limits in DTYPES.items():
        for scale, zero_point in ((0.1, 3), (torch.tensor(0.1), torch.tensor(3))):
            overload = "tensor" if isinstance(scale, Tensor) else "default"
            params = (scale, zero_point, *limits, dtype)
            integers = getattr(QUANTIZE, overload)(x, *params)
            assert equal(call_op(getattr(QUANTIZE, overload), x, *params), integers)
            expected = getattr(DEQUANTIZE, overload)(integers, *params)
            assert equal(call_op(getattr(DEQUANTIZE, overload), integers, *params), expected)


def test_only_large_values_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(value: Tensor, *rest: Any) -> Tensor:
        sizes.append(value.numel())
        return QUANTIZE.default(value, *rest)

    monkeypatch.setattr("pt2qa._simulator.graph_run._PER_TENSOR", {noted})
    for count in (CHUNK, 2 * CHUNK + 1):
        call_op(noted, torch.ones(count), 0.5, 0, -128, 127, torch.int8)
    assert sizes == [CHUNK, CHUNK, CHUNK, 1]


@pytest.mark.parametrize("shape", [(5, CHUNK // 4), (CHUNK // 100, 13, 3, 3), (2, CHUNK + 1), (1, CHUNK + 1)], ids=str)
def test_pieces_of_a_weight_have_the_bits_of_the_whole(shape: tuple[int, ...]) -> None:
    for dtype in (torch.int8, torch.int16):
        integers = torch.randint(*DTYPES[dtype], shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
        for axis in (0, 1):
            scales = torch.linspace(0.01, 1.7, shape[axis])
            for zero_points in (torch.zeros(shape[axis], dtype=torch.int64), torch.arange(shape[axis]) % 7):
                params = (scales, zero_points, axis, *DTYPES[dtype], dtype)
                expected = PER_CHANNEL(integers, *params)
                assert equal(call_op(PER_CHANNEL, integers, *params), expected)
                x = expected * torch.rand(shape, generator=torch.Generator().manual_seed(1))
                assert equal(call_op(BY_CHANNEL, x, *params), BY_CHANNEL(x, *params))
    one = torch.tensor([0.5]), torch.tensor([1])
    assert equal(call_op(PER_CHANNEL, integers, *one, *params[2:]), PER_CHANNEL(integers, *one, *params[2:]))
