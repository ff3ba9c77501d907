"""The edits of a calibrated graph, ``bias`` and ``round``: made so late, ranges and the reference stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, op_of, ops_of
from pt2qa._graph.internals import flow_runtime
from pt2qa._graph.internals.flow_runtime import BIAS
from pt2qa._graph.internals.torchao import is_observer
from pt2qa._simulator.quant_ops import is_quantization
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit

_TAKE_A_BIAS: Final = frozenset(("conv1d", "conv2d", "conv3d", "linear"))
"""With as many channels as the first axis of the weight has."""


def give_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Gives the ops of ``bias`` edits that have no bias one of zeros, in place; their outputs stay as they are."""
    nodes = ops_of(graph, names)
    for name in dict.fromkeys(edit.ops[0] for edit in edits if edit.kind == "bias"):
        if name in nodes and _lacks_bias(nodes[name]):
            flow_runtime.give_bias(graph, name, nodes[name])


def make_late_edits(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``bias`` and ``round`` edits in place; returns the parameters that were there, by attribute."""
    nodes = ops_of(graph, names)
    before: dict[str, Tensor] = {}
    for edit in edits:
        if edit.kind not in ("bias", "round"):
            continue
        node = nodes.get(edit.ops[0])
        if node is None:
            raise QuantizeError(f"{edit}: the graph that is quantized has no such op")
        is_bias = edit.kind == "bias"
        target = _bias_of(node) if is_bias else _weight_of(graph, node)
        if target is None:
            raise QuantizeError(f"{edit}: it has no {'bias' if is_bias else 'int8 weight'} of its own")
        parameter = graph.get_parameter(target).detach()
        if parameter.numel() != len(edit.numbers):
            raise QuantizeError(f"{edit}: the {'bias' if is_bias else 'weight'} has the shape {tuple(parameter.shape)}")
        before.setdefault(target, parameter)
        make = flow_runtime.add_to_biases if is_bias else flow_runtime.set_integers
        make(graph, nodes, [(edit.ops[0], edit.values)])
    return before


def can_add_to_biases(graph: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> bool:
    """Whether each op of ``bias`` edits is in a graph, without a bias, or with one of its own that is not quantized."""
    nodes = ops_of(graph, names)
    found = [nodes.get(edit.ops[0]) for edit in edits]
    return all(node is not None and (_lacks_bias(node) or _bias_of(node) is not None) for node in found)


def _lacks_bias(node: Node) -> bool:
    """Whether an op with a weight of its own takes a bias and has none."""
    if op_of(node.target) not in _TAKE_A_BIAS or (len(node.args) > BIAS and node.args[BIAS] is not None):
        return False
    source = node.args[1]
    while isinstance(source, Node) and (source.op == "call_module" or is_quantization(source)):
        source = source.args[0]
    return isinstance(source, Node) and source.op == "get_attr"


def _bias_of(node: Node) -> str | None:
    """The parameter that is an op's bias, if no other op reads it; an observer may be between."""
    found = node.args[BIAS] if len(node.args) > BIAS else None
    while isinstance(found, Node) and found.op == "call_module" and len(found.users) == 1:
        found = found.args[0]
    own = isinstance(found, Node) and found.op == "get_attr" and len(found.users) == 1
    return str(found.target) if own and isinstance(found, Node) else None


def _weight_of(prepared: GraphModule, node: Node) -> str | None:
    """The parameter that is an op's weight, observed as int8, if no other op reads it."""
    read = node.args[1] if len(node.args) > 1 else None
    if not isinstance(read, Node) or read.op != "call_module" or len(read.users) != 1:
        return None
    source, observer = read.args[0], prepared.get_submodule(str(read.target))
    assert isinstance(source, Node), "an observer observes a value"
    own = source.op == "get_attr" and len(source.users) == 1 and is_observer(observer)
    known = getattr(observer, "dtype", None) is torch.int8 and getattr(observer, "ch_axis", 0) in (0, -1)
    return str(source.target) if own and known else None
