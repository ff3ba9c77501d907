"""What is observed of the ranges of a site, by batch and by channel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pt2qa._sensitivity.ranges import Observed, use_of
from pt2qa._simulator.program import QuantParams, Site


def observed(*channels: list[float]) -> Observed:
    """Ranges of channels along axis 1, of some batches: from minus the numbers to the numbers."""
    found = Observed()
    for each in channels:
        values = torch.tensor(each)
        found.lowest.append(float(-values.max()))
        found.highest.append(float(values.max()))
        found.add_channels(1, -values, values)
    return found


def test_ranges_by_channel_are_those_of_all_batches() -> None:
    found = observed([1.0, 5.0], [2.0, 3.0])
    assert found.channels is not None
    assert found.channels[1].tolist() == [2.0, 5.0]
    assert found.whole == (-5.0, 5.0)
    assert found.without(0) == (-3.0, 3.0)
    assert observed([1.0, 5.0]).without(0) == pytest.approx((np.nan, np.nan), nan_ok=True)


def test_an_axis_of_several_sizes_has_no_channels() -> None:
    """An axis of tokens was taken for channels, and broke the run of a prompt of another length."""
    found = observed([1.0, 5.0], [2.0, 3.0, 4.0], [6.0, 7.0])
    assert (found.axis, found.channels) == (None, None)
    assert found.whole == (-7.0, 7.0)


def test_nor_has_one_whose_size_differs_between_processes() -> None:
    for first, second in (([1.0, 5.0], [2.0, 3.0, 4.0]), ([2.0, 3.0, 4.0], [1.0, 5.0])):
        found = observed(first)
        found.extend(observed(second))
        assert found.axis is None
        later = observed([8.0, 9.0])
        later.extend(found)
        assert later.axis is None


@pytest.mark.parametrize(("lowest", "highest"), [(-20.0, 5.0), (2.0, 15.0), (-30.0, -3.0), (-1.0, 1.0)])
def test_the_use_of_a_range_counts_from_zero(lowest: float, highest: float) -> None:
    params = QuantParams("int8", 0.1, 3, -128, 127)
    held, shown = 0.1 * (np.array([-128, 127]) - 3), np.array([min(lowest, 0.0), max(highest, 0.0)])
    beyond = np.ptp(shown) - np.ptp(np.clip(shown, *held))
    site = Site(0, "activation", "x", "input", 0, (), params, 0, 1, True)
    assert use_of(site, lowest, highest) == pytest.approx((np.ptp(shown) / np.ptp(held), beyond / np.ptp(held)))
