"""Weights that a plan gives as integers: after calibration, so that scales and the reference stay as they are."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import set_parameters
from pt2qa._graph.handles import OpName, name_of
from pt2qa._graph.internals.torchao import is_observer, qparams_of
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit


def set_integers(prepared: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> dict[str, Tensor]:
    """Makes the ``round`` edits in a prepared graph, in place; returns the weights that were there, by attribute.

    Raises:
        QuantizeError: an op has no int8 weight of its own, or one of another size.
    """
    nodes = {name_of(node, names): node for node in prepared.graph.nodes if node.op == "call_function"}
    before: dict[str, Tensor] = {}
    for edit in edits:
        if edit.kind != "round":
            continue
        node = nodes.get(edit.ops[0])
        found = None if node is None else _weight_of(prepared, node)
        if found is None:
            raise QuantizeError(f"{edit}: the graph that is quantized has no such op with an int8 weight of its own")
        target, observer = found
        weight = prepared.get_parameter(target).detach()
        integers = torch.frombuffer(bytearray(base64.b64decode(edit.values)), dtype=torch.int8).to(weight.device)
        if weight.numel() != len(integers):
            raise QuantizeError(f"{edit}: the weight has the shape {tuple(weight.shape)}")
        scale, zero_point = qparams_of(observer)
        before.setdefault(target, weight)
        value = in_float(integers.reshape(weight.shape), scale.to(weight.device), zero_point.to(weight.device))
        set_parameters(prepared, {target: value.to(weight.dtype)})
    return before


def in_float(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The values of integers with one scale, or one for each output channel."""
    shape = (-1, *[1] * (integers.dim() - 1))
    return (integers - zero_point.reshape(shape)).float() * scale.reshape(shape)


def _weight_of(prepared: GraphModule, node: Node) -> tuple[str, Any] | None:
    """The parameter that is an op's weight, if no other op reads it, and its observer."""
    read = node.args[1] if len(node.args) > 1 else None
    if not isinstance(read, Node) or read.op != "call_module" or len(read.users) != 1:
        return None
    source, observer = cast(Node, read.args[0]), prepared.get_submodule(str(read.target))
    own = source.op == "get_attr" and len(source.users) == 1 and is_observer(observer)
    known = getattr(observer, "dtype", None) is torch.int8 and getattr(observer, "ch_axis", 0) in (0, -1)
    return (str(source.target), observer) if own and known else None


SOURCE = '''
def set_integers(prepared):
    """Gives weights the integers that were chosen for them, after calibration."""
    ops = ops_by_name(prepared.graph)
    for name, values in INTEGERS.items():
        read = ops[name].args[1]
        scale, zero_point = prepared.get_submodule(read.target).calculate_qparams()
        module, _, attribute = read.args[0].target.rpartition(".")
        weight = prepared.get_parameter(read.args[0].target).detach()
        integers = torch.frombuffer(bytearray(base64.b64decode(values)), dtype=torch.int8).reshape(weight.shape)
        integers, scale, zero_point = (each.to(weight.device) for each in (integers, scale, zero_point))
        shape = (-1, *[1] * (weight.dim() - 1))
        value = (integers - zero_point.reshape(shape)).float() * scale.reshape(shape)
        parameter = torch.nn.Parameter(value.to(weight.dtype), requires_grad=False)
        setattr(prepared.get_submodule(module), attribute, parameter)
'''
"""What :func:`set_integers` does, for an export flow without pt2qa."""


def source_of(edits: Iterable[Edit]) -> str:
    """The function of :data:`SOURCE`, and the values of the ``round`` edits as text; empty if there are none."""
    lines = "".join(f"    {edit.ops[0]!r}: {edit.values!r},\n" for edit in edits if edit.kind == "round")
    return f"INTEGERS = {{\n{lines}}}\n{SOURCE}" if lines else ""
