"""What a plan adds to biases: after calibration, so that ranges and the reference stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import set_parameters
from pt2qa._graph.handles import OpName, name_of
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Edit
from pt2qa.overrides.plan import in_base64

BIAS = 2
"""The number of the argument that is the bias, of convolutions and linears."""


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
    """Whether each op of ``bias`` edits is in a graph, with a bias of its own that is not quantized."""
    nodes = _ops(graph, names)
    return all(edit.ops[0] in nodes and _source(nodes[edit.ops[0]]) is not None for edit in edits)


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
        source = ops[name].args[2]
        while source.op == "call_module":
            source = source.args[0]
        module, _, attribute = source.target.rpartition(".")
        bias = prepared.get_parameter(source.target).detach()
        added = torch.tensor([each for (each,) in struct.iter_unpack("<f", base64.b64decode(values))])
        parameter = torch.nn.Parameter((bias.float() + added).to(bias.dtype), requires_grad=False)
        setattr(prepared.get_submodule(module), attribute, parameter)
'''
"""What :func:`add_to_biases` does, for an export flow without pt2qa."""


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
