"""Statistics by channel against NumPy, and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pt2qa._profile import statistics
from pt2qa._profile.statistics import ChannelStatistics


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
