"""Histograms: merging is exact, quantiles and distances keep their stated error, other bins hold the same values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from pt2qa._profile.histogram import RELATIVE_ERROR, Histogram, transport

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
LISTS = st.lists(FLOATS, max_size=40)


def of(values: list[float]) -> Histogram:
    return Histogram.of(np.array(values))


def same(left: Histogram, right: Histogram) -> bool:
    return np.array_equal(left.bins, right.bins) and np.array_equal(left.counts, right.counts)


@settings(max_examples=150, deadline=None)
@given(LISTS, LISTS, LISTS)
def test_merging_is_exact_in_any_order_and_grouping(a: list[float], b: list[float], c: list[float]) -> None:
    whole = of(a + b + c)
    assert same(of(a).merge(of(b)).merge(of(c)), whole)
    assert same(of(a).merge(of(b).merge(of(c))), whole)
    assert same(of(c).merge(of(a)).merge(of(b)), whole)
    assert same(whole.merge(Histogram()), whole)
    assert whole.total == len(a + b + c)


@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=60), st.floats(0, 1))
def test_a_quantile_is_within_its_error_of_the_value_of_that_rank(values: list[float], share: float) -> None:
    expected = np.sort(np.array(values))[max(1, math.ceil(share * len(values))) - 1]
    assert of(values).quantile(share) == pytest.approx(expected, rel=RELATIVE_ERROR, abs=1.2e-38)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e300, 1.2e-38, 5e-40, 2**24 + 1.0, 0.1, 127.0]
)
def test_every_magnitude_has_a_bin_that_holds_it(value: float) -> None:
    edges, counts = of([value]).contiguous()
    assert counts.tolist() == [1]
    assert edges[0] <= min(value, 3.4e38) <= edges[1]
    assert Histogram().quantile(0.5) != Histogram().quantile(0.5)


def test_bins_are_ascending_and_at_most_a_32nd_wide() -> None:
    values = np.concatenate([-np.geomspace(1e-30, 1e30, 5000)[::-1], np.geomspace(1e-30, 1e30, 5000)])
    edges, counts = Histogram.of(values).contiguous()
    assert np.all(np.diff(edges) > 0)
    assert counts.sum() == len(values)
    filled = counts > 0
    near = np.minimum(np.abs(edges[:-1]), np.abs(edges[1:]))[filled]
    assert np.all(np.diff(edges)[filled] <= near / 32 * (1 + 1e-12))
    assert np.array_equal(counts[filled], np.histogram(values, edges)[0][filled])


def test_other_bins_hold_the_same_number_of_values() -> None:
    values = np.random.default_rng(0).normal(size=20000)
    histogram, edges = Histogram.of(values), np.linspace(values.min(), values.max(), 41)
    counts = histogram.spread(edges, values.min(), values.max())
    assert counts.sum() == pytest.approx(20000)
    assert np.abs(counts - np.histogram(values, edges)[0]).max() < 60


@pytest.mark.parametrize(
    "values", [[0.0] * 3 + [1.0], [-1.0, 0.0], [-2.0, -1.0, -1.0, 0.0, 0.0, 4.0], [5.0] * 4, [0.0]]
)
def test_values_on_edges_fall_where_numpy_puts_them(values: list[float]) -> None:
    low, high = min(values), max(values)
    edges = np.linspace(low, high, 5) if high > low else np.array([low - 0.5, low, low + 0.5])
    assert of(values).spread(edges, low, high) == pytest.approx(np.histogram(values, edges)[0], abs=1e-9)


def test_bins_of_nothing_are_empty() -> None:
    assert Histogram().spread([-1.0, 0.0, 1.0], math.inf, -math.inf).tolist() == [0.0, 0.0]


def test_magnitudes_fold_the_sign_and_drop_zeros() -> None:
    assert same(of([-3.0, 2.0, 0.0, 3.0]).magnitudes, of([3.0, 2.0, 3.0]))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50),
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50),
)
def test_the_distance_is_that_of_scipy_to_the_width_of_bins(a: list[float], b: list[float]) -> None:
    error = RELATIVE_ERROR * (np.abs(a).mean() + np.abs(b).mean())
    assert transport(of(a), of(b)) == pytest.approx(wasserstein_distance(a, b), abs=error + 1e-12)
    assert transport(of(a), of(a)) == 0.0


def test_a_distance_from_nothing_is_not_defined() -> None:
    assert math.isnan(transport(Histogram(), of([1.0])))
