"""Memory of a comparison: two live sets of values, however many layers and batches there are."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pt2qa
from tests.zoo.pairs import captured, pair_of

pytestmark = [pytest.mark.zoo, pytest.mark.xdist_group("mobilenet_v2")]


def peak_bytes(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> int:
    """The most bytes of tensors that a comparison had alive at one time, as torch's allocator counted them."""
    # Else the comparison would run the whole graphs, to hold its outputs against theirs.
    pt2qa.compare_layers(pair, batches[:1], progress=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        pt2qa.compare_layers(pair, batches, progress=False)
    # The raw events: what profiled.events() makes of them has neither each allocation nor their order.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: (event.start_ns(), event.nbytes()))]
    assert sum(changes) == 0
    return max(accumulate(changes))


def value_sizes(pair: pt2qa.QuantizedPair, batch: Tensor) -> list[int]:
    """The bytes of each op's output in the reference."""
    sizes: list[int] = []

    class Sizes(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            value = super().run_node(node)
            if node.op == "call_function" and isinstance(value, Tensor):
                sizes.append(value.nbytes)
            return value

    with torch.no_grad():
        Sizes(pair.reference).run(batch, enable_io_processing=False)
    return sizes


def test_memory_does_not_grow_with_batches() -> None:
    pair, (first, second) = pair_of("mobilenet_v2", "xnnpack"), captured("mobilenet_v2").batches
    one, four = peak_bytes(pair, [first]), peak_bytes(pair, [first, second, first.flip(3), second.flip(3)])
    assert four <= 1.02 * one, f"{one / 2**20:.1f} MiB for one batch, {four / 2**20:.1f} MiB for four"


def test_memory_is_that_of_a_few_values() -> None:
    pair, batch = pair_of("mobilenet_v2", "xnnpack"), captured("mobilenet_v2").batches[0]
    sizes, peak = value_sizes(pair, batch), peak_bytes(pair, [batch])
    # A logger keeps every value of both graphs; reference, quantized, isolated and rounded value of one op are four.
    assert peak < 2 * sum(sizes) / 4, f"{peak / 2**20:.0f} MiB; all values have {2 * sum(sizes) / 2**20:.0f} MiB"
    assert peak < 6 * max(sizes), f"{peak / 2**20:.0f} MiB; the largest value has {max(sizes) / 2**20:.0f} MiB"
