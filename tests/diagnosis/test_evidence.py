"""The interval of a gain holds what another set of as many samples gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pt2qa._trials.evidence import Gain, interval, is_steady, student
from pt2qa._trials.outcome import Outcome


def errors(count: int, spread: float, gain: float) -> tuple[Tensor, Tensor]:
    """Squared errors of samples before and after a remedy: log-normal, and alike in what is hard."""
    hard, other = torch.randn(2, count, dtype=torch.float64)
    return (spread * hard).exp(), (spread * (0.8 * hard + 0.6 * other)).exp() * 10 ** (-gain / 10)


@pytest.mark.parametrize("count", [24, 48])
@pytest.mark.parametrize(("spread", "least"), [(0.3, 0.93), (1.0, 0.92)])
def test_it_holds_what_another_set_of_as_many_gives(count: int, spread: float, least: float) -> None:
    torch.manual_seed(0)
    held = 0
    for _ in range(600):
        low, high = interval(*errors(count, spread, 3.0))
        before, after = errors(count, spread, 3.0)
        held += low <= float(10 * (before.sum() / after.sum()).log10()) <= high
    assert held / 600 >= least


def test_a_remedy_without_effect_is_seldom_certain() -> None:
    torch.manual_seed(0)
    certain = [Gain(low=low, high=high, value=(low + high) / 2).is_certain for low, high in _without_effect()]
    assert sum(certain) / len(certain) < 0.05


def _without_effect() -> list[tuple[float, float]]:
    return [interval(*errors(32, 1.0, 0.0)) for _ in range(400)]


def test_a_gain_that_one_sample_makes_is_not_certain() -> None:
    before, after = torch.ones(2, 32, dtype=torch.float64)
    before[3] = 100.0  # +6 dB, of which other data have nothing
    low, high = interval(before, after)
    assert low < 0 < high
    assert float(10 * (before.sum() / after.sum()).log10()) > 6


def test_samples_that_gain_one_by_one_are_steady_though_few_of_them_make_most_of_the_error() -> None:
    torch.manual_seed(0)
    before, after = errors(32, 3.0, 10.0)
    gain = Gain(
        float(10 * (before.sum() / after.sum()).log10()), *interval(before, after), "", is_steady(before, after)
    )
    assert (gain.is_certain, gain.is_steady, gain.holds) == (False, True, True)
    assert not is_steady(after, before)
    assert not is_steady(*torch.ones(2, 32, dtype=torch.float64))
    # Most gain a little, and one loses more than all of them gain.
    after = 0.9 * before
    after[5] += before.sum()
    assert not is_steady(before, after)
    # One gains, and more than all others, which lose.
    before, after = torch.ones(2, 32, dtype=torch.float64)
    before[3], after[:2] = 100.0, 1.1
    assert not is_steady(before, after)


@pytest.mark.parametrize(("gained", "steady"), [(8, True), (7, False)])
def test_eight_samples_are_enough_if_all_gain(gained: int, steady: bool) -> None:
    before = torch.arange(1, 9, dtype=torch.float64)
    after = 0.5 * before
    after[gained:] = 1.01 * before[gained:]
    assert is_steady(before, after) is steady
    assert is_steady(torch.cat([before, torch.zeros(4)]), torch.cat([after, torch.zeros(4)])) is steady


def test_chance_is_seldom_steady() -> None:
    torch.manual_seed(0)
    assert sum(is_steady(*errors(32, 1.0, 0.0)) for _ in range(1000)) < 20


def test_one_sample_tells_nothing_of_others() -> None:
    low, high = interval(*torch.ones(2, 1, dtype=torch.float64))
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 2.571), (10, 2.228), (23, 2.069), (1000, 1.962)])
def test_quantiles_are_those_of_student(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=3e-3)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182)])
def test_few_samples_err_to_wide(freedom: int, quantile: float) -> None:
    assert quantile <= student(freedom) < 1.4 * quantile


def test_a_gain_is_that_of_the_output_that_was_worst_or_of_another_one() -> None:
    signal = torch.full((2, 8), 100.0, dtype=torch.float64)
    noise = torch.tensor([10.0, 1.0], dtype=torch.float64)[:, None].expand(2, 8).clone()
    before = Outcome(10.0, (("a", 10.0), ("b", 20.0)), signal=signal, noise=noise)
    after = Outcome(20.0, (("a", 20.0), ("b", 20.0)), signal=signal, noise=noise.clamp(max=1.0))
    assert (after.gain_over(before).value, after.gain_over(before).output) == (10.0, "a")
    assert after.gain_over(before, "b").value == 0.0
    assert before.by_quality == ["a", "b"]
