"""Float values of constants, found at the argument of an op with the same handle; graphs written by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED as OPS
from pt2qa._report.set_apart import InputRange
from pt2qa._simulator.accumulate import input_ranges, limits
from pt2qa._simulator.data import LEADING, Counted
from pt2qa._simulator.float_constants import FloatConstants, constant_of, run_on_constants
from pt2qa._simulator.graph_run import GraphRun, run_order
from pt2qa._simulator.products import Read, arguments_of, keyword_numbers, reads_of
from pt2qa._simulator.program import QuantParams, Slot, Step
from tests.simulator.test_lower import Two, lowered

ATEN = torch.ops.aten
LIKE = torch.ones(4)
X = torch.linspace(-1, 1, 16).reshape(4, 4)


class Written:
    """A graph that is written op by op, with handles by name."""

    def __init__(self) -> None:
        self.graph, self.root = Graph(), nn.Module()
        self.x = self.graph.placeholder("x")

    def attr(self, name: str, value: Any, *, parameter: bool = False) -> Node:
        if parameter:
            setattr(self.root, name, nn.Parameter(value))
        elif isinstance(value, Tensor):
            self.root.register_buffer(name, value)
        else:
            setattr(self.root, name, value)
        return self.graph.get_attr(name)

    def op(self, target: Any, *args: Any, handle: int | None = None, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        if handle is not None:
            node.meta["custom"] = {"numeric_debug_handle": handle}
        return node

    def module(self, *outputs: Any) -> GraphModule:
        self.graph.output(outputs)
        return GraphModule(self.root, self.graph)


def one_op(*args: Any, handle: int | None = 1, target: Any = ATEN.add.Tensor) -> tuple[GraphModule, Node]:
    made = Written()
    node = made.op(target, made.x, *args, handle=handle)
    return made.module(node), node


def test_a_constant_is_found_by_the_handle_and_the_argument_of_its_reader() -> None:
    made = Written()
    gain, shift = made.attr("gain", torch.full((4,), 2.0), parameter=True), made.attr("shift", torch.full((4,), 3.0))
    made.op(ATEN.add.Tensor, made.x, gain, handle=1)
    made.op(ATEN.addcmul.default, made.x, gain, shift, handle=2)
    made.op(ATEN.cat.default, [made.x, shift], handle=3)
    doubled = made.op(ATEN.mul.Tensor, gain, shift)
    made.op(ATEN.add.Tensor, made.x, other=doubled, handle=4)
    random = made.op(ATEN.rand_like.default, gain)
    made.op(ATEN.add.Tensor, made.x, random, handle=5)
    made.op(ATEN.add.Tensor, made.x, 0.25, handle=6)
    made.op(ATEN.add.Tensor, made.x, True, handle=7)
    made.op(ATEN.add.Tensor, made.x, made.x, handle=8)
    reference = made.module(made.x, shift)
    quantized = Written()
    readers = {handle: quantized.op(ATEN.relu.default, quantized.x, handle=handle) for handle in range(1, 9)}
    stranger = quantized.op(ATEN.relu.default, quantized.x, handle=99)
    graph = quantized.module(readers[1])
    floats = FloatConstants(reference, graph)

    def found(handle: int, *path: Any, like: Tensor = LIKE) -> Any:
        constant = floats.lookup(readers[handle], path, like)
        return None if constant is None else (constant.value.tolist(), constant.attribute, constant.is_parameter)

    assert found(1, 1) == ([2.0] * 4, "gain", True)
    assert found(1, 1, like=torch.ones(3)) is None, "another shape"
    assert found(1, 0) is None, "it depends on the batch"
    assert found(2, 1) == ([2.0] * 4, "gain", True)
    assert found(2, 2) == ([3.0] * 4, "shift", False)
    assert found(3, 0, 1) == ([3.0] * 4, "shift", False)
    assert found(3, 0, 2) is None
    assert found(3, 0, 1, 2) is None
    assert found(4, "other") == ([6.0] * 4, "gain", True)
    assert found(4, "missing") is None
    assert found(5, 1) is None, "it is another one each time"
    assert found(6, 1, like=torch.ones(1, 1)) == ([[0.25]], "", False)
    assert found(6, 1) is None, "a number stands for one element"
    assert found(7, 1, like=torch.ones(())) is None
    assert found(8, 1) is None
    assert floats.lookup(stranger, (1,), LIKE) is None
    assert floats.lookup(graph.graph.output_node(), (0, 1), LIKE) is not None
    first, again = (floats.lookup(readers[6], (1,), torch.ones(())) for _ in range(2))
    assert first is again
    assert first is not None
    assert floats.lookup(readers[6], (1,), torch.ones((), dtype=torch.float64)) is not first


def test_counterparts_must_agree() -> None:
    for second, agree in (("gain", True), ("shift", False)):
        made = Written()
        nodes = {name: made.attr(name, torch.full((4,), number)) for number, name in enumerate(("gain", "shift"), 2)}
        for name in ("gain", second):
            made.op(ATEN.add.Tensor, made.x, nodes[name], handle=1)
        quantized, reader = one_op(1)
        found = FloatConstants(made.module(made.x), quantized).lookup(reader, (1,), LIKE)
        assert (found is not None) == agree


def test_ops_without_a_handle_are_found_by_their_order_if_there_are_as_many() -> None:
    for count in (2, 3):
        made = Written()
        for number in range(2):
            made.op(ATEN.add.Tensor, made.x, made.attr(f"c{number}", torch.full((4,), float(number))))
        quantized = Written()
        readers = [quantized.op(ATEN.add.Tensor, quantized.x, 1) for _ in range(count)]
        quantized.op(OPS.quantize_per_tensor.default, quantized.x, 0.1, 0, 0, 9, torch.int8)
        floats = FloatConstants(made.module(made.x), quantized.module(quantized.x))
        values = [floats.lookup(reader, (1,), LIKE) for reader in readers]
        assert [None if each is None else each.value.tolist() for each in values] == (
            [[0.0] * 4, [1.0] * 4] if count == 2 else [None] * 3
        )


def test_a_nested_graph_is_that_of_the_only_counterpart() -> None:
    body = Graph()
    body.output(body.placeholder("x"))
    nested = GraphModule({}, body)
    for handles, known in (([1], True), ([1, 1], False), ([2], False)):
        made = Written()
        held = made.attr("body", nested)
        for handle in handles:
            made.op(ATEN.add.Tensor, made.x, held, handle=handle)
        made.op(ATEN.add.Tensor, made.x, made.attr("table", LIKE), handle=3)
        quantized = Written()
        reader, other = (quantized.op(ATEN.relu.default, quantized.x, handle=handle) for handle in (1, 3))
        floats = FloatConstants(made.module(made.x), quantized.module(quantized.x))
        assert (floats.nested(reader, (1,)) is not None) == known
        assert floats.nested(other, (1,)) is None
        assert floats.lookup(reader, (1,), LIKE) is None


def test_what_is_written_to_is_what_an_op_reads_at_that_time() -> None:
    made = Written()
    buf = made.attr("buf", torch.ones(4))
    made.op(ATEN.add.Tensor, made.x, buf, handle=1)
    part = made.op(ATEN.select.int, buf, 0, 0)
    made.op(ATEN.fill_.Scalar, buf, 5.0)
    made.op(ATEN.add.Tensor, made.x, buf, handle=2)
    made.op(ATEN.add.Tensor, made.x, part, handle=3)
    quantized = Written()
    readers = [quantized.op(ATEN.relu.default, quantized.x, handle=handle) for handle in (1, 2, 3)]
    reference = made.module(made.x)
    floats = FloatConstants(reference, quantized.module(quantized.x))
    found = [floats.lookup(reader, (1,), like) for reader, like in zip(readers, (LIKE, LIKE, LIKE[0]), strict=True)]
    assert [each and each.value.tolist() for each in found] == [[1.0] * 4, [5.0] * 4, 5.0]
    start = floats.lookup(readers[1], (1,), LIKE, at_start=True)
    assert start is not None
    assert start.value.tolist() == [1.0] * 4
    assert reference.get_buffer("buf").tolist() == [1.0] * 4, "the graph's own stays as it is"


def test_an_observer_passes_on_the_constant_that_it_reads() -> None:
    made = Written()
    made.root.observer = nn.Identity()
    seen = made.graph.call_module("observer", (made.attr("gain", LIKE * 2),))
    made.op(ATEN.add.Tensor, made.x, seen, handle=1)
    quantized, reader = one_op(1)
    found = FloatConstants(made.module(made.x), quantized).lookup(reader, (1,), LIKE)
    assert found is not None
    assert (found.value.tolist(), found.attribute) == ([2.0] * 4, "gain")


def test_constants_of_inference_mode_are_copied() -> None:
    made = Written()
    with torch.inference_mode():
        inside, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    node, other, plain = made.attr("a", inside), made.attr("b", 1), made.attr("c", torch.ones(2))
    made.root.d = parameter
    held = made.graph.get_attr("d")
    graph = made.module(node)
    assert not constant_of(graph, node).is_inference()
    assert type(constant_of(graph, held)) is nn.Parameter
    assert not constant_of(graph, held).requires_grad
    assert not constant_of(graph, held).is_inference()
    assert constant_of(graph, other) == 1
    assert constant_of(graph, plain) is graph.get_buffer("c")
    add = made.graph.call_function(ATEN.add.Tensor, (node, plain), {"alpha": 2})
    assert run_on_constants(add, lambda arg: torch.ones(1)).tolist() == [3.0]
    assert run_on_constants(add, lambda arg: torch.ones(1), torch.zeros(1)).tolist() == [2.0]


# -- runs of a graph ---------------------------------------------------------------------------------------------------


def test_a_constant_is_dequantized_right_before_its_first_reader() -> None:
    two = Two.new()
    first, second = two.weight(), two.weight()
    x = two.input()
    linear = two.op(ATEN.linear.default, two.rounded(x, 0.1), second)
    last = two.op(ATEN.linear.default, two.op(ATEN.relu.default, linear), first)
    again = two.op(ATEN.add.Tensor, last, first)
    quantized, _ = two.graphs(again)
    order = run_order(quantized.graph)
    assert sorted(map(str, order)) == sorted(map(str, quantized.graph.nodes))
    place = {node: number for number, node in enumerate(order)}
    assert place[linear[1]] - place[second[1]] == 1
    assert place[last[1]] - place[first[1]] == 1
    assert all(place[source] < place[node] for node in order for source in node.all_input_nodes)
    seen: dict[Node, Any] = {}
    run = GraphRun(quantized, lambda node, value: seen.setdefault(node, value) if node.op == "never" else None)
    values = list(run.steps(X))
    assert len(values) == len(order)
    assert run.env.keys() == {quantized.graph.output_node()}, "all others are released"
    assert torch.equal(values[-1][0], quantized(X)[0])
    changed = GraphRun(quantized, lambda node, value: value * 0 if node is last[1] else None)
    weight = quantized.graph.owning_module.get_buffer("integers")
    assert changed.run(X)[0].shape == weight.shape


# -- facts of a program ------------------------------------------------------------------------------------------------


def test_values_of_inputs_outside_of_their_ranges() -> None:
    two = Two.new()
    x = two.input()
    fine, coarse = two.rounded(x, 0.01), two.rounded(x, 0.01, 28)
    same = two.rounded(x, 0.01)
    total = two.op(ATEN.add.Tensor, two.op(ATEN.add.Tensor, fine, coarse), same)
    program, *_ = lowered(two, two.rounded(total, 0.5))
    value = torch.tensor([[-1.286, -1.284, 0.5, 1.274], [1.276, 0.994, 0.996, -1.5]])
    (one, other) = input_ranges(program, [value])
    assert one == InputRange("x", -1.28, 1.27, pytest.approx(-1.5), pytest.approx(1.276), 3, 8)
    assert other == InputRange("x", -1.56, 0.99, pytest.approx(-1.5), pytest.approx(1.276), 3, 8)
    assert limits(QuantParams("int8", 0.5, 3, -8, 7)) == (-5.5, 2.0)
    for unknown in (QuantParams("int8", torch.ones(2), torch.ones(2)), QuantParams("int8"), QuantParams("int8", 0.5)):
        assert all(each != each for each in limits(unknown))
    empty = input_ranges(program, [torch.ones(0, 4)])
    assert empty[0] == InputRange("x", -1.28, 1.27, float("inf"), float("-inf"), 0, 0)
    assert input_ranges(program, [3]) == ()
    keep = torch.tensor([[True, False, False, False], [False, False, False, True]])
    (counted, _) = input_ranges(program, [value], Counted(keep, {0: LEADING}, program))
    ends = pytest.approx(-1.5), pytest.approx(-1.286)
    assert counted == InputRange("x", -1.28, 1.27, *ends, 2, 2)


def test_what_each_op_reads_and_where() -> None:
    two = Two.new()
    linear = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), two.weight(), bias=two.attr("bias"))
    program, *_ = lowered(two, two.op(ATEN.mul.Tensor, two.op(ATEN.relu.default, linear), two.attr("table")))
    assert [(step.op, reads) for step, reads in reads_of(program)] == [
        ("linear", (Read(0, False, True), Read(1, True, True), Read(2, True, False))),
        ("relu", (Read(0, False, False),)),
        ("mul", (Read(0, False, False), Read(1, True, False))),
    ]
    numbers = keyword_numbers(ATEN.add.Tensor)
    assert numbers == {"self": 0, "other": 1, "alpha": 2}
    assert keyword_numbers(operator.add) == {}
    step = Step(0, 1, (), operator.add, args=([Slot(3), Slot(4)], Slot(5)), kwargs={"other": Slot(6)})
    assert list(arguments_of(step)) == [(0, 3), (0, 4), (1, 5), (2, 6)]
