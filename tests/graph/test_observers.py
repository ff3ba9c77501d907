"""What observers learned from parts of the data is put together; copies of a graph module keep its notes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torchao.quantization import pt2e

from pt2qa._graph.handles import copy_nodes
from pt2qa._graph.internals.torchao import fold_quantized_weights, set_statistics, statistics_of
from pt2qa._simulator.graph_run import call_op
from pt2qa._simulator.quant_ops import strip_quantization

FIRST, SECOND = torch.tensor([[-1.0, 4.0, 2.0], [0.5, 3.0, 1.0]]), torch.tensor([[-3.0, 1.0, 0.0], [2.0, 9.0, 4.0]])


def learned(make: Any, *data: Tensor) -> dict[str, Tensor]:
    observer = make()
    for x in data:
        observer(x)
    return statistics_of(observer)


def together(make: Any) -> Any:
    """An observer with the statistics of three batches in one part, one in another, and a part without any."""
    observer = make()
    parts = [(3, learned(make, FIRST)), (0, learned(make)), (1, learned(make, SECOND))]
    set_statistics(observer, parts)
    return observer


@pytest.mark.parametrize("make", [pt2e.MinMaxObserver, pt2e.PerChannelMinMaxObserver])
def test_ranges_of_parts_are_the_range_of_all(make: Any) -> None:
    observer, whole = together(make), make()
    whole(FIRST)
    whole(SECOND)
    assert torch.equal(observer.min_val, whole.min_val)
    assert torch.equal(observer.max_val, whole.max_val)


def test_moving_averages_are_weighted_by_the_numbers_of_batches() -> None:
    observer = together(pt2e.MovingAveragePerChannelMinMaxObserver)
    assert observer.min_val.tolist() == pytest.approx([(3 * -1.0 - 3.0) / 4, (3 * 0.5 + 2.0) / 4])
    assert observer.max_val.tolist() == pytest.approx([(3 * 4.0 + 1.0) / 4, (3 * 3.0 + 9.0) / 4])
    observer = together(pt2e.MovingAverageMinMaxObserver)
    assert (float(observer.min_val), float(observer.max_val)) == pytest.approx(((3 * -1.0 - 3.0) / 4, (3 * 4 + 9) / 4))


def test_histograms_of_parts_count_every_value_in_the_whole_range() -> None:
    observer = together(pt2e.HistogramObserver)
    assert (float(observer.min_val), float(observer.max_val)) == (-3.0, 9.0)
    assert float(observer.histogram.sum()) == pytest.approx(FIRST.numel() + SECOND.numel())
    low = observer.histogram[: observer.histogram.numel() // 4].sum()  # -3 to 0
    assert 2 <= float(low) <= 3


def test_parts_that_saw_nothing_change_nothing() -> None:
    observer = pt2e.MinMaxObserver()
    observer(FIRST)
    set_statistics(observer, [(0, learned(pt2e.MinMaxObserver))])
    assert (float(observer.min_val), float(observer.max_val)) == (-1.0, 4.0)


def test_a_channel_that_is_nan_in_one_part_leaves_the_others_their_range() -> None:
    broken, make = SECOND.clone().fill_diagonal_(torch.nan)[:1], lambda: pt2e.PerChannelMinMaxObserver(ch_axis=1)
    observer, whole = make(), make()
    set_statistics(observer, [(1, learned(make, FIRST)), (1, learned(make, broken))])
    whole(FIRST)
    whole(broken)
    assert torch.equal(observer.min_val.isnan(), torch.tensor([True, False, False]))
    assert torch.equal(observer.min_val[1:], whole.min_val[1:])


def test_a_copy_keeps_the_notes_of_a_graph_module() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
    module = GraphModule({}, graph)
    module.meta["own"] = "note"
    copies = copy_nodes(module), strip_quantization(module), fold_quantized_weights(module, call_op)
    assert [each.meta["own"] for each in copies] == ["note"] * 3


@pytest.mark.parametrize("make", [pt2e.MinMaxObserver, pt2e.PerChannelMinMaxObserver])
def test_a_part_in_which_all_values_are_equal_counts(make: Any) -> None:
    observer = make()
    set_statistics(observer, [(1, learned(make, FIRST)), (1, learned(make, torch.full((2, 3), 7.0)))])
    assert set(observer.max_val.reshape(-1).tolist()) == {7.0}
