"""The cost by which a range is chosen, and what is chosen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from pt2qa._repair.ranges import BINS, FittedRanges, Histogram, RangeGroup, Ranges, _best, _weighted, groups_in
from pt2qa._sensitivity.roundings import rounding
from pt2qa._simulator.data import Data
from pt2qa._simulator.program import QuantParams
from pt2qa._trials.outcome import Folds
from tests.check.quantizers import INT8, Annotates
from tests.flows import quantized_pair
from tests.repair.nets import batches, clipped_pair

BY_CHANNEL = QuantizationSpec(torch.int8, PerChannelMinMaxObserver, -128, 127, torch.per_channel_symmetric, 1)


def group(scale: float, zero_point: int, *, symmetric: bool = False) -> RangeGroup:
    return RangeGroup((0,), "x", QuantParams("int8", scale, zero_point, -128, 127), symmetric)


def histogram(values: Tensor, weights: Tensor, low: float, high: float) -> Histogram:
    width = (high - low) / BINS
    return Histogram(round(low / width) - 1, width, _weighted(values, [weights.sqrt()], low, high))


@pytest.mark.parametrize(("scale", "zero_point"), [(0.03, 0), (0.02, -100), (0.005, 20)])
def test_the_cost_on_a_histogram_is_that_of_the_values(scale: float, zero_point: int) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(200_000, generator=generator).relu_()
    values[::7] -= 0.3
    weights = torch.rand(values.shape, generator=generator)
    params = group(scale, zero_point).params
    alone = replace(params, scale=torch.tensor([scale]), zero_point=torch.tensor([zero_point]))
    direct = (weights.double() * (rounding(params)(values) - values).double().square()).sum()
    low, high = float(values.min()), float(values.max())
    assert float(histogram(values, weights, low, high).cost(alone)[0]) == pytest.approx(float(direct), rel=0.02)


def test_values_that_the_output_does_not_see_are_clamped() -> None:
    """As behind a convolution that a ReLU6 reads: the gradient is zero outside of 0..6."""
    values = torch.linspace(-30.0, 40.0, 100_001)
    weights = ((values >= 0) & (values <= 6)).float()
    best = _best(group(70 / 255, -19), -30.0, 40.0, histogram(values, weights, -30.0, 40.0))
    assert isinstance(best.scale, float)
    assert best.zero_point == -128
    assert 6.0 <= best.scale * 255 <= 6.6


def test_a_symmetric_range_stays_symmetric() -> None:
    values = torch.linspace(-40.0, 40.0, 100_001)
    weights = (values.abs() <= 4).float()
    best = _best(group(80 / 255, 0, symmetric=True), -40.0, 40.0, histogram(values, weights, -40.0, 40.0))
    assert best.zero_point == 0
    assert isinstance(best.scale, float)
    assert best.scale * 255 / 2 == pytest.approx(4.0, rel=0.02)


def test_a_range_that_fits_is_left_alone() -> None:
    values = torch.linspace(-1.0, 1.0, 100_001)
    own = group(2 / 255, 0)
    assert _best(own, -1.0, 1.0, histogram(values, torch.ones_like(values), -1.0, 1.0)) is own.params


def test_a_weaker_range_lies_between_geometrically() -> None:
    wide, narrow = group(100 / 255, -128), replace(group(1.0, 0).params, scale=4 / 255, zero_point=-128)
    weaker = FittedRanges({wide: narrow}).weaker
    assert [float(each.groups[wide].scale) * 255 for each in weaker] == pytest.approx([20.0, 44.72], rel=1e-3)  # type: ignore[arg-type]
    assert {each.groups[wide].zero_point for each in weaker} == {-128}
    even = group(100 / 255, 0, symmetric=True)
    [half, _] = FittedRanges({even: replace(even.params, scale=4 / 255)}).weaker
    assert half.groups[even].zero_point == 0
    assert half.groups[even].scale == pytest.approx(20 / 255)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_groups_are_what_shares_a_scale(quantizer: str) -> None:
    pair = clipped_pair(quantizer)
    groups = groups_in(pair)
    together = [index for each in groups for index in each.sites]
    assert len(together) == len(set(together))
    assert {pair.sites[index].kind for index in together} == {"activation"}
    for each in groups:
        assert len({(pair.sites[index].params.scale, pair.sites[index].params.zero_point) for index in each.sites}) == 1


def test_a_value_that_is_rounded_by_channel_as_well_is_in_no_group() -> None:
    def annotate(nodes: dict[str, Node]) -> dict[Node, tuple[dict[Node, object], object]]:
        return {nodes["linear"]: ({}, INT8), nodes["relu"]: ({nodes["linear"]: BY_CHANNEL}, None)}

    batch = torch.linspace(-1, 2, 24).reshape(6, 4)
    pair = quantized_pair(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), batch, Annotates(annotate))
    assert len(pair.sites) == 2
    assert groups_in(pair) == ()


def test_fits_to_halves_add_up() -> None:
    pair = clipped_pair()
    data = Folds(pair, Data("calibration", batches()))
    assert len(data.fold_of) == 4
    assert sorted(data.fold_of.values()) == [0, 0, 1, 1]
    whole = Ranges.look(pair, data)
    first = Ranges.look(pair, Folds(pair, Data("calibration", batches()[::2])))
    for number in whole.spans:
        assert math.isclose(
            float(whole.histograms[0][number].sum()),
            sum(float(first.histograms[half][number].sum()) for half in (0, 1)),
            rel_tol=1e-6,
        )
