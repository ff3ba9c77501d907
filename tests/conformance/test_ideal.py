"""Ideal rounding, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa
from pt2qa._conformance.properties.converted import (
    ALLOWANCE,
    BIT,
    IdealSimulator,
    ideal_rounding,
    output_sqnr,
    range_of,
)
from pt2qa._simulator.program import QuantParams


def rounded(value: np.ndarray, low: float, high: float, levels: int) -> np.ndarray:
    """The formula of the affine scheme, in float64."""
    step = (high - low) / levels if high > low else 1.0
    zero = np.round(-low / step)
    return (np.clip(np.round(value / step) + zero, 0, levels) - zero) * step


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("limits", [(0, 255), (-128, 127), (-8, 7)])
def test_equals_the_formula(shift: float, limits: tuple[int, int]) -> None:
    value = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0)) + shift
    params = QuantParams("int8", 0.1, 0, *limits)
    exact = value.double().numpy()
    expected = rounded(exact, min(exact.min(), 0.0), max(exact.max(), 0.0), limits[1] - limits[0])
    np.testing.assert_allclose(ideal_rounding(value, params).numpy(), expected, rtol=1e-6, atol=1e-7)


def test_each_channel_has_its_own_range() -> None:
    value = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [10.0], [100.0]])
    found = ideal_rounding(value, QuantParams("int8", torch.ones(3), torch.zeros(3), -128, 127, axis=0)).numpy()
    for row, exact in zip(found, value.double().numpy(), strict=True):
        np.testing.assert_allclose(row, rounded(exact, min(exact.min(), 0), max(exact.max(), 0), 255), rtol=1e-6)


def test_more_bits_are_worth_six_decibels_each() -> None:
    value = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    sqnr = [
        output_sqnr(value, ideal_rounding(value, QuantParams("int8", 1.0, 0, 0, 2**bits - 1))) for bits in (6, 7, 8)
    ]
    assert np.diff(sqnr) == pytest.approx([BIT, BIT], abs=0.3)
    assert pytest.approx(2 * 20 * np.log10(2), abs=0.01) == ALLOWANCE


def test_zeros_infinities_and_half_precision() -> None:
    params = QuantParams("int8", 1.0, 0, -128, 127)
    assert torch.equal(ideal_rounding(torch.zeros(3), params), torch.zeros(3))
    masked = torch.tensor([1.0, float("-inf"), -1.0])
    assert [float(end) for end in range_of(masked, None)] == [-1.0, 1.0]
    assert ideal_rounding(masked, params)[1] == pytest.approx(-1.0, rel=0.01)
    value = torch.randn(5)
    assert torch.equal(ideal_rounding(value, QuantParams("float16")), value.half().float())


def test_values_with_one_scale_have_one_range() -> None:
    """x86 gives a pool the scale of its input: the mean of many values is rounded to steps for the values."""
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)).eval()
    pair = pt2qa.quantize(pt2qa.capture(model, batch), "x86", [batch], progress=False)
    values = pair.values(batch)
    reference = pair.simulator.run(values, on=False)
    apart = Apart(pair.program, values)
    shared, alone = (
        output_sqnr(reference, each.run(values, on=True)) for each in (IdealSimulator(pair.program, values), apart)
    )
    assert alone > shared + BIT


class Apart(IdealSimulator):
    """Gives every value its own range."""

    def run(self, values, on=True):
        self._shared = {}
        return super().run(values, on)
