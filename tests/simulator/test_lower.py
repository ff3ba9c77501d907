"""A converted graph written by hand, and every field of the program that it becomes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torchao.quantization import pt2e

import pt2qa
from pt2qa._graph.handles import assign_handles, names_of
from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED as OPS
from pt2qa._simulator.lower import lower
from pt2qa._simulator.program import Program, QuantParams, Region, Site, Slot
from pt2qa._simulator.simulator import Simulator, tensors_equal
from pt2qa._simulator.stored import Stored

ATEN = torch.ops.aten
INT8 = (-128, 127, torch.int8)
X = torch.linspace(-1, 1, 16).reshape(4, 4)
WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4).flip(1)
SCALES, ZEROS = torch.tensor([0.01, 0.02, 0.01, 0.02]), torch.zeros(4, dtype=torch.int64)


@dataclass
class Two:
    """The same ops in a float graph and in a converted one, written side by side."""

    float: Graph
    quantized: Graph
    root: nn.Module

    @classmethod
    def new(cls) -> Two:
        root = nn.Module()
        root.weight, root.bias = (nn.Parameter(each, requires_grad=False) for each in (WEIGHT, torch.ones(4)))
        root.register_buffer("table", torch.full((4,), 0.5))
        root.register_buffer("integers", OPS.quantize_per_channel(WEIGHT, SCALES, ZEROS, 0, *INT8))
        root.register_buffer("scales", SCALES)
        root.register_buffer("zeros", ZEROS)
        return cls(Graph(), Graph(), root)

    def input(self) -> tuple[Node, Node]:
        return self.float.placeholder("x"), self.quantized.placeholder("x")

    def attr(self, name: str) -> tuple[Node, Node]:
        return self.float.get_attr(name), self.quantized.get_attr(name)

    def weight(self) -> tuple[Node, Node]:
        integers, scales, zeros = (self.quantized.get_attr(each) for each in ("integers", "scales", "zeros"))
        params = (integers, scales, zeros, 0, *INT8)
        return self.float.get_attr("weight"), self.quantized.call_function(OPS.dequantize_per_channel.default, params)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> tuple[Node, Node]:
        def side(number: int, value: Any) -> Any:
            return value[number] if isinstance(value, tuple) else value

        made = [
            graph.call_function(
                target, tuple(side(n, each) for each in args), {k: side(n, each) for k, each in kwargs.items()}
            )
            for n, graph in enumerate((self.float, self.quantized))
        ]
        return made[0], made[1]

    def quantize(self, value: tuple[Node, Node], scale: float, zero: int) -> tuple[Node, Node]:
        """The float value, and the integers of the converted one."""
        args = (value[1], scale, zero, *INT8)
        return value[0], self.quantized.call_function(OPS.quantize_per_tensor.default, args)

    def dequantize(self, value: tuple[Node, Node], scale: float, zero: int) -> tuple[Node, Node]:
        args = (value[1], scale, zero, *INT8)
        return value[0], self.quantized.call_function(OPS.dequantize_per_tensor.default, args)

    def rounded(self, value: tuple[Node, Node], scale: float, zero: int = 0) -> tuple[Node, Node]:
        return self.dequantize(self.quantize(value, scale, zero), scale, zero)

    def graphs(self, *outputs: tuple[Node, Node]) -> tuple[GraphModule, GraphModule]:
        for n, graph in enumerate((self.float, self.quantized)):
            graph.output(tuple(each[n] for each in outputs))
        float_module, module = (GraphModule(self.root, graph) for graph in (self.float, self.quantized))
        assign_handles(float_module)
        plain = (node for node in self.quantized.nodes if node.op in ("call_function", "placeholder"))
        ops = [node for node in plain if "quantized_decomposed" not in str(node.target)]
        handled = [node for node in self.float.nodes if node.op in ("call_function", "placeholder")]
        for node, other in zip(handled, ops, strict=True):
            other.meta["custom"] = dict(node.meta["custom"])
        return module, float_module


def lowered(two: Two, *outputs: tuple[Node, Node]) -> tuple[Program, GraphModule, GraphModule]:
    quantized, reference = two.graphs(*outputs)
    return lower(quantized, reference, names_of(reference)), quantized, reference


def check_runs(program: Program, quantized: GraphModule, reference: GraphModule) -> None:
    simulator = Simulator(program)
    with torch.no_grad():
        assert tensors_equal(simulator.run([X.clone()], on=True), quantized(X.clone()))
        assert tensors_equal(simulator.run([X.clone()], on=False), reference(X.clone()))


def everything() -> tuple[Program, GraphModule, GraphModule]:
    two = Two.new()
    x = two.input()
    linear = two.op(ATEN.linear.default, two.rounded(x, 0.1), two.weight(), two.attr("bias"))
    relu = two.op(ATEN.relu_.default, linear)
    integers = two.quantize(relu, 0.2, 3)
    first, again = (two.dequantize(integers, 0.2, 3) for _ in range(2))
    same, other = two.rounded(relu, 0.2, 3), two.rounded(relu, 0.05)
    add = two.op(ATEN.add.Tensor, first, same)
    mul = two.op(ATEN.mul.Tensor, other, two.attr("table"))
    view = two.op(ATEN.view.default, mul, [-1])
    two.op(ATEN.add_.Tensor, mul, 1)
    part = two.op(operator.getitem, two.op(ATEN.split.Tensor, add, 2, 1), 0)
    return lowered(two, part, view, again)


def test_every_step_of_a_graph() -> None:
    program, quantized, reference = everything()
    found = [
        (s.name, s.op, s.node, s.out, s.reads, s.constants, s.site, s.duplicate_of, s.region, s.handle)
        for s in program.steps
    ]
    nodes = [node.name for node in quantized.graph.nodes if "dequantize_per_tensor" in node.name]
    calls = quantized.graph.nodes
    ops = [n.name for n in calls if n.op == "call_function" and "quantized_decomposed" not in str(n.target)]
    assert found == [
        ("x", "quantize", nodes[0], 1, (0,), (), 0, None, -1, -1),
        ("linear", "linear", ops[0], 4, (1,), (2, 3), None, None, 0, 1),
        ("relu", "relu", ops[1], 5, (4,), (), None, None, 0, 2),
        ("relu", "quantize", nodes[1], 6, (5,), (), 2, None, -1, -1),
        ("relu", "quantize", nodes[3], 7, (5,), (), 3, 6, -1, -1),
        ("relu", "quantize", nodes[4], 8, (5,), (), 4, None, -1, -1),
        ("add", "add", ops[2], 9, (6, 7), (), None, None, 1, 3),
        ("mul", "mul", ops[3], 11, (8,), (10,), None, None, 2, 4),
        ("view", "view", ops[4], 12, (11,), (), None, None, 3, 5),
        ("add_1", "add", ops[5], 13, (11,), (), None, None, 4, 6),
        ("split", "split", ops[6], 14, (9,), (), None, None, 5, 7),
        ("split[0]", "getitem", ops[7], 15, (14,), (), None, None, 5, 8),
    ]
    assert [step.index for step in program.steps] == list(range(12))
    assert {step.name for step in program.steps if step.mutates} == {"add_1"}
    assert {step.name: step.in_place for step in program.steps if step.in_place} == {"relu": ATEN.relu_.default}
    assert {step.name for step in program.steps if step.keeps_strides} == {"relu"}
    functions = {step.node: step.function for step in program.steps if step.site is None}
    assert functions[ops[1]] is ATEN.relu.default
    assert functions[ops[5]] is ATEN.add_.Tensor
    assert [step.args[1:] for step in program.steps if step.name in ("view", "add_1")] == [([-1],), (1,)]
    assert (program.slots, program.inputs, program.input_names, program.input_handles) == (16, (0,), ("x",), (0,))
    assert program.producers == {step.out: step.index for step in program.steps}
    assert program.outputs == (Slot(15), Slot(12), Slot(6))
    assert (program.notes, program.may_share, program.weight_cache) == ((), False, 1 << 27)
    assert [program.name_of(slot) for slot in (0, 1, 6, 15, 2)] == ["x", "x", "relu", "split[0]", "a constant"]
    assert [program.unrounded(slot) for slot in (0, 1, 5, 8, 9)] == [0, 0, 5, 5, 9]
    check_runs(program, quantized, reference)


def test_every_site_constant_and_region_of_a_graph() -> None:
    program, _, _ = everything()

    def site(index: int, name: str, op: str, handle: int, reader: str, scale: float, zero: int, *slots: int) -> Site:
        params = QuantParams("int8", scale, zero, -128, 127)
        return Site(index, "activation", name, op, handle, (reader,), params, *slots, exact=True)

    assert [each for each in program.sites if each.kind == "activation"] == [
        site(0, "x", "input", 0, "linear", 0.1, 0, 0, 1),
        site(2, "relu", "relu", 2, "add", 0.2, 3, 5, 6),
        site(3, "relu", "relu", 2, "add", 0.2, 3, 5, 7),
        site(4, "relu", "relu", 2, "mul", 0.05, 0, 5, 8),
    ]
    weight = program.sites[1]
    assert (weight.index, weight.kind, weight.name, weight.op, weight.handle) == (1, "weight", "linear", "linear", 1)
    assert (weight.readers, weight.source, weight.result, weight.exact, weight.nested) == (
        ("linear",),
        2,
        2,
        True,
        False,
    )
    assert (weight.params.dtype, weight.params.axis, weight.params.dynamic) == ("int8", 0, False)
    assert weight.params.scale is not None
    found = [
        (
            *(c.slot, c.attribute, c.is_parameter, c.reader, c.op, c.handle, c.argument),
            *(c.site, c.weight_site, c.nested_site, c.mutated, type(c.stored) is Stored),
        )
        for c in program.constants
    ]
    assert found == [
        (2, "weight", True, "linear", "linear", 1, 1, 1, None, None, False, True),
        (3, "bias", True, "linear", "linear", 1, 2, None, 1, None, False, False),
        (10, "table", False, "mul", "mul", 4, 1, None, None, None, False, False),
    ]
    references = [each.reference for each in program.constants]
    assert all(map(torch.equal, references, (WEIGHT, torch.ones(4), torch.full((4,), 0.5))))
    rounded = (WEIGHT / SCALES[:, None]).round().clamp(-128, 127) * SCALES[:, None]
    assert torch.allclose(program.constants[0].quantized, rounded, atol=1e-7)
    assert list(program.regions) == [
        Region(0, "linear", ("linear", "relu"), (1, 2), (0, 1, 2, 3, 4)),
        Region(1, "add", ("add",), (6,), (2, 3)),
        Region(2, "mul", ("mul",), (7,), (4,)),
        Region(3, "view", ("view",), (8,), ()),
        Region(4, "add_1", ("add_1",), (9,), ()),
        Region(5, "split", ("split", "split[0]"), (10, 11), ()),
    ]
    assert program.whole_graphs == frozenset()


def test_a_value_that_two_ops_read_ends_a_region() -> None:
    two = Two.new()
    linear = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), two.weight())
    relu = two.op(ATEN.relu.default, linear)
    last = two.op(ATEN.gelu.default, two.op(ATEN.exp.default, relu))
    program, *graphs = lowered(two, two.op(ATEN.add.Tensor, linear, last))
    assert [region.ops for region in program.regions] == [("linear",), ("relu",), ("exp", "gelu"), ("add",)]
    assert program.may_share
    assert [(step.name, step.in_place) for step in program.steps if step.in_place] == [("relu", ATEN.relu_.default)]
    check_runs(program, *graphs)


# -- what a program notes, and what it refuses -------------------------------------------------------------------------


def test_unlike_parameters_are_noted_and_run_as_the_converted_ops() -> None:
    two = Two.new()
    x = two.input()
    integers = two.quantize(x, 0.1, 0)
    odd, even = two.dequantize(integers, 0.1, 1), two.dequantize(integers, 0.1, 0)
    coarse = two.dequantize(two.quantize(x, 0.1, 0), 0.2, 0)
    program, *graphs = lowered(two, two.op(ATEN.add.Tensor, odd, even), coarse)
    assert [(site.exact, site.params.zero_point, site.result) for site in program.sites] == [
        (False, 0, 1),
        (True, 0, 2),
        (False, 0, 3),
    ]
    assert list(program.notes) == [
        "dequantize_per_tensor_default: a value is quantized and dequantized with different parameters",
        "quantized_decomposed.quantize_per_tensor.default to int8 runs as the converted op: it has no exact fused form",
        "dequantize_per_tensor_default_2: a value is quantized and dequantized with different parameters",
    ]
    assert program.steps[0].function is program.steps[0].converted
    assert [step.duplicate_of for step in program.steps] == [None] * 4
    check_runs(program, *graphs)


def test_values_of_another_dtype_are_no_duplicates() -> None:
    two = Two.new()
    integers = two.quantize(two.input(), 0.1, 0)
    args = (integers[1], 0.1, 0, *INT8)
    call = two.quantized.call_function
    half = integers[0], call(OPS.dequantize_per_tensor.default, args, {"out_dtype": torch.float16})
    program, quantized, _ = lowered(two, two.dequantize(integers, 0.1, 0), half)
    assert [(site.exact, site.result) for site in program.sites] == [(False, 1), (True, 2)]
    assert [step.duplicate_of for step in program.steps] == [None, None]
    assert tensors_equal(Simulator(program).run([X], on=True), quantized(X))


def test_integers_that_the_model_itself_reads_are_the_same_in_both() -> None:
    two = Two.new()
    x = two.input()
    integers = two.quantize(x, 0.1, 0)
    value = two.dequantize(integers, 0.1, 0)
    cast = two.op(ATEN._to_copy.default, integers, dtype=torch.float32)
    program, quantized, _ = lowered(two, two.op(ATEN.add.Tensor, value, cast))
    assert list(program.notes) == [
        "_to_copy reads quantized_decomposed.quantize_per_tensor.default directly; the reference reads the same values"
    ]
    assert [(step.op, step.handle, step.name) for step in program.steps if "quantize_" in step.op] == [
        ("quantize_per_tensor", -1, "quantize_per_tensor (no handle, quantize_per_tensor_default)")
    ]
    assert tensors_equal(Simulator(program).run([X], on=True), quantized(X))


def test_a_constant_without_a_float_value_is_noted() -> None:
    two = Two.new()
    linear = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), two.weight(), two.attr("bias"))
    quantized, reference = two.graphs(linear)
    next(node for node in reference.graph.nodes if node.target is ATEN.linear.default).meta["custom"] = {}
    program = lower(quantized, reference, names_of(quantized))
    assert list(program.notes) == [
        "linear: no float value for its argument (1,) in the reference; the reference reads the quantized one"
    ]
    assert [(each.attribute, each.is_parameter) for each in program.constants] == [("integers", False), ("bias", True)]
    assert all(tensors_equal(each.reference, each.quantized) for each in program.constants)


@pytest.mark.parametrize(("read", "notes"), [(True, 1), (False, 0)])
def test_a_write_to_a_rounded_value_is_noted_where_another_op_reads_the_value_later(read: bool, notes: int) -> None:
    two = Two.new()
    value = two.op(ATEN.neg.default, two.input())
    written = two.op(ATEN.relu_.default, two.rounded(value, 0.1))
    program, *_ = lowered(two, two.op(ATEN.add.Tensor, written, value if read else written))
    note = "relu: an in-place op writes to a quantized value or a view of it; convert copies quantized values, so "
    assert list(program.notes) == [f"{note}other readers miss the write"] * notes


def test_a_constant_read_by_keyword_has_no_number() -> None:
    two = Two.new()
    linear = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), two.weight(), bias=two.attr("bias"))
    program, *graphs = lowered(two, linear)
    assert [(each.attribute, each.argument, each.weight_site) for each in program.constants] == [
        ("weight", 1, None),
        ("bias", -1, 1),
    ]
    check_runs(program, *graphs)


def test_a_constant_that_is_rounded_twice_has_both_errors() -> None:
    two = Two.new()
    weight = two.rounded(two.rounded(two.attr("weight"), 0.1), 0.07)
    check_runs(*lowered(two, two.op(ATEN.linear.default, two.input(), weight)))


def test_a_cast_of_a_constant_is_its_rounding_and_one_of_a_value_an_op() -> None:
    two = Two.new()
    weight = two.attr("weight")
    half = weight[0], two.quantized.call_function(OPS.convert_element_type.no_fuse, (weight[1], torch.float16))
    back = weight[0], two.quantized.call_function(OPS.convert_element_type.no_fuse, (half[1], torch.float32))
    program, *graphs = lowered(two, two.op(ATEN.linear.default, two.input(), back))
    ((site,), (constant,)) = program.sites, program.constants
    assert (site.kind, site.params.dtype, site.params.scale, site.params.dynamic) == ("weight", "float16", None, False)
    assert torch.equal(constant.quantized, WEIGHT.half().float())
    assert torch.equal(constant.reference, WEIGHT)
    check_runs(program, *graphs)


def test_ops_on_constants_are_folded_and_those_on_rounded_ones_only_where_they_move_values() -> None:
    two = Two.new()
    turned = two.op(ATEN.permute.default, two.weight(), [1, 0])
    table = two.op(ATEN.mul.Tensor, two.attr("table"), 2.0)
    scaled = two.op(ATEN.mul.Tensor, two.weight(), 2.0)
    y = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), turned, table)
    program, *graphs = lowered(two, two.op(ATEN.add.Tensor, y, scaled))
    assert [step.name for step in program.steps if step.site is None] == ["mul_1", "linear", "add"]
    constants = {each.reader: each for each in program.constants if each.argument != 2}
    assert torch.equal(constants["linear"].reference, WEIGHT.t())
    assert constants["linear"].attribute == "weight"
    (bias,) = (each for each in program.constants if each.argument == 2)
    assert (bias.attribute, bias.reference.tolist(), bias.site) == ("table", [1.0] * 4, None)
    check_runs(program, *graphs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda two, x: x, "nothing in the quantized graph is quantized: it has no quantize or dequantize op"),
        (
            lambda two, x: (x[0], two.quantized.call_module("observer", (x[1],))),
            r"the quantized graph still has the observer observer \(MinMaxObserver\)\. Expected the graph that",
        ),
        (
            lambda two, x: (
                x[0],
                two.quantized.call_function(
                    OPS.dequantize_per_tensor.tensor,
                    (
                        two.quantized.call_function(
                            OPS.quantize_per_tensor.tensor,
                            (
                                x[1],
                                two.quantized.call_function(ATEN.amax.default, (x[1],)),
                                two.attr("zeros")[1],
                                *INT8,
                            ),
                        ),
                        two.quantized.get_attr("scales"),
                        two.quantized.get_attr("zeros"),
                        *INT8,
                    ),
                ),
            ),
            r"computes a scale or zero point, amax_default \(aten\.amax\.default\), in a way that pt2qa does not",
        ),
    ],
    ids=["float", "prepared", "scale"],
)
def test_graphs_that_are_refused(change: Callable[[Two, tuple[Node, Node]], tuple[Node, Node]], message: str) -> None:
    two = Two.new()
    two.root.observer = pt2e.MinMaxObserver()
    value = change(two, two.input())
    graph = [two.float, two.quantized]
    for n, each in enumerate(graph):
        each.output((each.call_function(ATEN.relu.default, (value[n],)),))
    quantized, reference = (GraphModule(two.root, each) for each in reversed(graph))
    with pytest.raises(pt2qa.PairingError, match=message):
        lower(quantized, reference, {})


def test_strange_ops_run_as_they_are() -> None:
    two = Two.new()
    value = two.rounded(two.input(), 0.1)
    quantized, reference = two.graphs(two.op(ATEN.detach_.default, value))
    program = lower(quantized, reference, names_of(reference))
    assert [step.function for step in program.steps[1:]] == [ATEN.detach.default]
    assert not program.steps[1].mutates
    method = Two.new()
    value = method.rounded(method.input(), 0.1)
    made = tuple(
        graph.call_method("clamp", (value[n],), {"min": 0.25})
        for n, graph in enumerate((method.float, method.quantized))
    )
    for n, graph in enumerate((method.float, method.quantized)):
        graph.output((made[n],))
    module = GraphModule(method.root, method.quantized)
    program = lower(module, GraphModule(method.root, method.float), {})
    assert [step.name for step in program.steps] == ["x", "clamp (no handle, clamp)"]
    assert tensors_equal(Simulator(program).run([X], on=True), module(X))
    assert (program.steps[1].handle, program.steps[1].module, program.steps[1].op) == (-1, "", "clamp")


def test_modules_and_slices_run_as_they_are() -> None:
    two = Two.new()
    two.root.own = nn.Softplus()
    x = two.input()
    value = two.rounded(x, 0.1)
    made = []
    for n, graph in enumerate((two.float, two.quantized)):
        size = graph.call_function(ATEN.sym_size.int, (value[n], 1))
        part = graph.call_function(operator.getitem, (value[n], (slice(None), slice(1, size, 2))))
        made.append(graph.call_module("own", (part,)))
        graph.output((made[n],))
    quantized, reference = (GraphModule(two.root, graph) for graph in (two.quantized, two.float))
    program = lower(quantized, reference, {})
    assert program.steps[-1].function is two.root.own
    check_runs(program, quantized, reference)


def test_what_ops_without_a_handle_read() -> None:
    two = Two.new()
    linear = two.op(ATEN.linear.default, two.rounded(two.input(), 0.1), two.weight(), two.attr("bias"))
    quantized, reference = two.graphs(two.op(ATEN.relu.default, linear))
    for graph in (quantized, reference):
        for node in graph.graph.nodes:
            node.meta.pop("custom", None)
    program = lower(quantized, reference, {})
    name = f"linear (no handle, {linear[1].name})"
    assert [(step.name, step.handle) for step in program.steps[1:2]] == [(name, -1)]
    own = linear[1].name
    assert [(c.reader, c.handle, c.attribute, c.weight_site) for c in program.constants] == [
        (own, -1, "weight", None),
        (own, -1, "bias", 1),
    ]
    assert [(site.name, site.op, site.handle) for site in program.sites] == [("x", "input", -1), (own, "linear", -1)]
    assert (program.input_names, program.input_handles) == (("x",), (-1,))
    check_runs(program, quantized, reference)


def branching(*bodies: GraphModule) -> list[GraphModule]:
    """A converted graph and its float one, each of which only calls its body."""
    outer = Two.new()
    x = outer.input()
    condition = tuple(graph.get_attr("condition") for graph in (outer.float, outer.quantized))
    outer.root.register_buffer("condition", torch.tensor(True))
    held = tuple(graph.get_attr("body") for graph in (outer.float, outer.quantized))
    made = []
    for n, graph in enumerate((outer.float, outer.quantized)):
        called = graph.call_function(torch.ops.higher_order.cond, (condition[n], held[n], held[n], [x[n]]))
        made.append(graph.call_function(operator.getitem, (called, 0)))
        graph.output((made[n],))
    roots = [nn.Module(), nn.Module()]
    for root, body in zip(roots, bodies, strict=True):
        root.register_buffer("condition", torch.tensor(True))
        root.body = body
    modules = [GraphModule(root, graph) for root, graph in zip(roots, (outer.quantized, outer.float), strict=True)]
    for module in modules:
        assign_handles(module)
    return modules


def test_a_nested_graph_is_a_program_of_its_own_whose_sites_are_sites_here() -> None:
    inner = Two.new()
    value = inner.rounded(inner.input(), 0.05, 2)
    linear = inner.op(ATEN.linear.default, value, inner.weight(), inner.attr("bias"))
    bodies = inner.graphs(inner.op(ATEN.relu.default, linear))
    quantized, reference = branching(*bodies)
    handles = {"cond": 1, "linear": 2}
    ops = [node for node in bodies[0].graph.nodes if node.target is ATEN.linear.default]
    ops += [node for node in bodies[1].graph.nodes if node.target is ATEN.linear.default]
    for node in ops:
        node.meta["custom"] = {"numeric_debug_handle": handles["linear"]}
    program = lower(quantized, reference, names_of(reference))
    assert [(site.index, site.kind, site.name, site.op, site.nested) for site in program.sites] == [
        (0, "activation", "cond.true/input[0]", "input", True),
        (1, "weight", "cond.true/linear", "linear", True),
    ]
    (body,) = (each for each in program.constants if type(each.stored).__name__ == "Nested")
    assert (body.stored.sites, body.reference is body.stored, body.argument, body.site) == ((0, 1), True, 1, None)
    assert {site.source for site in program.sites} == {site.result for site in program.sites} == {body.slot}
    assert [site.params.zero_point for site in program.sites[:1]] == [2]
    constants = {each.attribute: each for each in body.stored.program.constants}
    assert torch.equal(constants["weight"].reference, WEIGHT)
    assert program.notes == ()
    check_runs(program, quantized, reference)
    simulator = Simulator(program)
    plain = [simulator.run([X], on=on)[0] for on in (False, [0], [1], [0, 1], True)]
    assert len({str(each) for each in plain}) == 4
    assert torch.equal(plain[3], plain[4])


def test_a_nested_graph_without_a_counterpart_has_the_float_values_that_it_rounds_itself() -> None:
    inner = Two.new()
    linear = inner.op(ATEN.linear.default, inner.input(), inner.rounded(inner.attr("weight"), 0.1))
    quantized, reference = branching(*inner.graphs(linear))
    (called,) = quantized.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
    called.meta["custom"] = {"numeric_debug_handle": 99}
    program = lower(quantized, reference, names_of(reference))
    (body,) = (each.stored for each in program.constants if each.site is None and each.argument == 1)
    (weight,) = body.program.constants
    assert torch.equal(weight.reference, WEIGHT)
    check_runs(program, quantized, reference)


def test_a_rounded_value_that_is_written_to_is_one_of_its_own_only_where_others_see_the_write() -> None:
    for seen in (False, True):
        two = Two.new()
        integers = two.quantize(two.input(), 0.1, 0)
        first, second = (two.dequantize(integers, 0.1, 0) for _ in range(2))
        view = two.op(ATEN.view.default, first, [4, 4]) if seen else second
        relu = two.op(ATEN.relu_.default, first)
        program, quantized, _ = lowered(two, two.op(ATEN.add.Tensor, relu, view), second)
        assert [site.result for site in program.sites] == ([1, 2] if seen else [1])
        assert [step.duplicate_of for step in program.steps if step.site is not None] == [None] * len(program.sites)
        assert program.may_share != seen
        assert tensors_equal(Simulator(program).run([X], on=True), quantized(X.clone()))
