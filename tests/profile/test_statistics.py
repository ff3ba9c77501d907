"""Statistics of a value and of its channels against NumPy in float64, and their laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pt2qa._metrics import CHUNK
from pt2qa._profile import statistics
from pt2qa._profile.histogram import Histogram
from pt2qa._profile.statistics import ChannelStatistics, Statistics


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TENSORS: dict[str, Tensor] = {
    "normal": random(3, 50, 7),
    "several chunks": random(2 * CHUNK + 17),
    "relu": random(4, 8, 16, 16).relu(),
    "channels last": random(4, 8, 16, 16).contiguous(memory_format=torch.channels_last),
    "a slice": random(10, 20)[::2, 3:9],
    "expanded": random(1, 5).expand(7, 5),
    "far from zero": random(100000) * 1e-2 + 1e3,
    "huge": random(100) * 1e30,
    "tiny": random(100) * 1e-30,
    "subnormal": torch.tensor([1e-40, -3e-41, 0.0]),
    "constant": torch.full((9,), -1.5),
    "all zero": torch.zeros(6),
    "negative zero": torch.tensor([-0.0, 0.0, 1.0]),
    "0-d": torch.tensor(3.0),
    "float64": random(60).double() * 1e100,
    "float16": random(60).half(),
    "bfloat16": random(60).bfloat16(),
    "int64": torch.randint(-50, 50, (40,), generator=torch.Generator().manual_seed(0)),
    "int8": torch.arange(-128, 128, dtype=torch.int8),
    "bool": random(30) > 0,
    "needs a gradient": random(5).requires_grad_(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_number_equals_numpy_in_float64(name: str) -> None:
    x = TENSORS[name]
    found, values = Statistics.of(x, histogram=True), x.detach().double().numpy()
    assert (found.count, found.nans, found.infs) == (values.size, 0, 0)
    assert (found.smallest, found.largest) == (values.min(), values.max())
    assert found.zeros == np.sum(values == 0)
    spread = values.std() + 1e-300
    assert found.moments.mean == pytest.approx(values.mean(), rel=1e-7, abs=1e-6 * spread)
    assert found.moments.variance == pytest.approx(values.var(), rel=1e-6, abs=1e-300)
    expected = Histogram.of(values)
    assert found.histogram is not None
    assert np.array_equal(found.histogram.bins, expected.bins)
    assert np.array_equal(found.histogram.counts, expected.counts)


def test_nan_and_infinities_are_counted_and_left_out() -> None:
    x = torch.tensor([1.0, math.nan, -math.inf, 3.0, math.inf, math.nan, 0.0])
    found = Statistics.of(x, histogram=True)
    assert (found.count, found.nans, found.infs, found.zeros) == (7, 2, 2, 1)
    assert (found.smallest, found.largest, found.moments.mean) == (0.0, 3.0, pytest.approx(4 / 3))
    assert found.moments.variance == pytest.approx(np.var([1.0, 3.0, 0.0]))
    assert found.histogram is not None
    assert found.histogram.total == 3


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.tensor([math.nan, math.inf])], ids=["empty", "nothing finite"])
def test_without_a_finite_value_there_are_no_moments(x: Tensor) -> None:
    found = Statistics.of(x, histogram=True)
    assert found.count == x.numel()
    assert math.isnan(found.moments.variance)
    assert found.moments.count == 0
    assert found.smallest > found.largest


def test_a_complex_value_counts_as_its_parts() -> None:
    found = Statistics.of(torch.tensor([1 + 2j, 3 - 4j]).conj(), histogram=False)
    assert (found.count, found.smallest, found.largest) == (4, -2.0, 4.0)
    assert found.histogram is None


VALUES = st.one_of(st.floats(-100, 100, width=32), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))
LISTS = st.lists(VALUES, max_size=30)


@settings(max_examples=100, deadline=None)
@given(LISTS, LISTS, LISTS, st.sampled_from([torch.float32, torch.float64]))
def test_chunks_merge_to_the_whole(a: list[float], b: list[float], c: list[float], dtype: torch.dtype) -> None:
    one, two, three, whole = (
        Statistics.of(torch.tensor(values, dtype=dtype), histogram=True) for values in (a, b, c, a + b + c)
    )
    for merged in (one.merge(two).merge(three), one.merge(two.merge(three)), three.merge(one).merge(two)):
        assert_equal(merged, whole)
    assert_equal(whole.merge(Statistics()), whole)
    assert_equal(Statistics().merge(whole), whole)


def assert_equal(left: Statistics, right: Statistics) -> None:
    """Everything but the moments exactly."""

    def exact(of: Statistics) -> Any:
        histogram = of.histogram or Histogram()
        bins = (histogram.bins.tolist(), histogram.counts.tolist())
        return of.count, of.smallest, of.largest, of.zeros, of.nans, of.infs, of.moments.count, bins

    assert exact(left) == exact(right)
    assert left.moments.mean == pytest.approx(right.moments.mean, rel=1e-6, abs=1e-5)
    assert left.moments.squares == pytest.approx(right.moments.squares, rel=1e-5, abs=1e-5)


# -- by channel ------------------------------------------------------------------------------------------------------


def numpy_by_channel(x: Tensor, axis: int) -> list[np.ndarray]:
    values = np.moveaxis(x.double().numpy(), axis, 0).reshape(x.shape[axis], -1)
    kept = [row[np.isfinite(row)] for row in values]
    return [
        np.array([row.size for row in kept]),
        *(np.array([f(row) if row.size else math.nan for row in kept]) for f in (np.min, np.max, np.mean, np.var)),
        np.array([np.sum(row == 0) / max(row.size, 1) for row in kept]),
    ]


@pytest.mark.parametrize("chunk", [7, 1 << 19], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_every_number_equals_numpy(axis: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "CHUNK", chunk)
    x = torch.randn(4, 5, 6, 3).relu()
    x[0, 0, 0, 0], x[1, 2, 0, 1] = math.nan, math.inf
    for found, expected in zip(ChannelStatistics.of(x, axis).arrays(), numpy_by_channel(x, axis), strict=True):
        assert found == pytest.approx(expected)


def test_a_channel_without_values_is_nan_and_does_not_spoil_a_merge() -> None:
    broken = torch.full((2, 2), math.nan)
    good = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    count, low, high, mean, variance, _ = ChannelStatistics.of(broken, 1).merge(ChannelStatistics.of(good, 1)).arrays()
    assert (count.tolist(), low.tolist(), high.tolist()) == ([2, 2], [1.0, 5.0], [3.0, 5.0])
    assert (mean.tolist(), variance.tolist()) == ([2.0, 5.0], [1.0, 0.0])
    assert np.isnan(ChannelStatistics.of(broken, 1).arrays()[3]).all()


def test_batches_merge_to_the_whole_in_any_grouping() -> None:
    a, b, c = torch.randn(3, 4), torch.randn(5, 4) + 10, torch.randn(2, 4)
    whole = ChannelStatistics.of(torch.cat([a, b, c]), 1).arrays()
    one, two, three = (ChannelStatistics.of(x, 1) for x in (a, b, c))
    for merged in (one.merge(two).merge(three), one.merge(two.merge(three)), three.merge(two).merge(one)):
        for found, expected in zip(merged.arrays(), whole, strict=True):
            assert found == pytest.approx(expected)


def test_other_numbers_of_channels_do_not_merge() -> None:
    uneven = ChannelStatistics.of(torch.ones(2, 3), 1).merge(ChannelStatistics.of(torch.ones(2, 4), 1))
    assert uneven.uneven
    assert uneven.merge(ChannelStatistics.of(torch.ones(2, 3), 1)).uneven
    assert [len(array) for array in uneven.arrays()] == [0] * 6
