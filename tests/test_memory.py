"""Memory beyond a model of linear weights, in a process of its own; the benchmark `weights` measures 1 GB of them."""

from __future__ import annotations

import pytest

from tests.benchmarks.weights import ANALYSES, KEPT_BAR, PEAK_BAR, measured

WIDTH, LAYERS = 512, 48
"""50 MB of weights."""


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """With the cache that 1 GB has, in proportion."""
    return measured(WIDTH, LAYERS, list(ANALYSES), weight_cache=WIDTH * WIDTH * LAYERS * 4 // 8, in_use=True)


def test_a_pair_keeps_integers_and_a_part_of_the_floats(found: dict[str, float]) -> None:
    assert 0.25 < found["quantize"] <= KEPT_BAR


@pytest.mark.parametrize("name", ANALYSES)
def test_no_analysis_makes_all_weights_float_at_once(name: str, found: dict[str, float]) -> None:
    assert found[name] <= PEAK_BAR
