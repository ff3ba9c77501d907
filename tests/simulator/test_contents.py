"""Whether graphs still compute with what a program was made from: checksums, digests, and what counts as equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from pt2qa._simulator.contents import Contents, checksum
from pt2qa._simulator.program import Slot
from pt2qa._simulator.simulator import Body, bind, tensors_equal
from pt2qa._simulator.stored import Integers, Stored, ValueCache
from pt2qa._simulator.strides import copied, copied_together, flat, is_plain, with_strides
from pt2qa._simulator.verification import add_state, bytes_of, digest_of, kind_of

BLOCK = 1 << 16
"""Words of 8 bytes that are summed at a time."""


def large(seed: int = 0, words: int = 2 * BLOCK + 5) -> Tensor:
    return torch.randn(2 * words, generator=torch.Generator().manual_seed(seed))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "the first value": lambda x: x[:1].add_(1),
    "the last value": lambda x: x[-1:].add_(1),
    "the last value of a block": lambda x: x[2 * BLOCK - 1].add_(1),
    "the lowest bit": lambda x: x.view(torch.int32)[7].bitwise_xor_(1),
    "two values exchanged": lambda x: x[[3, 4099]].clone().flip(0).copy_(x[[3, 4099]]),
    "two rows exchanged": lambda x: x[: 4 * 4096].copy_(x[: 4 * 4096].clone().roll(2 * 4096)),
    "two blocks exchanged": lambda x: x[: 4 * BLOCK].copy_(x[: 4 * BLOCK].clone().roll(2 * BLOCK)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_checksum_notices(what: str) -> None:
    x = large()
    before = checksum(x)
    assert before == checksum(large())
    if what == "two values exchanged":
        x[[3, 4099]] = x[[4099, 3]]
    else:
        CHANGES[what](x)
    assert checksum(x) != before


def test_a_checksum_is_of_the_elements_wherever_they_lie() -> None:
    x = large()
    apart = torch.empty(len(x) + 1)[1:].copy_(x)  # an address that is no multiple of eight
    assert checksum(apart) == checksum(x)
    matrix = x[: 2 * BLOCK].reshape(256, -1)
    assert checksum(matrix.t()) == checksum(matrix), "no copy for a transposed one"
    assert checksum(matrix.half()) != checksum(matrix)
    assert checksum(x[:9]) == checksum(x[:9].clone()) != checksum(x[1:10])
    assert checksum(torch.ones(3, device="meta")) == 0


class Nested(nn.Module):
    """A linear and a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.shift = nn.Linear(2, 2), torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x) + self.shift
        return result


def test_contents_are_equal_until_a_node_or_a_value_is_another() -> None:
    graph = symbolic_trace(Nested())

    def shape(graph: GraphModule) -> None:
        graph.fc.weight = nn.Parameter(graph.fc.weight.detach().reshape(4, 1)[:, 0].reshape(2, 2))  # type: ignore[union-attr]

    before = Contents.of([graph])
    shape(graph)
    assert Contents.of([graph]).equal(before), "other memory with the same values"
    assert before.equal(before)
    assert not Contents.of([graph, graph]).equal(before)
    assert not Contents.of([symbolic_trace(Nested())]).equal(before), "other nodes"
    graph.shift += 1
    assert not Contents.of([graph]).equal(before)
    graph.shift -= 1
    assert Contents.of([graph]).equal(before)
    graph.shift = graph.shift.double()
    assert not Contents.of([graph]).equal(before)
    graph.shift = graph.shift.float()
    output = graph.graph.output_node()
    args, output.args = output.args, (output.args[0].args[0],)  # type: ignore[union-attr]
    assert not Contents.of([graph]).equal(before)
    output.args = args


def test_parameters_that_are_one_are_told_from_two_that_are_equal() -> None:
    def tied(one: bool) -> GraphModule:
        module = nn.Module()
        module.a = nn.Parameter(torch.ones(2))
        module.b = module.a if one else nn.Parameter(torch.ones(2))
        graph = torch.fx.Graph()
        graph.output(graph.placeholder("x"))
        made = GraphModule({}, graph)
        made.held = module
        return made

    one, two = (Contents.of([tied(each)]).constants for each in (True, False))
    assert one == Contents.of([tied(True)]).constants != two
    assert len(one) == len(two) == 2


# -- digests ---------------------------------------------------------------------------------------------------------


def test_digests_tell_values_shapes_dtypes_and_order_apart() -> None:
    x = torch.arange(6.0)
    different: list[list[Any]] = [
        [x], [x + 1], [x.reshape(2, 3)], [x.double()], [x, x], [x, 1], [x, 2], [x, None], [1, x], []
    ]  # fmt: skip
    assert len({digest_of(each) for each in different}) == len(different)
    assert digest_of([x.reshape(2, 3).t().contiguous().t()]) == digest_of([x.reshape(2, 3)])
    assert digest_of([x.expand(1, 6)]) == digest_of([x[None].clone()])
    assert bytes_of(torch.tensor([[1, 2]], dtype=torch.int8).t()) == b"\x01\x02"
    kinds: list[list[Any]] = [[x], [x.double()], [x.reshape(2, 3)], [x.reshape(3, 2).t()], [1], [2], [x, x], []]
    assert len({kind_of(each) for each in kinds}) == len(kinds)
    assert kind_of([x]) == kind_of([x + 1]) == ((torch.float32, (6,), (1,)),)


def test_the_state_of_a_graph_is_its_names_shapes_dtypes_and_values() -> None:
    def state(change: Callable[[GraphModule], Any] = lambda graph: None) -> bytes:
        graph, found = symbolic_trace(Nested()), []
        change(graph)
        add_state(found.append, graph)
        return b"".join(found)

    def renamed(graph: GraphModule) -> None:
        graph.fc.other = graph.fc.bias  # type: ignore[union-attr]
        del graph.fc.bias  # type: ignore[union-attr]

    assert state() == state()
    assert b"fc.bias(2,)torch.float32" in state()
    assert len({state(), state(renamed), state(lambda graph: graph.fc.bias.data.add_(1))}) == 3  # type: ignore[union-attr]


# -- values ----------------------------------------------------------------------------------------------------------

NAN = math.nan


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1.0]), torch.tensor([1]), False),
        (torch.ones(2, 1), torch.ones(2), False),
        ([torch.ones(1), 3, None], (torch.ones(1), 3, None), True),
        ([torch.ones(1), 3], [torch.ones(1)], False),
        ([3], [3.0], False),
        ([3], [4], False),
        (torch.ones(()), 1.0, False),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, True),
    ],
)
def test_results_are_equal_in_every_bit_and_nan_is_nan(left: Any, right: Any, equal: bool) -> None:
    assert tensors_equal(left, right) is equal
    assert tensors_equal(right, left) is equal


def test_a_template_is_filled_wherever_a_slot_stands() -> None:
    env = {0: torch.ones(1), 1: 2, 2: Stored(lambda: 7, None)}
    template = (Slot(1), [Slot(0), {"k": Slot(2)}], slice(Slot(1), None, Slot(2)), "text")
    assert bind(template, env) == (2, [env[0], {"k": 7}], slice(2, None, 7), "text")
    assert type(bind([Slot(1)], env)) is list


def test_sites_of_a_nested_graph_are_switched_by_their_numbers_outside() -> None:
    body = Body(None, (4, 7, 9), True)  # type: ignore[arg-type]
    assert [body.switched(on).on for on in (True, False, [7], {4, 9, 5}, [])] == [
        True,
        False,
        frozenset({1}),
        frozenset({0, 2}),
        frozenset(),
    ]


# -- memory ----------------------------------------------------------------------------------------------------------


def test_copies_have_the_strides_and_share_memory_as_before() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    for x in (matrix, matrix.t(), matrix[:, ::2], matrix[:, :1].expand(2, 3), torch.ones(()), matrix[:, None]):
        own = copied(x)
        assert torch.equal(own, x)
        assert own.data_ptr() != x.data_ptr()
        assert own.stride() == (x.clone().stride() if 0 in x.stride() else x.stride())
    # One row that is repeated once is no overlap.
    assert copied(matrix[:1].expand(1, 3).as_strided((1, 3), (0, 1))).stride() == (0, 1)
    whole, part, other = copied_together([matrix, matrix[1:], torch.ones(2)])
    assert part.tolist() == [[3, 4, 5]]
    whole[1, 0] = 9
    assert (float(part[0, 0]), float(matrix[1, 0]), other.tolist()) == (9, 3, [1, 1])


def test_strides_are_changed_only_where_they_differ() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert with_strides(x, (3, 1)) is x
    turned = with_strides(x, (1, 2))
    assert (turned.stride(), torch.equal(turned, x)) == ((1, 2), True)


@pytest.mark.parametrize("shape", [(2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 1), (2, 3, 1, 5), (1, 3, 4, 5)])
def test_flat_views_of_plain_values_are_in_the_order_of_memory(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for layout in (x, x.to(memory_format=torch.channels_last)):
        assert is_plain(layout) == (layout.stride() == torch.relu(layout).stride())
        if is_plain(layout):
            assert flat(layout).data_ptr() == layout.data_ptr()
            assert torch.equal(flat(layout), layout.as_strided((x.numel(),), (1,)))
    assert not is_plain(torch.randn(shape).transpose(2, 3)[..., ::2])


def test_a_cache_lends_memory_for_what_it_does_not_keep() -> None:
    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int8)

    cache = ValueCache(40)
    assert cache.size == cache.left == 40
    assert cache.memory_like(integers(10)) is None, "it would be kept"
    assert cache.memory_like(integers(11)) is None, "it is too large"
    assert not cache.takes(torch.ones(11))
    assert cache.takes(torch.ones(6))
    assert (cache.size, cache.left) == (40, 16)
    assert cache.memory_like(integers(2, 2)) is None
    lent = cache.memory_like(integers(2, 4))
    assert lent is not None
    assert (lent.shape, lent.stride(), lent.dtype) == ((2, 4), (4, 1), torch.float32)
    where = lent.data_ptr()
    other = cache.memory_like(integers(5))
    assert other is not None
    assert other.data_ptr() != where, "somebody has the first"
    del lent
    place = other.data_ptr()
    del other
    smaller = cache.memory_like(integers(5))
    assert smaller is not None
    assert smaller.data_ptr() == place
    del smaller
    larger = cache.memory_like(integers(10))
    assert larger is not None
    assert larger.numel() == 10


def test_a_value_of_integers_by_rows() -> None:
    made = Integers.of(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int8), torch.tensor([1.0, 2, 3]), ZEROS, 0)
    assert made is not None
    out = torch.empty(2, 2)
    assert made.rows(1, 3, out) is out
    assert out.tolist() == [[(3 - 1) * 2, (4 - 1) * 2], [(5 - 2) * 3, (6 - 2) * 3]]
    into = torch.empty(3, 2)
    assert made.value(into) is into
    assert into.tolist()[1:] == out.tolist()
    stored = Stored(made, None)
    assert stored.by_rows is made
    assert torch.equal(stored.value(), into)
    assert stored.by_rows is made
    kept = Stored(made, ValueCache(100))
    assert kept.value() is kept.by_rows is kept.value()
    of = Integers.of
    bytes_ = torch.ones(3, 2, dtype=torch.int8)
    assert of(bytes_, torch.ones(1), torch.zeros(1), 0) is None, "one scale for all channels"
    assert of(bytes_, torch.ones(3), torch.zeros(1), 0) is None
    assert of(bytes_, 1.0, ZEROS, None) is None
    assert of(bytes_, 1.0, ZEROS, 0) is None
    assert of(bytes_, torch.ones(3), 0, 0) is None
    assert of(torch.ones((), dtype=torch.int8), 1.0, 0, None) is None
    plain = of(bytes_, 1.0, 0, None)
    assert plain is not None
    assert plain.zero_point is None


ZEROS = torch.tensor([0, 1, 2])
