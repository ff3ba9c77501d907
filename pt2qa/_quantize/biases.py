"""What a plan adds to biases: after calibration, so that ranges and the reference stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import set_parameters
from pt2qa._graph.handles import OpName, attribute_of, name_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator.quant_ops import is_quantization
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit
from pt2qa.overrides.plan import in_base64

BIAS = 2
"""The number of the argument that is the bias, of convolutions and linears."""

TAKING: Final = frozenset(("conv1d", "conv2d", "conv3d", "linear"))
"""Ops that take a bias, with as many channels as the first axis of the weight has."""


def give_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Gives the ops of ``bias`` edits that have no bias one of zeros, in place; their outputs stay as they are."""
    nodes = _ops(graph, names)
    for name in dict.fromkeys(edit.ops[0] for edit in edits if edit.kind == "bias"):
        node = nodes.get(name)
        if node is None or not lacks_bias(node):
            continue
        value, target = node.meta[VALUE], "bias_of_" + re.sub(r"\W", "_", name)
        weight = _weight(node)
        assert weight is not None, "an op that lacks a bias has a weight"
        zeros = torch.zeros(len(attribute_of(graph, weight)), dtype=value.dtype, device=value.device)
        set_parameters(graph, {target: zeros})
        with graph.graph.inserting_before(node):
            bias = graph.graph.get_attr(target)
        node.args = (*node.args[:BIAS], bias, *node.args[BIAS + 1 :])
    graph.recompile()


def lacks_bias(node: Node) -> bool:
    """Whether an op with a weight of its own takes a bias and has none."""
    without = op_of(node.target) in TAKING and (len(node.args) <= BIAS or node.args[BIAS] is None)
    return without and _weight(node) is not None


def _weight(node: Node) -> Node | None:
    """The parameter that is an op's weight, behind what observes or dequantizes it."""
    source = node.args[1]
    while isinstance(source, Node) and (source.op == "call_module" or is_quantization(source)):
        source = source.args[0]
    return source if isinstance(source, Node) and source.op == "get_attr" else None


def add_to_biases(prepared: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``bias`` edits in a prepared graph, in place; returns the biases that were there, by attribute.

    Raises:
        QuantizeError: an op has no bias of its own, or one of another size.
    """
    nodes = _ops(prepared, names)
    before: dict[str, Tensor] = {}
    for edit in edits:
        if edit.kind != "bias":
            continue
        node = nodes.get(edit.ops[0])
        if node is None:
            raise QuantizeError(f"{edit}: the graph that is quantized has no such op")
        source = _source(node)
        if source is None:
            raise QuantizeError(f"{edit}: it has no bias of its own that could be changed")
        target = str(source.target)
        bias = prepared.get_parameter(target).detach()
        added = torch.tensor(edit.numbers, dtype=torch.float32, device=bias.device)
        if bias.shape != added.shape:
            raise QuantizeError(f"{edit}: the bias has the shape {tuple(bias.shape)}")
        before.setdefault(target, bias)
        set_parameters(prepared, {target: (bias.float() + added).to(bias.dtype)})
    return before


def can_add_to_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> bool:
    """Whether each op of ``bias`` edits is in a graph, without a bias, or with one of its own that is not quantized."""
    nodes = _ops(graph, names)
    found = [nodes.get(edit.ops[0]) for edit in edits]
    return all(node is not None and (lacks_bias(node) or _source(node) is not None) for node in found)


def _ops(graph: GraphModule, names: Mapping[int, OpName]) -> dict[str | None, Node]:
    """The ops of a graph by name."""
    return {name_of(node, names): node for node in graph.graph.nodes if node.op == "call_function"}


def _source(node: Node) -> Node | None:
    """The parameter that is an op's bias, if no other op reads it; an observer may be between."""
    found = node.args[BIAS] if len(node.args) > BIAS else None
    while isinstance(found, Node) and found.op == "call_module" and len(found.users) == 1:
        found = found.args[0]
    own = isinstance(found, Node) and found.op == "get_attr" and len(found.users) == 1
    return found if own and isinstance(found, Node) else None


SOURCE = '''
def add_to_biases(prepared):
    """Adds what was fitted to the biases of ops, after calibration."""
    ops = ops_by_name(prepared.graph)
    for name, values in BIASES.items():
        node = ops[name]
        if len(node.args) < 3 or node.args[2] is None:
            weight, value = node.args[1], node.meta["val"]
            while weight.op != "get_attr":
                weight = weight.args[0]
            target = "bias_of_" + re.sub(r"\\W", "_", name)
            zeros = torch.zeros(len(prepared.get_parameter(weight.target)), dtype=value.dtype, device=value.device)
            setattr(prepared, target, torch.nn.Parameter(zeros, requires_grad=False))
            with prepared.graph.inserting_before(node):
                bias = prepared.graph.get_attr(target)
            node.args = (*node.args[:2], bias, *node.args[3:])
        source = node.args[2]
        while source.op == "call_module":
            source = source.args[0]
        module, _, attribute = source.target.rpartition(".")
        bias = prepared.get_parameter(source.target).detach()
        added = torch.tensor([each for (each,) in struct.iter_unpack("<f", base64.b64decode(values))]).to(bias.device)
        parameter = torch.nn.Parameter((bias.float() + added).to(bias.dtype), requires_grad=False)
        setattr(prepared.get_submodule(module), attribute, parameter)
    prepared.recompile()
'''
"""What :func:`give_biases` and :func:`add_to_biases` do, for an export flow without pt2qa."""


def source_of(edits: Iterable[Edit]) -> str:
    """The function of :data:`SOURCE`, and the values of the ``bias`` edits as text; empty if there are none.

    More than one edit of an op are one there.
    """
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        if edit.kind == "bias":
            found.setdefault(edit.ops[0], []).append(edit)
    if not found:
        return ""
    lines = "".join(f"    {name!r}: {_together(own)!r},\n" for name, own in found.items())
    return f"BIASES = {{\n{lines}}}\n{SOURCE}"


def _together(edits: list[Edit]) -> str:
    """The sum of what edits add; with one edit, its very text."""
    if len(edits) == 1:
        return edits[0].values
    return in_base64(torch.stack([torch.tensor(edit.numbers) for edit in edits]).sum(0).tolist())
