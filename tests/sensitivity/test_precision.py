"""How reliable a ranking is, and how many projections it takes, written out with SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import polygamma
from scipy.stats import spearmanr

from pt2qa._sensitivity import precision
from pt2qa._sensitivity.precision import ALIKE, FEWEST, MOST, OFTEN, error_of, needed, reached_by_most

NOISE = [0.01, 0.2, 0.25, 0.3, 4.0, 5.0, 80.0]


def redrawn(noise: list[float], variance: list[float]) -> float:
    """The correlation that nine of ten redrawn rankings reach, one ranking after the other."""
    values = np.array([10 * math.log10(own) for own in noise])
    errors = np.array([error_of(own, spread) for own, spread in zip(noise, variance, strict=True)])
    closer = math.sqrt(max(0.0, 1 - np.mean(errors**2) / np.var(values)))
    deviates = np.random.default_rng(20241).standard_normal((50, len(noise)))
    found = [spearmanr(closer * values + errors * own, values).statistic for own in deviates]
    return float(np.quantile(found, 1 - OFTEN))


@pytest.mark.parametrize("relative", [0.01, 0.1, 0.5, 2.0])
def test_the_correlation_is_that_of_rankings_drawn_again(relative: float) -> None:
    variance = [relative * own**2 for own in NOISE]
    assert reached_by_most(NOISE, variance) == pytest.approx(redrawn(NOISE, variance))
    # Rows without noise, or without a number, have no rank.
    more = [*NOISE, 0.0, math.inf, math.nan]
    assert reached_by_most(more, [*variance, 1.0, 1.0, 1.0]) == reached_by_most(NOISE, variance)


def test_what_has_nothing_to_rank_is_certain() -> None:
    assert reached_by_most([], []) == reached_by_most([3.0], [9.0]) == reached_by_most([3.0, 0.0], [9.0, 0.0]) == 1.0
    # Two equal rows: their order is chance, and the spread to shrink to is none.
    assert reached_by_most([2.0, 2.0], [1.0, 1.0]) == -1.0


@pytest.mark.parametrize(("squares", "within"), [(4, 1e-3), (6, 1e-3), (40, 1e-5), (1e6, 1e-9)])
def test_the_error_in_decibels_is_that_of_the_logarithm_of_a_chi_squared_variable(
    squares: float, within: float
) -> None:
    noise = 3.0
    variance = 2 * noise**2 / (squares + 2)
    expected = 10 / math.log(10) * math.sqrt(polygamma(1, squares / 2))
    assert error_of(noise, variance) == pytest.approx(expected, rel=within)


def test_the_error_of_what_is_not_estimated_is_none_and_that_of_less_than_one_square_is_that_of_one() -> None:
    assert error_of(2.0, 0.0) == error_of(0.0, 1.0) == error_of(math.nan, 1.0) == 0.0
    assert error_of(1.0, 10.0) == error_of(1.0, 2 / 3) == pytest.approx(10 / math.log(10) * math.sqrt(16 / 3))


@pytest.mark.parametrize("relative", [1e-4, 0.1, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("earlier", [0.0, 0.02])
def test_projections_double_until_the_ranking_is_reliable(relative: float, earlier: float) -> None:
    variance, before = [relative * own**2 for own in NOISE], [earlier * own**2 for own in NOISE]
    enough = [
        count
        for count in (4, 8, 16, 32, 64)
        if reached_by_most(NOISE, [a + b * 4 / count for a, b in zip(before, variance, strict=True)]) >= ALIKE
    ]
    assert needed(NOISE, variance, before, FEWEST) == next(iter(enough), None)


def test_the_last_step_is_to_the_most_and_beyond_it_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def never(noise: list[float], variance: list[float]) -> float:
        asked.append(variance[0])
        return ALIKE - 1e-9

    monkeypatch.setattr(precision, "reached_by_most", never)
    assert needed([1.0, 2.0], [48.0, 48.0], [1.0, 1.0], 48) is None
    assert asked == [1 + 48.0, 1 + 48 * 48 / MOST]
    asked.clear()
    assert needed([1.0, 2.0], [64.0, 64.0], [0.0, 0.0], FEWEST) is None
    assert asked == [64.0, 32.0, 16.0, 8.0, 4.0]  # 4, 8, 16, 32 and 64 of them
    monkeypatch.setattr(precision, "reached_by_most", lambda noise, variance: ALIKE)
    assert needed([1.0, 2.0], [1.0, 1.0], [0.0, 0.0], 6) == 6
