"""What a plan adds to biases: after calibration, so that ranges and the reference stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, op_of, ops_of
from pt2qa._graph.internals import flow_runtime
from pt2qa._graph.internals.flow_runtime import BIAS
from pt2qa._simulator.quant_ops import is_quantization
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit

TAKING: Final = frozenset(("conv1d", "conv2d", "conv3d", "linear"))
"""Ops that take a bias, with as many channels as the first axis of the weight has."""


def give_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Gives the ops of ``bias`` edits that have no bias one of zeros, in place; their outputs stay as they are."""
    nodes = ops_of(graph, names)
    for name in dict.fromkeys(edit.ops[0] for edit in edits if edit.kind == "bias"):
        if name in nodes and lacks_bias(nodes[name]):
            flow_runtime.give_bias(graph, name, nodes[name])


def lacks_bias(node: Node) -> bool:
    """Whether an op with a weight of its own takes a bias and has none."""
    if op_of(node.target) not in TAKING or (len(node.args) > BIAS and node.args[BIAS] is not None):
        return False
    source = node.args[1]
    while isinstance(source, Node) and (source.op == "call_module" or is_quantization(source)):
        source = source.args[0]
    return isinstance(source, Node) and source.op == "get_attr"


def add_to_biases(prepared: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``bias`` edits in a prepared graph, in place; returns the biases that were there, by attribute.

    Raises:
        QuantizeError: an op has no bias of its own, or one of another size.
    """
    nodes = ops_of(prepared, names)
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
        bias = prepared.get_parameter(str(source.target)).detach()
        if bias.shape != (len(edit.numbers),):
            raise QuantizeError(f"{edit}: the bias has the shape {tuple(bias.shape)}")
        before.setdefault(str(source.target), bias)
        flow_runtime.add_to_biases(prepared, nodes, [(edit.ops[0], edit.values)])
    return before


def can_add_to_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> bool:
    """Whether each op of ``bias`` edits is in a graph, without a bias, or with one of its own that is not quantized."""
    nodes = ops_of(graph, names)
    found = [nodes.get(edit.ops[0]) for edit in edits]
    return all(node is not None and (lacks_bias(node) or _source(node) is not None) for node in found)


def _source(node: Node) -> Node | None:
    """The parameter that is an op's bias, if no other op reads it; an observer may be between."""
    found = node.args[BIAS] if len(node.args) > BIAS else None
    while isinstance(found, Node) and found.op == "call_module" and len(found.users) == 1:
        found = found.args[0]
    own = isinstance(found, Node) and found.op == "get_attr" and len(found.users) == 1
    return found if own and isinstance(found, Node) else None
