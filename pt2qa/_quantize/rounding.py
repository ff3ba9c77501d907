"""Weights that a plan gives as integers: after calibration, so that scales and the reference stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, ops_of
from pt2qa._graph.internals import flow_runtime
from pt2qa._graph.internals.torchao import is_observer
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit


def set_integers(prepared: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``round`` edits in a prepared graph, in place; returns the weights that were there, by attribute.

    Raises:
        QuantizeError: an op has no int8 weight of its own, or one of another size.
    """
    nodes = ops_of(prepared, names)
    before: dict[str, Tensor] = {}
    for edit in edits:
        if edit.kind != "round":
            continue
        target = _weight_of(prepared, nodes[edit.ops[0]]) if edit.ops[0] in nodes else None
        if target is None:
            raise QuantizeError(f"{edit}: the graph that is quantized has no such op with an int8 weight of its own")
        weight = prepared.get_parameter(target).detach()
        if weight.numel() != len(edit.numbers):
            raise QuantizeError(f"{edit}: the weight has the shape {tuple(weight.shape)}")
        before.setdefault(target, weight)
        flow_runtime.set_integers(prepared, nodes, [(edit.ops[0], edit.values)])
    return before


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
