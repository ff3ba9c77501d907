"""Handles and names on graphs written by hand: who gets which, who loses his, and which ops are the same."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec

from pt2qa._graph.annotation import annotated_ops, rounds, specs_of
from pt2qa._graph.handles import (
    OUTPUTS,
    PART,
    OpName,
    assign_handles,
    copy_nodes,
    copy_to_edit,
    copy_without_values,
    custom_of,
    handle_of,
    input_handles,
    is_decomposed,
    is_part_name,
    is_quantization,
    name_of,
    names_of,
    ops_of,
    output_handle,
    part_name,
    remove_handles,
    share_constants,
    source_line,
    stems_of,
    user_inputs,
    walk,
)
from pt2qa._graph.internals.nodes import ANNOTATION, CUSTOM, HANDLE, MODULE_STACK
from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED as OPS
from pt2qa._graph.matching import complete_handles, give_handles, has_handles, with_common_handles

ATEN = torch.ops.aten
INT8 = (-128, 127, torch.int8)


class Ops:
    """Two inputs, a split, ops of two modules, and one in a nested graph."""

    def __init__(self, *, rounded: bool = False) -> None:
        graph = self.graph = Graph()
        self.x, self.y = graph.placeholder("x"), graph.placeholder("y")
        self.weight = graph.get_attr("weight")
        first = self.in_module(ATEN.linear.default, "a", self.x, self.weight)
        second = self.in_module(ATEN.linear.default, "a", self.y, self.weight)
        self.linears = first, second
        if rounded:
            first = graph.call_function(OPS.quantize_per_tensor.default, (first, 0.1, 0, *INT8))
            first = graph.call_function(OPS.dequantize_per_tensor.default, (first, 0.1, 0, *INT8))
        self.split = graph.call_function(ATEN.split.Tensor, (first, 1, 1))
        self.part = graph.call_function(operator.getitem, (self.split, 1))
        self.relu = self.in_module(ATEN.relu.default, "b.c", self.part)
        body = Graph()
        body.output((body.call_function(ATEN.neg.default, (body.placeholder("z"),)),))
        self.body = GraphModule({}, body)
        self.read = graph.get_attr("body")
        held = (graph.get_attr("condition"), self.read, self.read, [second])
        self.cond = graph.call_function(torch.ops.higher_order.cond, held)
        self.inner = next(node for node in body.nodes if node.op == "call_function")
        self.chosen = graph.call_function(operator.getitem, (self.cond, 0))
        self.sum = graph.call_function(ATEN.add.Tensor, (self.relu, self.chosen))
        graph.output((self.sum,))
        parts = {"weight": torch.ones(2, 2), "body": self.body, "condition": torch.tensor(True)}
        self.module = GraphModule(parts, graph)

    def in_module(self, target: Any, path: str, *args: Node) -> Node:
        node = self.graph.call_function(target, args)
        node.meta[MODULE_STACK] = {path: (path, "own.Block")}
        return node

    def ops(self) -> list[Node]:
        return [*self.linears, self.split, self.part, self.relu, self.cond, self.inner, self.chosen, self.sum]


NAMES = ["x", "y", "a/linear", "a/linear_1", "split", "split[1]", "b.c/relu", "cond", "cond.true/neg", "cond[0]", "add"]


def test_handles_are_given_and_taken_in_the_order_of_the_graph() -> None:
    made = Ops()
    assert not has_handles(made.module)
    made.weight.meta[CUSTOM] = {HANDLE: 7, "own": 1}
    made.relu.meta[CUSTOM] = {HANDLE: 99, "own": 2}
    assert has_handles(made.module)
    assert handle_of(made.weight) == 7
    assign_handles(made.module)
    assert [handle_of(node) for node in (made.x, made.y, *made.ops())] == list(range(11))
    assert (custom_of(made.weight), custom_of(made.relu)) == ({"own": 1}, {"own": 2, HANDLE: 6})
    assert custom_of(made.split)[OUTPUTS] == {"of": "aten.split.Tensor", "1": 5}
    assert CUSTOM not in made.graph.output_node().meta
    names = names_of(made.module)
    assert [name.name for name in names.values()] == NAMES
    assert list(names) == list(range(11))
    assert names[6] == OpName("b.c/relu", "b.c", "Block", "relu")
    assert names[5] == OpName("split[1]", "", "", "getitem")
    assert (names[0].op, names[8].op) == ("input", "neg")
    assert [name_of(node, names) for node in (made.sum, made.weight, made.graph.output_node())] == ["add", None, None]
    assert name_of(made.sum, {}) is None
    assert ops_of(made.module, names) == dict(
        zip([n for n in NAMES[2:] if "true" not in n], [n for n in made.ops() if n is not made.inner], strict=True)
    )
    assert list(stems_of(made.module).values()) == [
        *("a/linear", "a/linear", "split", "split[1]", "b.c/relu", "cond", "cond.true/neg", "cond[0]", "add")
    ]
    remove_handles(made.module)
    assert not has_handles(made.module)
    assert (custom_of(made.weight), made.relu.meta[CUSTOM]) == ({"own": 1}, {"own": 2})
    assert CUSTOM not in made.x.meta
    assert CUSTOM not in made.inner.meta


def test_every_node_is_walked_once_with_its_owner() -> None:
    made = Ops()
    placed = list(walk(made.module))
    assert [each.node for each in placed if each.node.op == "call_function"] == made.ops()
    (inner,) = (each for each in placed if each.node is made.inner)
    assert (inner.owner, inner.body, inner.graph_module) == (made.cond, "true", made.body)
    assert all(each.owner is None and each.body == "" for each in placed if each.graph_module is made.module)
    assert len(placed) == len(made.graph.nodes) + len(made.body.graph.nodes)
    assert user_inputs(made.module) == [made.x, made.y]


def test_an_output_keeps_its_handle_while_its_op_is_the_same() -> None:
    made = Ops()
    assign_handles(made.module)
    made.part.meta[CUSTOM] = {HANDLE: 4}  # as a file gives it, that of the op
    assert (handle_of(made.part), output_handle(made.part)) == (5, 5)
    made.split.target = ATEN.split_copy.Tensor
    assert (handle_of(made.part), output_handle(made.part)) == (4, 5)
    other = made.graph.call_function(operator.getitem, (made.split, 0))
    assert (handle_of(other), output_handle(other), output_handle(made.relu)) == (None, None, None)
    made.relu.meta[CUSTOM] = {HANDLE: "text"}
    assert handle_of(made.relu) is None
    made.relu.meta[CUSTOM] = "text"
    assert custom_of(made.relu) == {}


def test_inputs_have_the_first_handles_unless_ops_have_them() -> None:
    made = Ops()
    assert input_handles(made.module) == {}
    assign_handles(made.module)
    for node in (made.x, made.y):
        del node.meta[CUSTOM]
    assert input_handles(made.module) == {made.x: 0, made.y: 1}
    made.sum.meta[CUSTOM] = {HANDLE: 1}
    assert input_handles(made.module) == {}
    made.y.meta[CUSTOM] = {HANDLE: 30}
    assert input_handles(made.module) == {made.y: 30}
    rounded = Ops(rounded=True)
    assign_handles(rounded.module)
    quantize = next(node for node in rounded.graph.nodes if is_quantization(node))
    quantize.meta[CUSTOM] = {HANDLE: 0}  # that of the input that it rounds
    assert input_handles(rounded.module) == {rounded.x: 0, rounded.y: 1}


def test_an_op_of_the_model_has_its_name_rather_than_what_rounds_it() -> None:
    made = Ops(rounded=True)
    first = made.linears[0]
    for node in made.graph.nodes:
        if node is first or is_quantization(node):
            node.meta[CUSTOM] = {HANDLE: 3}
    assert {handle: name.op for handle, name in names_of(made.module).items()} == {
        0: "input",  # by their place
        1: "input",
        3: "linear",
    }
    made.relu.meta[CUSTOM] = {HANDLE: 4, PART: {"of": "rnn/lstm", "step": 2}}
    assert names_of(made.module)[4] == OpName("b.c/relu", "b.c", "Block", "relu", "rnn/lstm", 2)
    assert part_name("pool", made.relu, 0) == "pool"
    assert [is_part_name(text, "pool") for text in ("pool", "pool:pad1", "pool1", "spool")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("target", "kind", "decomposed"),
    [
        (ATEN.convolution.default, "Block", True),
        (ATEN._native_batch_norm_legit_no_training.default, "Block", True),
        (ATEN.addmm.default, "Linear", True),
        (ATEN.mm.default, "Linear", True),
        (ATEN.mm.default, "Block", False),
        (ATEN.conv2d.default, "Linear", False),
    ],
)
def test_ops_that_only_a_decomposition_writes(target: Any, kind: str, decomposed: bool) -> None:
    node = Graph().call_function(target, ())
    node.meta[MODULE_STACK] = {"m": ("m", f"own.{kind}")}
    assert is_decomposed(node) is decomposed
    assert not is_decomposed(Graph().placeholder("convolution"))
    assert not is_quantization(Graph().placeholder("quantize_"))


TRACE = """  File "/home/me/train.py", line 3, in run
    model(x)
  File "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", line 9, in forward
    return F.linear(x)
  File "/home/me/net.py", line 12, in forward
    y = self.fc(x)
  File "/usr/lib/python3/site-packages/torch/_ops.py", line 1, in call
    return op()
  File "<eval_with_key>.3", line 2, in forward
    x = 1
"""


def test_the_innermost_line_of_the_users_files() -> None:
    node = Graph().placeholder("x")
    assert source_line(node) == ""
    node.meta["stack_trace"] = TRACE
    assert (source_line(node), source_line(node, code=True)) == ("net.py:12", "net.py:12: y = self.fc(x)")
    node.meta["stack_trace"] = TRACE.replace("/home/me", "/usr/lib/site-packages/mine")
    assert source_line(node) == "net.py:12"
    node.meta["stack_trace"] = TRACE.replace("/home/me/", "/usr/lib/site-packages/torchao/")
    assert source_line(node) == ""


# -- two graphs --------------------------------------------------------------------------------------------------------


def handles(made: Ops) -> list[int | None]:
    return [handle_of(node) for node in (made.x, made.y, *made.ops())]


def test_ops_without_notes_are_matched_by_name_and_inputs_are_left() -> None:
    known, other = Ops(), Ops(rounded=True)
    assign_handles(known.module)
    give_handles(known.module, other.module)
    assert handles(other) == [None, None, *range(2, 11)]
    assert custom_of(other.split)[OUTPUTS] == custom_of(known.split)[OUTPUTS]
    assert all(handle_of(node) is None for node in other.graph.nodes if is_quantization(node))


def test_ops_of_which_there_are_more_in_one_graph_are_matched_by_what_they_read() -> None:
    known, other = Ops(), Ops(rounded=True)
    assign_handles(known.module)
    for node, number in ((other.x, 0), (other.y, 1)):
        node.meta[CUSTOM] = {HANDLE: number}
    other.graph.inserting_before(other.graph.output_node())
    more = other.in_module(ATEN.linear.default, "a", other.sum)  # now there are three
    other.graph.output_node().args = ((more,),)
    give_handles(known.module, other.module)
    assert handles(other) == list(range(11))
    assert handle_of(more) is None


def test_common_handles_are_those_of_the_first_graph() -> None:
    known, other = Ops(), Ops(rounded=True)
    first, second = with_common_handles(known.module, other.module)
    assert first is not known.module
    assert second is not other.module
    assert not has_handles(known.module)
    named = [names_of(each).values() for each in (first, second)]
    assert [name.name for name in named[0]] == NAMES
    assert [name.name for name in named[1]] == NAMES
    assert first.get_buffer("weight") is known.module.get_buffer("weight")
    # Handles of both are kept, but for what one of them lacks.
    assert with_common_handles(first, second) == (first, second)
    lacking = copy_nodes(second)
    (sum_,) = (node for node in lacking.graph.nodes if node.target is ATEN.add.Tensor)
    del sum_.meta[CUSTOM]
    again = with_common_handles(first, lacking)
    assert again[0] is first
    assert [name.name for name in names_of(again[1]).values()] == NAMES
    assert handle_of(sum_) is None, "the graph that was passed stays as it was"
    # Those of the second alone are worth nothing.
    third, fourth = with_common_handles(known.module, second)
    assert [name.name for name in names_of(fourth).values()] == NAMES
    assert third is not known.module


def dropouts(*, handled: bool, swapped: bool = False) -> tuple[GraphModule, dict[str, Node]]:
    """Two ops of one kind that read one value, told apart by who reads them, and one of another kind."""
    graph = Graph()
    x = graph.placeholder("x")
    found = {"a": graph.call_function(ATEN.dropout.default, (x, 0.5, False))}
    found["b"] = graph.call_function(ATEN.dropout.default, (x, 0.5, False))
    found["alone"] = graph.call_function(ATEN.dropout.default, (graph.get_attr("table"), 0.5, False))
    left, right = (found["b"], found["a"]) if swapped else (found["a"], found["b"])
    found["exp"] = graph.call_function(ATEN.exp.default, (left,))
    found["sin"] = graph.call_function(ATEN.sin.default, (right,))
    last = graph.call_function(ATEN.add.Tensor, (found["exp"], found["sin"]))
    graph.output((last, found["alone"]))
    module = GraphModule({"table": torch.ones(2)}, graph)
    assign_handles(module)
    if not handled:
        for name in ("a", "b", "alone"):
            found[name].meta.pop(CUSTOM)
    return module, found


def test_ops_that_were_put_in_place_of_others_are_told_apart_by_their_readers() -> None:
    known, _ = dropouts(handled=True)
    for swapped, expected in ((False, [1, 2]), (True, [2, 1])):
        other, nodes = dropouts(handled=False, swapped=swapped)
        if swapped:  # ops keep the handles of the known graph
            nodes["exp"].meta[CUSTOM], nodes["sin"].meta[CUSTOM] = {HANDLE: 4}, {HANDLE: 5}
        assert complete_handles(known, other) == 2
        assert [handle_of(nodes[name]) for name in ("a", "b", "alone")] == [*expected, None]
    assert complete_handles(known, known) == 0


# -- copies and annotations --------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A parameter and a buffer that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


def test_copies_share_what_they_say() -> None:
    program = torch.export.export(Held(), (torch.ones(3),))
    for given in (program.module(), program):
        edited = copy_to_edit(given)  # type: ignore[type-var]
        held, own = (each.state_dict for each in (given, edited))
        held, own = (each() if callable(each) else each for each in (held, own))
        assert held["gain"].data_ptr() == own["gain"].data_ptr()
        assert held["shift"].data_ptr() != own["shift"].data_ptr()
        assert torch.equal(held["shift"], own["shift"])
    graph = program.module()
    copied = copy_nodes(graph)  # type: ignore[arg-type]
    assert copied.get_buffer("shift") is graph.get_buffer("shift")
    assert copied.graph is not graph.graph
    bare = copy_without_values(graph)  # type: ignore[arg-type]
    assert all(value.is_meta for value in bare.state_dict().values())
    assert type(bare.get_parameter("gain")) is nn.Parameter
    assert bare.get_parameter("gain").requires_grad == graph.get_parameter("gain").requires_grad
    assert not graph.get_parameter("gain").is_meta
    nested = Ops()
    twice = copy_nodes(nested.module)
    assert twice.body is not nested.body
    assert twice.body.graph is not nested.body.graph  # type: ignore[union-attr]


def test_equal_constants_are_shared_and_others_are_not() -> None:
    def graph(**constants: Tensor) -> GraphModule:
        made, root = Graph(), nn.Module()
        root.part = nn.Module()
        for name, value in constants.items():
            holder = root.part if name.startswith("part_") else root
            if name.endswith("parameter"):
                setattr(holder, name, nn.Parameter(value))
            else:
                holder.register_buffer(name, value)
        made.output(tuple(made.get_attr(f"part.{name}" if name.startswith("part_") else name) for name in constants))
        return GraphModule(root, made)

    x = torch.arange(100.0)
    like = graph(a=x, b=x + 1, parameter=x.clone())
    late = x.clone()
    late[99] = 7
    other = graph(
        same=x.clone(), part_same=x + 1, late=late, typed=x.double(), shaped=x.reshape(10, 10), parameter=x.clone()
    )
    share_constants(other, like)
    assert other.get_buffer("same") is like.get_buffer("a")
    assert other.get_buffer("part.part_same") is like.get_buffer("b")
    assert torch.equal(other.get_buffer("late"), late)
    assert other.get_buffer("typed").dtype == torch.float64
    assert other.get_buffer("shaped").shape == (10, 10)
    assert other.get_parameter("parameter") is not like.get_parameter("parameter")


def spec(dtype: torch.dtype) -> QuantizationSpec:
    return QuantizationSpec(dtype, None, qscheme=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "constant", "rounded"),
    [
        (torch.int8, False, True),
        (torch.float32, True, False),
        (torch.float16, True, True),
        (torch.float16, False, False),
        (torch.bfloat16, True, False),
        (torch.float8_e5m2, False, True),
    ],
)
def test_which_specs_round(dtype: torch.dtype, constant: bool, rounded: bool) -> None:
    assert rounds(spec(dtype), constant=constant) is rounded
    assert rounds(object(), constant=constant)


def test_specs_of_an_annotation_and_the_ops_that_have_one() -> None:
    made = Ops()
    eight, half, full = spec(torch.int8), spec(torch.float16), spec(torch.float32)
    first, second = made.linears
    assert specs_of(first) == []
    first.meta[ANNOTATION] = QuantizationAnnotation({made.x: eight, made.weight: None}, half)
    assert specs_of(first) == [(made.x, eight), (None, half)]
    second.meta[ANNOTATION] = QuantizationAnnotation({made.weight: half})
    made.relu.meta[ANNOTATION] = QuantizationAnnotation({made.part: half}, full)
    made.sum.meta[ANNOTATION] = QuantizationAnnotation(None, eight)
    made.x.meta[ANNOTATION] = QuantizationAnnotation(None, eight)
    assert annotated_ops(made.graph.nodes) == Counter(linear=2, add=1)


def test_parts_of_an_op_have_the_handle_of_the_op_that_they_go_back_to() -> None:
    class Source:
        """As torch notes where a node comes from."""

        def __init__(self, name: str, earlier: Source | None = None) -> None:
            self.graph_id, self.name = 1, name
            self.from_node = [] if earlier is None else [earlier]

    known, other = Ops(), Ops()
    assign_handles(known.module)
    relu = other.relu
    with other.graph.inserting_before(relu):
        part = other.in_module(ATEN.exp.default, "elsewhere", other.part)
    relu.args = (part,)
    for node, name in ((known.relu, "r"), (relu, "r"), (part, "r"), (known.sum, "s"), (other.sum, "s")):
        node.meta["from_node"] = [Source("copy", Source(name))]
    # Of two ops that go back to one, as many of a kind are the same.
    for made in (known, other):
        for node in made.linears:
            node.meta["from_node"] = [Source("linear")]
    give_handles(known.module, other.module)
    assert (handle_of(part), handle_of(relu)) == (6, 6)
    assert handles(other)[2:4] == handles(known)[2:4]
    assert handle_of(other.sum) == handle_of(known.sum)
    # Ops of nested graphs have no note: their names decide; so do those of all others without one.
    assert handle_of(other.inner) == handle_of(known.inner)
    assert names_of(other.module)[6].op == "relu"


def test_outputs_and_nested_ops_have_the_module_of_their_op_unless_they_know_their_own() -> None:
    made = Ops()
    for node, path in ((made.split, "s"), (made.cond, "m")):
        node.meta[MODULE_STACK] = {path: (path, "own.Block")}
    assign_handles(made.module)
    names = names_of(made.module)
    found = [names[handle_of(node) or 0] for node in (made.split, made.part, made.cond, made.inner, made.chosen)]
    assert [(name.name, name.module, name.module_type) for name in found] == [
        ("s/split", "s", "Block"),
        ("s/split[1]", "s", "Block"),
        ("m/cond", "m", "Block"),
        ("m/cond.true/neg", "m", "Block"),
        ("m/cond[0]", "m", "Block"),
    ]
    made.inner.meta[MODULE_STACK] = {"n": ("n", "own.Other")}
    (inner,) = (name for name in names_of(made.module).values() if name.op == "neg")
    assert (inner.name, inner.module, inner.module_type) == ("m/cond.true/neg", "n", "Other")
