"""Specs that are changed after a quantizer annotated, on a graph written by hand."""

from __future__ import annotations

import base64
import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torchao.quantization.pt2e import utils
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from pt2qa._graph.internals.flow_quantizer import Edited, Original, edit_specs, named_nodes, spec_at, write_specs
from pt2qa._graph.internals.nodes import ANNOTATION
from pt2qa._graph.internals.shortcuts import shortcuts

ATEN = torch.ops.aten
EIGHT = QuantizationSpec(torch.int8, None, -128, 127)  # type: ignore[arg-type]
NARROW = QuantizationSpec(torch.int8, None, -8, 7)  # type: ignore[arg-type]


class Two:
    """A linear, an add that shares its spec, and one weight that is read twice."""

    def __init__(self) -> None:
        graph = self.graph = Graph()
        self.x = graph.placeholder("x")
        self.weight, self.again = graph.get_attr("weight"), graph.get_attr("weight")
        self.linear = graph.call_function(ATEN.linear.default, (self.x, self.weight))
        self.add = graph.call_function(ATEN.add.Tensor, (self.linear, self.again))
        graph.output((self.add,))
        self.module = GraphModule({"weight": torch.eye(2)}, graph)

    def annotate(self) -> None:
        self.linear.meta[ANNOTATION] = QuantizationAnnotation(
            {self.x: EIGHT, self.weight: EIGHT}, EIGHT, _annotated=True
        )
        shared = SharedQuantizationSpec(self.linear)
        self.add.meta[ANNOTATION] = QuantizationAnnotation({self.linear: shared}, shared, _annotated=True)

    def found(self, node: Node) -> tuple[dict[str, Any], Any] | None:
        annotation = node.meta.get(ANNOTATION)
        if annotation is None:
            return None
        return {source.name: spec for source, spec in annotation.input_qspec_map.items()}, annotation.output_qspec


def test_nodes_have_names() -> None:
    two = Two()
    names = named_nodes(two.graph)
    assert names == {
        "x": two.x,
        "linear": two.linear,
        "add": two.add,
        "output": two.graph.output_node(),
        "self.weight": two.weight,
        "self.weight#": two.again,
    }


def test_specs_are_read_written_and_removed() -> None:
    two = Two()
    two.annotate()
    shared = SharedQuantizationSpec(two.linear)
    before = two.linear.meta[ANNOTATION]
    assert (spec_at(two.linear), spec_at((two.x, two.linear))) == (EIGHT, EIGHT)
    write_specs({(two.x, two.linear): NARROW, (two.weight, two.linear): None, two.add: None})
    assert two.found(two.linear) == ({"x": NARROW}, EIGHT)
    assert two.found(two.add) == ({two.linear.name: shared}, None)
    assert before.input_qspec_map == {two.x: EIGHT, two.weight: EIGHT}, "another node may have this annotation"
    write_specs({(two.linear, two.add): None})
    assert two.found(two.add) is None
    write_specs({two.add: NARROW, (two.again, two.add): EIGHT})
    assert two.found(two.add) == ({two.again.name: EIGHT}, NARROW)
    assert two.add.meta[ANNOTATION]._annotated
    write_specs({(two.again, two.add): None, (two.x, two.add): None})
    assert two.found(two.add) == ({}, NARROW)
    write_specs({two.linear: None})
    assert two.found(two.linear) == ({"x": NARROW}, None), "it still has an input"


def test_specs_refer_to_places() -> None:
    two = Two()
    two.annotate()
    edit_specs(
        two.graph,
        {
            ("linear", 0): Original(("add", None), {"quant_min": -8}),  # behind the shared one
            ("linear", None): NARROW,
            ("add", 1): SharedQuantizationSpec(("linear", 0)),
            ("add", None): None,
        },
    )
    changed = QuantizationSpec(torch.int8, None, -8, 127)  # type: ignore[arg-type]
    assert two.found(two.linear) == ({"x": changed, "weight": EIGHT}, NARROW)
    inputs = {
        two.linear.name: SharedQuantizationSpec(two.linear),
        two.again.name: SharedQuantizationSpec((two.x, two.linear)),
    }
    assert two.found(two.add) == (inputs, None)
    two.add.meta[ANNOTATION].output_qspec = DerivedQuantizationSpec([two.x], lambda _: (None, None), torch.int32)  # type: ignore[arg-type, return-value]
    edit_specs(two.graph, {("add", None): Original(("add", None), {"derived_from": [("linear", 0), ("linear", None)]})})
    derived = two.found(two.add)
    assert derived is not None
    assert derived[1].derived_from == [(two.x, two.linear), two.linear]
    assert derived[1].dtype is torch.int32


class Noted(Quantizer):  # type: ignore[misc]
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, object]] = []

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        self.asked.append(("transform", model))
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        self.asked.append(("annotate", model))
        for node in model.graph.find_nodes(op="call_function", target=ATEN.linear.default):
            node.meta[ANNOTATION] = QuantizationAnnotation({node.args[0]: EIGHT}, EIGHT, _annotated=True)
        return None  # type: ignore[return-value]  # as some do

    def validate(self, model: GraphModule) -> None:
        self.asked.append(("validate", model))


def test_a_quantizer_is_edited_in_the_model_and_not_in_the_bodies_of_its_loops() -> None:
    outer, inner = Two(), Two()
    outer.module.body = inner.module
    numbers = base64.b64encode(struct.pack("<2f", 2.0, 3.0)).decode()
    edited = Edited(quantizer := Noted(), {("linear", None): NARROW}, [("scale", "linear", 1, 0, 1.0, numbers)])
    weight = outer.module.get_buffer("weight").clone()
    assert edited.transform_for_annotation(outer.module) is outer.module
    assert torch.equal(outer.module.get_buffer("weight"), weight * torch.tensor([[2.0], [3.0]]))
    assert edited.annotate(outer.module) is outer.module
    assert outer.found(outer.linear) == ({"x": EIGHT}, NARROW)
    assert edited.bodies == {inner.module}
    before = inner.module.get_buffer("weight").clone()
    assert edited.transform_for_annotation(inner.module) is inner.module
    assert torch.equal(inner.module.get_buffer("weight"), before)
    edited.annotate(inner.module)
    assert inner.found(inner.linear) == ({"x": EIGHT}, EIGHT)
    edited.validate(outer.module)
    edited.prepare_obs_or_fq_callback(outer.module, {})
    assert [what for what, _ in quantizer.asked] == ["transform", "annotate", "transform", "annotate", "validate"]


# -- shortcuts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [(), (0, 1), (1,), (0, 2)])
def test_a_free_attribute_has_the_name_that_torchao_gives(taken: tuple[int, ...]) -> None:
    module = nn.Module()
    for number in taken:
        setattr(module, f"a_b_{number}", 1)
    own: Callable[[str], Callable[[nn.Module], str]] = utils.get_new_attr_name_with_prefix
    expected, found = [], []
    for names, manager in ((expected, None), (found, shortcuts)):
        copied = copy.deepcopy(module)
        for number in range(4):
            if number == 3:
                delattr(copied, names[0])  # which is free again
            if manager is None:
                names.append(own("a.b_")(copied))
            else:
                with manager():
                    names.append(utils.get_new_attr_name_with_prefix("a.b_")(copied))
            setattr(copied, names[-1], 1)
    assert found == expected


def dead_code(*, nested: bool) -> GraphModule:
    module = nn.Sequential(nn.ReLU(), nn.Tanh())
    graph = symbolic_trace(module)
    first = next(node for node in graph.graph.nodes if node.op == "call_module")
    with graph.graph.inserting_after(first):
        dead = graph.graph.call_function(torch.exp, (first,))
    with graph.graph.inserting_after(dead):
        graph.graph.call_function(torch.sin, (dead,))
    if nested:
        graph.body = symbolic_trace(nn.ReLU())
    return graph


@pytest.mark.parametrize("nested", [False, True])
def test_dead_code_is_that_of_torch(nested: bool) -> None:
    plain, short, kept = (dead_code(nested=nested) for _ in range(3))
    found = [plain.graph.eliminate_dead_code(), plain.graph.eliminate_dead_code()]
    with shortcuts():
        assert [short.graph.eliminate_dead_code(), short.graph.eliminate_dead_code()] == found == [True, False]
        assert not kept.graph.eliminate_dead_code(lambda node: True)
    assert [str(node) for node in short.graph.nodes] == [str(node) for node in plain.graph.nodes]
    assert len(kept.graph.nodes) == len(plain.graph.nodes) + 2
