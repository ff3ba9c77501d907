"""The one pass over a weight, against float64 throughout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pt2qa._weights.sums import BLOCK, histograms, weight_sums

SHAPES = [
    ((BLOCK // 1024 * 2 + 3, 1024), 0),
    ((3, 5, 3, 3), 1),
    ((2, BLOCK + 7), 0),
    ((BLOCK + 4099,), None),
    ((7,), None),
    ((), None),
    ((0, 4), 0),
]


def rounded(weight: Tensor) -> Tensor:
    return (weight / 0.001).round().clamp(-127, 127) * 0.001


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_sums_are_those_of_float64(shape: tuple[int, ...], axis: int | None) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.04
    quantized = rounded(weight)
    sums = weight_sums(weight, quantized, axis)
    total, ref, error = sums.total, weight.double(), (weight - quantized).double()
    assert sums.count == total.count == weight.numel()
    assert total.signal == pytest.approx(float((ref * ref).sum()), rel=2e-7)
    assert total.noise == pytest.approx(float((error * error).sum()), rel=2e-7)
    assert total.absolute == pytest.approx(float(error.abs().sum()), rel=2e-7)
    assert total.product == pytest.approx(float((ref * quantized.double()).sum()), rel=2e-7)
    if axis is not None and weight.numel():
        assert sums.largest.tolist() == weight.abs().movedim(axis, 0).flatten(1).amax(1).tolist()
    if weight.numel():
        assert total.atol_seen == float(error.abs().max())
        ends = (weight.min(), weight.max(), quantized.min(), quantized.max())
        assert (total.ref_min, total.ref_max, total.quant_min, total.quant_max) == tuple(map(float, ends))
    if axis is not None:
        noise = (error * error).movedim(axis, 0).flatten(1).sum(1)
        assert sums.noise.tolist() == pytest.approx(noise.tolist(), rel=1e-6)
        assert (
            sums.largest.tolist() == weight.abs().movedim(axis, 0).flatten(1).amax(1).tolist() if noise.numel() else 1
        )


def test_channels_that_float32_cannot_sum_are_read_in_float64() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 40)
    quantized = rounded(weight)
    weight[0] *= 1e-25  # its squares underflow
    weight[1] *= 1e25  # its squares overflow
    weight[2, 3] = math.nan
    weight[3, 0] = quantized[3, 0] = -math.inf
    weight[4, 5] = math.inf
    quantized[0] = 0
    sums = weight_sums(weight, quantized, 0)
    assert sums.signal[:2].tolist() == pytest.approx((weight[:2].double() ** 2).sum(1).tolist(), rel=1e-12)
    assert sums.zero.tolist() == [True, False, False, False, False, False]
    assert sums.excluded.tolist() == [0, 0, 0, 1, 0, 0]
    assert sums.nonfinite.tolist() == [0, 0, 1, 0, 1, 0]
    assert sums.atol.isnan().tolist() == [False, False, True, False, True, False]
    assert sums.total.count == weight.numel() - 3
    assert not sums.finite


def test_other_dtypes_are_summed_in_float64() -> None:
    weight = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    sums = weight_sums(weight, rounded(weight).float(), 0)
    assert sums.signal.tolist() == (weight * weight).sum(1).tolist()


@pytest.mark.parametrize("low_and_high", [(-127, 127), (-93, 127), (0, 255), (1000, 1064)])
@pytest.mark.parametrize("count", [BLOCK + 5, 6])
def test_histograms_are_those_of_float64(low_and_high: tuple[int, int], count: int) -> None:
    """Also where integers lie on edges: -93 and 127 are 220 steps apart, so that every 55th is an edge of 32 bins."""
    torch.manual_seed(0)
    low, high = low_and_high
    steps = torch.randint(low, high + 1, (count,)).float()
    steps[:2] = torch.tensor([low, high])
    for value in (steps * 0.0025857521686702967, steps + torch.rand(count).sub(0.5).where(steps > low, 0.0)):
        covered = float(value.min()), float(value.max())
        expected = torch.histc(value.double(), 32, *covered).long().numpy()
        assert np.array_equal(histograms(value, value, covered, 32, finite=True)[0], expected)


@pytest.mark.parametrize("count", [1, 2, 7, 127 * 63, BLOCK + 5])
def test_values_that_rounding_moves_far_are_counted_whatever_their_number(count: int) -> None:
    """The epsilon of a norm under 8 bits, a weight of 4 bits: rounding moves values by more than one bin."""
    torch.manual_seed(0)
    value = torch.rand(count)
    covered = 0.0, 1.0
    counted = histograms(value, value.round(), covered, 32, finite=True)
    expected = [torch.histc(side.double(), 32, *covered).long().numpy() for side in (value, value.round())]
    assert np.array_equal(counted, expected)


def test_values_that_are_not_finite_are_in_no_bin() -> None:
    value = torch.tensor([math.nan, -math.inf, -1.0, 0.0, 1.0, math.inf])
    assert histograms(value, value, (-1.0, 1.0), 2, finite=False).tolist() == [[1, 2]] * 2
