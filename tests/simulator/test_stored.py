"""Rounded weights are kept as integers; what is made of them has the bits of the converted graph."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

import pt2qa
from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._metrics import CHUNK
from pt2qa._simulator.graph_run import GraphRun, run_order
from pt2qa._simulator.stored import Integers, Stored, ValueCache, shares_memory

WIDTH = 64


class Weights(nn.Module):
    """Linears, one of which reads a transposed weight, and an op in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self.first(x).relu(), self.second.weight.t())
        return self.third(y)  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def quantized(seed: int) -> pt2qa.QuantizedPair:
    torch.manual_seed(seed)
    capture = pt2qa.capture(Weights().eval(), batch())
    return pt2qa.quantize(capture, "xnnpack:per_channel=true", [batch()], progress=False)


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return quantized(0)


@pytest.fixture(scope="module")
def uncached(pair: pt2qa.QuantizedPair) -> pt2qa.QuantizedPair:
    return dataclasses.replace(pair, weight_cache=0)


SHAPES = [(7,), (7, 5), (3, 2, 3, 3), (5, CHUNK // 4), (1, 4), (4, 1), (0, 4), (4, 1, 3, 3), (4, 3, 1, 1), (1, 1, 2, 1)]
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}


@pytest.mark.parametrize("dtype", RANGES, ids=str)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_values_have_the_bits_of_the_ops(dtype: torch.dtype, zero: int, shape: tuple[int, ...]) -> None:
    low, high = RANGES[dtype]
    generator = torch.Generator().manual_seed(2)
    integers = torch.randint(low, high + 1, shape, generator=generator, dtype=dtype)
    limits = (low, high, dtype)
    expected = QUANTIZED_DECOMPOSED.dequantize_per_tensor(integers, 0.037, zero, *limits)
    made_and_expected = [(Integers.of(integers, 0.037, zero, None), expected)]
    scale = torch.rand(shape[0], generator=generator)
    for zeros in (torch.full(shape[:1], zero), torch.arange(shape[0]) % 2 * zero):  # the same for all channels, or not
        by_channel = QUANTIZED_DECOMPOSED.dequantize_per_channel(integers, scale, zeros, 0, *limits)
        made_and_expected.append((Integers.of(integers, scale, zeros, 0), by_channel))
    for made, op in made_and_expected:
        assert made is not None
        own = made.value()
        assert torch.equal(own.view(torch.int32), op.view(torch.int32))
        assert own.stride() == op.stride()


@pytest.mark.parametrize(
    ("integers", "scale", "axis"),
    [
        pytest.param(torch.ones(2, 2, dtype=torch.int32), 0.1, None, id="int32"),
        pytest.param(torch.ones(2, 2, dtype=torch.int8).t(), 0.1, None, id="strided"),
        pytest.param(torch.ones(2, 2, dtype=torch.int8), torch.ones(2), 1, id="another axis"),
        pytest.param(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, dtype=torch.float64), 0, id="float64 scales"),
    ],
)
def test_whatever_else_is_left_to_the_ops(integers: Tensor, scale: Any, axis: int | None) -> None:
    zero = 0 if axis is None else torch.zeros(2, dtype=torch.int64)
    assert Integers.of(integers, scale, zero, axis) is None


def test_the_first_values_that_fit_are_kept() -> None:
    cache = ValueCache(40)
    small, large, last = (Stored(lambda size=size: torch.ones(size), cache) for size in (4, 8, 6))
    for stored in (small, large, last):
        stored.value()
    assert small.value() is small.value()
    assert large.value() is not large.value()
    assert last.value() is last.value()
    assert cache.left == 0


def test_memory_of_a_value_that_nothing_reads_is_used_again() -> None:
    """Neither a view nor a graph that is to be differentiated loses its value."""
    cache = ValueCache(40)
    made = [Integers.of(torch.full((2, 3), number, dtype=torch.int8), 0.5, 0, None) for number in range(6)]
    kept, *others = [Stored(each, cache) for each in made if each is not None]
    kept.value()
    where = others[0].value().data_ptr()
    second = others[1].value()
    assert second.data_ptr() == where
    view = second.t()
    del second
    third = others[2].value()
    assert third.data_ptr() != where
    result = (third * torch.ones(3, requires_grad=True)).sum()
    where = third.data_ptr()
    del third
    assert others[3].value().data_ptr() != where
    del result
    assert [float(view[0, 0]), float(kept.value()[0, 0]), float(others[4].value()[0, 0])] == [1.0, 0.0, 2.5]


def test_a_pair_without_a_cache_keeps_no_float_value_of_rounded_weights() -> None:
    """There is no such tensor."""
    uncached = dataclasses.replace(quantized(1), weight_cache=0)
    uncached.verify(batch())
    pt2qa.compare_layers(uncached, [batch()], progress=False)
    pt2qa.sensitivity(uncached, [batch()], progress=False)
    rounded = [each.quantized for each in uncached.program.constants if each.site is not None]
    assert len(rounded) == 3
    own = {value.untyped_storage().data_ptr() for value in rounded}
    gc.collect()
    found = [
        each
        for each in _tensors()
        if each.untyped_storage().data_ptr() not in own
        and any(_same(each, value) or _same(each, value.t()) for value in rounded)
    ]
    assert not found


def test_a_weight_is_the_models_own_in_the_reference(pair: pt2qa.QuantizedPair) -> None:
    assert pair.capture is not None
    own = {value.untyped_storage().data_ptr() for value in pair.capture.program.state_dict.values()}
    weights = [each.reference for each in pair.program.constants if each.site is not None]
    assert {value.untyped_storage().data_ptr() for value in weights} <= own


def test_reports_are_the_same_without_a_cache(pair: pt2qa.QuantizedPair, uncached: pt2qa.QuantizedPair) -> None:
    for analysis in (pt2qa.compare_layers, pt2qa.sensitivity):
        kept, made = (analysis(each, [batch()], progress=False) for each in (pair, uncached))
        assert repr(kept.rows) == repr(made.rows)
    assert repr(pt2qa.compare_weights(pair).rows) == repr(pt2qa.compare_weights(uncached).rows)


def test_a_graph_run_dequantizes_a_weight_when_its_op_runs(pair: pt2qa.QuantizedPair) -> None:
    """torch's own interpreter has all weights in float at once."""

    def most(base: type[Interpreter]) -> int:
        class Counting(base):  # type: ignore[misc, valid-type]
            most = 0

            def run_node(self, node: Node) -> Any:
                weights = [each for each in self.env.values() if isinstance(each, Tensor) and each.shape[0] == WIDTH]
                self.most = max(self.most, sum(each.dtype == torch.float32 and each.dim() == 2 for each in weights))
                return super().run_node(node)

        run = Counting(pair.quantized)
        run.run(batch())
        return int(run.most)

    assert most(GraphRun) == 1 < most(Interpreter)


def test_a_constant_that_the_graph_writes_to_is_dequantized_in_its_place() -> None:
    """Later, it would be another value."""
    graph = torch.fx.Graph()
    x, state = graph.placeholder("x"), graph.get_attr("state")
    value = graph.call_function(QUANTIZED_DECOMPOSED.dequantize_per_tensor.default, (state, 0.5, 0, 0, 9, torch.int8))
    graph.call_function(torch.ops.aten.add_.Tensor, (state, 1))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, value)))
    names = [node.name for node in run_order(graph)]
    assert names == [node.name for node in graph.nodes]


def _tensors() -> Iterator[Tensor]:
    tensors = (each for each in gc.get_objects() if type(each) is Tensor and each.layout == torch.strided)
    yield from (each for each in tensors if each.dtype == torch.float32)


def _same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and bool(torch.equal(value, other))


def test_a_part_shares_memory_and_a_copy_does_not() -> None:
    value = torch.ones(4)
    assert shares_memory(value[1:], value)
    assert not shares_memory(value.clone(), value)
    assert shares_memory(value.split(2), value), "as some of them would be views"
