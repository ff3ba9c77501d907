"""The ranges of a model's values against plain runs of its float graph, and the axis of their channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._sensitivity.ranges import Observed, channel_axis, observe, use_of
from pt2qa._simulator.data import Counted
from pt2qa._simulator.program import QuantParams, Site
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.recomputation import Recording, by_handle
from tests.simulator import test_nested_graphs as nested_graphs

BATCHES = [images(seed=seed) for seed in range(3)]


def by_site(pair: pt2qa.QuantizedPair, batches: list[Any]) -> dict[int, list[Tensor]]:
    """The float values of each activation that is rounded, batch by batch, from the float graph."""
    nodes = by_handle(pair.reference)
    runs = [Recording.of(pair.reference, batch) for batch in batches]
    sites = [site for site in pair.sites if site.kind == "activation"]
    return {site.index: [run[nodes[site.handle]] for run in runs] for site in sites}


def test_ranges_are_those_of_the_float_graphs_values() -> None:
    pair = residual_pair()
    found = observe(pair, [(pair.values(batch), Counted(None, {}, pair.program)) for batch in BATCHES])
    values = by_site(pair, BATCHES)
    assert found.keys() == values.keys()
    for index, seen in found.items():
        own = values[index]
        assert seen.lowest == [float(value.min()) for value in own]
        assert seen.highest == [float(value.max()) for value in own]
        assert seen.whole == (min(seen.lowest), max(seen.highest))
        axis = channel_axis(pair.sites[index], own[0])
        assert seen.axis == axis
        assert axis is not None
        assert seen.channels is not None
        channels = torch.cat([value.movedim(axis, 0).flatten(1) for value in own], 1)
        assert [each.tolist() for each in seen.channels] == [channels.amin(1).tolist(), channels.amax(1).tolist()]
        assert seen.without(1) == (min(seen.lowest[::2]), max(seen.highest[::2]))


def test_a_branch_has_ranges_of_the_batches_that_take_it() -> None:
    pair, _, _ = nested_graphs.made("cond")
    data = nested_graphs.batches(6)
    found = observe(pair, [(pair.values(batch), Counted(None, {}, pair.program)) for batch in data])
    (first,) = [node for node in pair.reference.graph.nodes if "linear" in str(node.target)][:1]
    read = [Recording.of(pair.reference, batch)[first] for batch in data]
    positive = [bool(value.sum() > 0) for value in read]
    assert 0 < sum(positive) < len(data)
    nested = [found[site.index] for site in pair.sites if site.nested and site.kind == "activation"]
    taken = [[math.isfinite(low) for low in seen.lowest] for seen in nested]
    assert positive in taken
    assert [not each for each in positive] in taken
    for seen, there in zip(nested, taken, strict=True):
        assert [(low, high) for low, high in zip(seen.lowest, seen.highest, strict=True) if low > high] == [
            (math.inf, -math.inf)
        ] * (len(data) - sum(there))
    # What a branch reads is rounded in it, among others.
    ends = [(float(value.min()), float(value.max())) for value in read]
    expected = [each if there else (math.inf, -math.inf) for each, there in zip(ends, positive, strict=True)]
    assert expected in [list(zip(seen.lowest, seen.highest, strict=True)) for seen in nested]


def test_values_that_are_not_finite_count_as_zero_and_values_without_elements_not_at_all() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(torch.nn.Linear(3, 2), (torch.randn(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    spoilt = torch.tensor([[1.0, 5.0, math.nan], [-2.0, math.inf, -math.inf]])
    x = next(site.index for site in pair.sites if site.source != site.result and site.op == "input")
    every = Counted(None, {}, pair.program)
    seen = observe(pair, [(pair.values((spoilt,)), every), (pair.values((torch.ones(0, 3),)), every)])[x]
    assert (seen.lowest, seen.highest) == ([-2.0], [5.0])
    assert seen.channels is not None
    assert [each.tolist() for each in seen.channels] == [[-2.0, 0.0, 0.0], [1.0, 5.0, 0.0]]


def site(op: str, *readers: str, params: QuantParams | None = None) -> Site:
    return Site(0, "activation", "x", op, 0, readers, params or QuantParams("int8", 0.1, 0, -128, 127), 0, 1, True)


def test_channels_are_axis_one_of_convolutions_and_else_the_last_unless_another_is_less_equal() -> None:
    value = torch.ones(2, 3, 4)
    assert channel_axis(site("linear"), value[0, 0]) is None
    assert channel_axis(site("conv1d"), value) == 1
    assert channel_axis(site("add", "down/linear", "up/max_pool2d"), value) == 1
    assert channel_axis(site("add", "conv/linear"), value) == 2  # the name of a module is no op
    assert channel_axis(site("linear"), value[0]) == 1
    heads, last = value.clone(), value.clone()
    # Half as unequal as axis 1, and the last axis still wins; more than that, and it does not.
    heads[:, 1] = 1.9
    assert channel_axis(site("linear"), heads) == 2
    heads[:, 1] = 5.0
    assert channel_axis(site("linear"), heads) == 1
    heads[0, 2, 3] = -30.0  # in both axes, so twice that of the last one is more
    assert channel_axis(site("linear"), heads) == 2
    last[1] = 50.0  # samples are no channels
    assert channel_axis(site("linear"), last) == 2


def test_the_range_of_a_batch_is_closed_with_what_came_since_the_one_before() -> None:
    found = Observed([-1.0, -5.0, -3.0], [1.0, 2.0, 7.0])
    found.close(1)
    assert (found.lowest, found.highest) == ([-1.0, -5.0], [1.0, 7.0])
    found.close(2)
    assert (found.lowest[2], found.highest[2]) == (math.inf, -math.inf)
    assert found.whole == (-5.0, 7.0)
    assert found.left_without([0, 2]) == Observed([-5.0], [7.0])
    assert all(map(math.isnan, Observed().whole))


def test_ranges_of_several_processes_follow_each_other() -> None:
    first, second = Observed([-1.0], [1.0]), Observed([-2.0, -3.0], [2.0, 3.0])
    ends = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0])
    second.add_channels(1, *ends)
    first.extend(second)
    assert (first.lowest, first.highest) == ([-1.0, -2.0, -3.0], [1.0, 2.0, 3.0])
    assert first.axis == 1
    assert first.channels is not None
    assert [each.tolist() for each in first.channels] == [end.tolist() for end in ends]
    first.add_channels(2, torch.zeros(2) - 9, torch.zeros(2) + 9)  # along another axis
    assert first.channels is not None
    assert first.channels[0].tolist() == [-1.0, -2.0]
    first.extend(Observed([0.0], [0.0], uneven=True))
    assert (first.axis, first.channels, first.uneven) == (None, None, True)
    first.add_channels(1, *ends)
    assert first.channels is None


@pytest.mark.parametrize(
    "params",
    [
        QuantParams("int8", 0.1, 0, -128, 127, dynamic=True),
        QuantParams("int8", None, None, -128, 127),
        QuantParams("int8", 0.0, 0, -128, 127),
    ],
)
def test_without_a_range_that_data_can_leave_there_is_no_use_of_it(params: QuantParams) -> None:
    assert all(map(math.isnan, use_of(site("add", params=params), -1.0, 1.0)))
    assert all(map(math.isnan, use_of(site("add"), math.nan, 1.0)))
