"""Each field of a program, found once more in the two graphs that it was made from."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

import pt2qa
from pt2qa._graph.handles import attribute_of, handle_of, op_of
from pt2qa._graph.internals.nodes import module_stack
from pt2qa._simulator import quant_ops
from tests.flows import quantized_pair, residual_pair
from tests.models import images


class Pruned(nn.Module):
    """A weight that is a mask, which is a buffer, times a parameter, in front of a linear without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.own = nn.Linear(8, 6), nn.Parameter(images().reshape(-1)[:24].reshape(4, 6).clone())
        self.register_buffer("mask", (self.own.detach() > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(self.fc(x)), self.mask * self.own)


@functools.cache
def pruned_pair() -> pt2qa.QuantizedPair:
    return quantized_pair(Pruned(), images().reshape(-1)[:32].reshape(4, 8))


PAIRS = {"residual": residual_pair, "residual x86": functools.partial(residual_pair, "x86"), "pruned": pruned_pair}


class Facts:
    """What the converted graph says of its ops, values and constants, by node."""

    def __init__(self, pair: pt2qa.QuantizedPair) -> None:
        self.pair, graph = pair, pair.quantized.graph
        self.ops = [node for node in graph.nodes if node.op == "call_function" and not quant_ops.is_quantization(node)]
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.steps = {step.node: step for step in pair.program.steps if step.site is None}

    def name(self, node: Node) -> str:
        return node.name if node.op == "placeholder" else self.pair.names[handle_of(node) or 0].name

    def is_constant(self, node: Node) -> bool:
        return node.op == "get_attr" or (quant_ops.is_dequantize(node) and self.is_constant(node.args[0]))  # type: ignore[arg-type]

    def sites(self) -> list[tuple[Any, ...]]:
        """Of each value that is rounded once: what it is and who reads it, in the order of the graph."""
        found = []
        for node in self.pair.quantized.graph.nodes:
            if quant_ops.is_quantize(node):
                source, users = node.args[0], [user for each in node.users for user in each.users]
                readers = [self.name(op) for op in self.ops if op in users]
                op, handle = ("input", 0) if source in self.inputs else (op_of(source.target), handle_of(source))
                found.append(("activation", self.name(source), op, handle, tuple(readers), node.args[1], node.args[2]))
        return found

    def constants(self) -> list[tuple[Any, ...]]:
        """Of each argument that is a constant: the reader, the place, whether it is rounded."""
        return [
            (self.name(node), op_of(node.target), handle_of(node), place, quant_ops.is_dequantize(arg))
            for node in self.ops
            for place, arg in enumerate(node.args)
            if isinstance(arg, Node) and self.is_constant(arg)
        ]


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_the_ops_of_the_converted_graph(name: str) -> None:
    facts = Facts(PAIRS[name]())
    program = facts.pair.program
    constants = {each.slot for each in program.constants}
    made = {step.out: step for step in program.steps}
    inputs = dict(zip(program.inputs, program.input_names, strict=True))
    wrong = []
    for node in facts.ops:
        step, (path, kind) = facts.steps[node.name], list(module_stack(node).values())[-1]
        own = (step.name, step.op, step.handle, step.module, step.module_type, step.site)
        if own != (facts.name(node), op_of(node.target), handle_of(node), path, str(kind).rpartition(".")[2], None):
            wrong.append(own)
        values = [arg for arg in node.all_input_nodes if not facts.is_constant(arg)]
        read = [inputs[each] if each in inputs else made[each].name for each in step.reads]
        sources = [arg.args[0].args[0] if quant_ops.is_dequantize(arg) else arg for arg in values]  # type: ignore[union-attr]
        rounded = [each in made and made[each].site is not None for each in step.reads]
        if read != [facts.name(each) for each in sources] or rounded != list(map(quant_ops.is_dequantize, values)):  # type: ignore[arg-type]
            wrong.append((step.name, read, rounded))
        if len(step.constants) != len(node.all_input_nodes) - len(values) or not constants.issuperset(step.constants):
            wrong.append((step.name, step.constants))
    assert not wrong
    assert [step.node for step in program.steps if step.site is None] == [node.name for node in facts.ops]
    assert [(program.steps[number].out, number) for number in program.producers.values()] == [
        (slot, number) for slot, number in program.producers.items()
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_sites_and_constants_are_those_of_the_converted_graph(name: str) -> None:
    facts = Facts(PAIRS[name]())
    program, float_model = facts.pair.program, facts.pair.capture
    activations = [
        (each.kind, each.name, each.op, each.handle, each.readers, each.params.scale, each.params.zero_point)
        for each in program.sites
        if each.kind == "activation"
    ]
    assert activations == facts.sites()
    constants = [
        (each.reader, each.op, each.handle, each.argument, each.site is not None) for each in program.constants
    ]
    assert constants == facts.constants()
    assert float_model is not None
    parameters = {name for name, _ in facts.pair.reference.named_parameters()}
    for each in program.constants:
        beside = [other.site for other in program.constants if other.reader == each.reader and other.site is not None]
        assert each.weight_site == (None if each.site is not None else beside[0]), each.attribute
        assert each.nested_site is None
        assert not each.mutated
        assert each.is_parameter == (each.attribute in parameters or each.attribute == "mask"), each.attribute
        if each.site is not None:
            site = program.sites[each.site]
            assert (site.kind, site.name, site.op, site.handle) == ("weight", each.reader, each.op, each.handle)
            assert (site.readers, site.source, site.result) == ((each.reader,), each.slot, each.slot)
            assert site.params.axis == 0
            node = next(node for node in facts.ops if facts.name(node) == each.reader).args[each.argument]
            assert isinstance(node, Node)
            integers = attribute_of(facts.pair.quantized, node.args[0])  # type: ignore[arg-type]
            assert isinstance(site.params.scale, Tensor)
            scale = site.params.scale.reshape(-1, *[1] * (integers.dim() - 1))
            assert bool((each.quantized == integers * scale).all())


@pytest.mark.parametrize("name", PAIRS)
def test_regions_divide_the_ops_between_the_sites(name: str) -> None:
    facts = Facts(PAIRS[name]())
    program = facts.pair.program
    members = [number for region in program.regions for number in region.steps]
    assert sorted(members) == [step.index for step in program.steps if step.site is None]
    for number, region in enumerate(program.regions):
        steps = [program.steps[each] for each in region.steps]
        assert (region.index, region.name) == (number, steps[0].name)
        assert region.ops == tuple(step.name for step in steps)
        assert {step.region for step in steps} == {number}
        assert all(later.reads[0] == step.out for step, later in itertools.pairwise(steps))
        slots = {slot for step in steps for slot in (*step.reads, *step.constants)}
        around = {each.index for each in program.sites if each.result in slots}
        around |= {each.index for each in program.sites if each.kind == "activation" and each.source == steps[-1].out}
        assert region.sites == tuple(sorted(around))
    of_sites = {(step.region, step.handle, step.module, step.op) for step in program.steps if step.site is not None}
    assert of_sites == {(-1, -1, "", "quantize")}
