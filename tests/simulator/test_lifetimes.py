"""Which values share memory and how long each is needed, on programs and graphs written by hand."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._simulator.lifetimes import (
    has_living_alias,
    mark_lifetimes,
    memory_of,
    slots_in,
    unwritten_values,
    written_value,
)
from pt2qa._simulator.program import Slot, Step

ATEN = torch.ops.aten
SITE = "site"
STEPS: dict[str, tuple[list[Any], Any, list[tuple[bool, bool]], list[set[int]]]] = {
    # Input is slot 0, a constant slot 1; each row makes the next slot, from 2 on, of an op and what it reads.
    "a chain": (
        [(ATEN.relu.default, 0), (ATEN.relu.default, 2), (ATEN.relu.default, 3)],
        [Slot(4)],
        [(False, False), (True, True), (True, True)],
        [{0}, {2}, {3}],
    ),
    "read later": (
        [(ATEN.tanh.default, 0), (ATEN.relu.default, 2), (ATEN.add.Tensor, 2, 3)],
        [Slot(4)],
        [(False, False), (False, False), (False, False)],
        [{0}, set(), {2, 3}],
    ),
    "an output, and one that nothing reads": (
        [(ATEN.tanh.default, 0), (ATEN.relu.default, 2), (ATEN.relu.default, 3)],
        {"a": [Slot(2)], "b": (Slot(3), 7)},
        [(False, False), (False, False), (False, False)],
        [{0}, set(), {4}],
    ),
    "a view that is read later": (
        [(ATEN.tanh.default, 0), (ATEN.view.default, 2), (ATEN.relu.default, 2), (ATEN.add.Tensor, 3, 4)],
        [Slot(5)],
        [(False, False)] * 4,
        [{0}, set(), {2}, {3, 4}],
    ),
    "a view of the input": (
        [(ATEN.view.default, 0), (ATEN.relu.default, 2)],
        [Slot(3)],
        [(False, False)] * 2,
        [{0}, {2}],
    ),
    "a constant": (
        [(ATEN.relu.default, 1), (ATEN.relu.default, 2)],
        [Slot(3)],
        [(False, False), (True, True)],
        [{1}, {2}],
    ),
    "a site, and the value before it once more": (
        [(ATEN.tanh.default, 0), (SITE, 2), (ATEN.relu.default, 3), (ATEN.add.Tensor, 2, 4)],
        [Slot(5)],
        [(False, False), (False, False), (False, True), (False, False)],
        [{0}, set(), {3}, {2, 4}],
    ),
    "a site that reads a value last": (
        [(ATEN.tanh.default, 0), (SITE, 2), (ATEN.relu.default, 3)],
        [Slot(4)],
        [(False, False), (False, True), (True, True)],
        [{0}, {2}, {3}],
    ),
    "a site of the input": (
        [(SITE, 0), (ATEN.relu.default, 2)],
        [Slot(3)],
        [(False, False), (False, True)],
        [{0}, {2}],
    ),
    "two sites with one result": (
        [(ATEN.tanh.default, 0), (SITE, 2), (SITE, 2, "of", 3), (ATEN.relu.default, 3), (ATEN.add.Tensor, 4, 5)],
        [Slot(6)],
        [(False, False), (False, False), (False, True), (False, False), (False, False)],
        [{0}, set(), {2}, {3}, {4, 5}],
    ),
    "a value and a view of it": (
        [(ATEN.tanh.default, 0), (ATEN.view.default, 2), (ATEN.relu.default, 2, 3)],
        [Slot(4)],
        [(False, False)] * 3,
        [{0}, set(), {2, 3}],
    ),
}


def program(rows: list[Any]) -> list[Step]:
    steps = []
    for index, (function, *reads) in enumerate(rows):
        of = reads[2] if "of" in reads else None
        slots = list(reads[: 1 if function == SITE else None])
        site = sum(step.site is not None for step in steps) if function == SITE else None
        in_place = function if function in (ATEN.relu.default,) else None
        op = ATEN.neg.default if function == SITE else function
        read, held = tuple(slot for slot in slots if slot != 1), tuple(slot for slot in slots if slot == 1)
        args = tuple(map(Slot, slots))
        made = Step(index, index + 2, read, op, args, constants=held, site=site, in_place=in_place, duplicate_of=of)
        steps.append(made)
    return steps


@pytest.mark.parametrize("name", STEPS)
def test_a_value_is_released_and_overwritten_after_its_last_reader(name: str) -> None:
    rows, outputs, reuses, releases = STEPS[name]
    steps = program(rows)
    mark_lifetimes(steps, outputs, {0, 1})
    assert [(step.reuse, step.reuse_all_on) for step in steps] == reuses
    constants = {1} & set(slots_in([step.args for step in steps]))
    assert [set(step.releases) for step in steps] == [each - constants for each in releases]
    assert all(len(step.releases) == len(set(step.releases)) for step in steps)


def test_slots_are_found_wherever_they_stand() -> None:
    template = (Slot(3), [Slot(1), {"k": Slot(3), "n": 4}], slice(Slot(5), None, Slot(2)), "text", None)
    assert slots_in(template) == [3, 1, 3, 5, 2]
    assert slots_in(7) == []


def graph_of(build: Any) -> tuple[GraphModule, dict[str, Node]]:
    """A graph that a function builds, and its nodes by name; ``buf`` and ``twin`` have one memory."""
    graph = Graph()
    graph.output(build(graph, lambda name, target, *args: graph.create_node("call_function", target, args, name=name)))
    root = torch.nn.Module()
    memory = torch.ones(6)
    root.register_buffer("buf", memory[:4])
    root.register_buffer("twin", memory[2:])
    root.register_buffer("other", torch.ones(4))
    module = GraphModule(root, graph)
    return module, {node.name: node for node in module.graph.nodes}


def seen_before(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    call("total", ATEN.sum.default, call("view", ATEN.view.default, y, [-1]))
    return call("write", ATEN.add_.Tensor, y, 1)


def seen_after(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    view = call("view", ATEN.view.default, y, [-1])
    return call("both", ATEN.add.Tensor, call("write", ATEN.add_.Tensor, y, 1), view)


def written_through_a_view(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    call("write", ATEN.add_.Tensor, call("view", ATEN.view.default, y, [-1]), 1)
    return call("again", ATEN.relu.default, y)


def written_twice(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    return call("write", ATEN.mul_.Tensor, call("first", ATEN.add_.Tensor, y, 1), 2)


def written_twice_and_read_by_its_second_name(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    first = call("first", ATEN.add_.Tensor, y, 1)
    call("write", ATEN.mul_.Tensor, y, 2)
    return call("again", ATEN.relu.default, first)


def written_through_a_view_before(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    first = call("first", ATEN.add_.Tensor, call("view", ATEN.view.default, y, [-1]), 1)
    call("write", ATEN.mul_.Tensor, y, 2)
    return call("again", ATEN.relu.default, first)


def written_and_read_by_its_first_name(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    call("write", ATEN.add_.Tensor, y, 1)
    return call("again", ATEN.relu.default, y)


def view_of_the_written_one(graph: Graph, call: Any) -> Any:
    y = call("y", ATEN.tanh.default, graph.placeholder("x"))
    first = call("first", ATEN.add_.Tensor, y, 1)
    view = call("view", ATEN.view.default, first, [-1])
    return call("both", ATEN.add.Tensor, call("write", ATEN.mul_.Tensor, first, 2), view)


def twin_read_after(graph: Graph, call: Any) -> Any:
    buf, twin = graph.get_attr("buf"), graph.get_attr("twin")
    return call("both", ATEN.add.Tensor, call("write", ATEN.add_.Tensor, buf, 1), twin)


def other_read_after(graph: Graph, call: Any) -> Any:
    buf, other = graph.get_attr("buf"), graph.get_attr("other")
    return call("both", ATEN.add.Tensor, call("write", ATEN.add_.Tensor, buf, 1), other)


def view_as_second_argument(graph: Graph, call: Any) -> Any:
    y, z = (call(name, ATEN.tanh.default, graph.placeholder(f"x{name}")) for name in ("y", "z"))
    made = call("made", ATEN.view_as.default, z, y)
    return call("both", ATEN.add.Tensor, call("write", ATEN.add_.Tensor, y, 1), made)


@pytest.mark.parametrize(
    ("build", "lives"),
    [
        (seen_before, False),
        (seen_after, True),
        (written_through_a_view, True),
        (written_twice, False),
        (written_twice_and_read_by_its_second_name, False),
        (written_through_a_view_before, True),
        (written_and_read_by_its_first_name, False),
        (view_of_the_written_one, True),
        (twin_read_after, True),
        (other_read_after, False),
        (view_as_second_argument, False),
    ],
)
def test_whether_another_name_of_what_is_written_is_read_later(build: Any, lives: bool) -> None:
    module, nodes = graph_of(build)
    order = {node: number for number, node in enumerate(module.graph.nodes)}
    assert has_living_alias(nodes["write"], order) is lives


def test_values_live_in_what_made_them_or_in_the_memory_of_an_attribute() -> None:
    _, nodes = graph_of(written_through_a_view)
    assert written_value(nodes["view"]) is written_value(nodes["write"]) is nodes["y"]
    assert memory_of(nodes["write"]) is nodes["y"]
    assert written_value(nodes["again"]) is nodes["again"]
    _, attributes = graph_of(twin_read_after)
    _, others = graph_of(other_read_after)
    assert isinstance(memory_of(attributes["buf"]), int)
    assert memory_of(attributes["buf"]) == memory_of(attributes["twin"]) == memory_of(attributes["write"])
    assert memory_of(others["buf"]) != memory_of(others["other"])
    assert memory_of(attributes["both"]) is attributes["both"]


def test_memory_is_unwritten_until_an_op_writes_to_it() -> None:
    def build(graph: Graph, call: Any) -> Any:
        x = graph.placeholder("x")
        new = call("new", ATEN.empty_like.default, x)
        part = call("part", ATEN.select.int, new, 0, 0)
        call("rounded", QUANTIZED_DECOMPOSED.quantize_per_tensor.default, part, 0.1, 0, 0, 9, torch.int8)
        call("computed", ATEN.add.Tensor, new, 1)
        call("made", ATEN.view.default, x, [-1])
        written = call("written", ATEN.copy_.default, part, x)
        call("later", ATEN.view.default, new, [-1])
        call("same", operator.getitem, written, 0)
        return call("again", ATEN.new_empty.default, x, [2])

    module, nodes = graph_of(build)
    assert {node.name for node in unwritten_values(module.graph)} == {"new", "part", "rounded", "again"}
    assert nodes["later"] not in unwritten_values(module.graph)
