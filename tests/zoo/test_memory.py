"""Memory of a comparison: two live sets of values, however many layers and batches there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pt2qa
from tests.zoo.pairs import captured, pair_of

pytestmark = pytest.mark.zoo


def peak_bytes(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> int:
    """The most bytes of tensors that were alive at one time beyond those before, from torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        pt2qa.compare_layers(pair, batches, progress=False)
    changes = [event for event in profiled.events() if event.name == "[memory]"]
    alive = peak = 0
    for event in sorted(changes, key=lambda event: event.time_range.start):
        alive += event.cpu_memory_usage
        peak = max(peak, alive)
    return peak


def test_memory_does_not_grow_with_batches() -> None:
    pair, (first, second) = pair_of("mobilenet_v2", "xnnpack"), captured("mobilenet_v2").batches
    batches = [first, second, first.flip(3), second.flip(3)]
    pair.verify(first)  # the analysis would verify its first batch, which costs runs of the whole graphs
    one, four = peak_bytes(pair, batches[:1]), peak_bytes(pair, batches)
    assert four <= 1.02 * one, f"{one / 2**20:.1f} MiB for one batch, {four / 2**20:.1f} MiB for four"


def test_memory_is_a_few_values_and_not_all_layers() -> None:
    pair, batch = pair_of("mobilenet_v2", "xnnpack"), captured("mobilenet_v2").batches[0]
    pair.verify(batch)
    sizes: list[int] = []

    class Sizes(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> object:
            value = super().run_node(node)
            if node.op == "call_function" and isinstance(value, Tensor):
                sizes.append(value.nbytes)
            return value

    with torch.no_grad():
        Sizes(pair.reference).run(batch, enable_io_processing=False)
    peak = peak_bytes(pair, [batch])
    # A logger keeps every value of both graphs.
    assert peak < 2 * sum(sizes) / 8, f"{peak / 2**20:.0f} MiB of {2 * sum(sizes) / 2**20:.0f} MiB"
    assert peak < 12 * max(sizes), f"{peak / 2**20:.0f} MiB, the largest value has {max(sizes) / 2**20:.0f} MiB"
