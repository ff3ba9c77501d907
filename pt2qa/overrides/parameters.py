"""What edits change in the parameters of a graph before the quantizer sees it: channels between ops.

``scale`` divides the channels between ops by factors, see :mod:`pt2qa.overrides.channels`, and ``shift`` moves those of
a norm, see :mod:`pt2qa.overrides.norms`.  The float model stays what it is but for the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import OpName, ops_of
from pt2qa._graph.internals.flow_runtime import BIAS, Change, change_parameters
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa.errors import QuantizeError
from pt2qa.overrides.channels import Chain, channels_in
from pt2qa.overrides.norms import ReadNorm, norms_in
from pt2qa.overrides.plan import BEFORE_CALIBRATION, Edit, in_base64


def edit_parameters(graph_module: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Makes the edits of channels, in place and in order, in a graph whose batch norms are folded."""
    change_parameters(graph_module, ops_of(graph_module, names), changes_of(edits, graph_module, names))


def with_folded_norms(graph_module: GraphModule) -> GraphModule:
    """A copy as quantizers get it, with batch norms folded."""
    copied = copy_to_edit(graph_module)
    fold_batch_norms(copied)
    return copied


def changes_of(edits: Iterable[Edit], graph_module: GraphModule, names: Mapping[int, OpName]) -> list[Change]:
    """What the edits of channels change, in order; the graph is not changed."""
    chosen = [edit for edit in edits if edit.kind in BEFORE_CALIBRATION]
    kinds = {edit.kind for edit in chosen}
    norms = {each.name: each for each in norms_in(graph_module, names)} if "shift" in kinds else {}
    chains = channels_in(graph_module, names).chains if kinds - {"shift"} else ()
    by_op = {chain.ops[0]: chain for chain in chains}
    nodes = ops_of(graph_module, names)
    return [
        change
        for edit in chosen
        for change in (
            _shifts(edit, norms.get(edit.ops[0]), nodes)
            if edit.kind == "shift"
            else _scales(edit, by_op.get(edit.ops[0]))
        )
    ]


def _shifts(edit: Edit, norm: ReadNorm | None, nodes: Mapping[str, Node]) -> Iterator[Change]:
    if norm is None or not norm.can_shift or {*norm.ops} != {*edit.ops}:
        raise QuantizeError(
            f"{edit}: these are not a norm and all that reads it, linears with weights, or are added to it, with "
            "biases of their own"
        )
    if norm.channels != len(edit.numbers):
        raise QuantizeError(f"{edit}: {norm.bias} has {norm.channels} channels")
    [bias] = [place for place, each in enumerate(nodes[norm.name].args) if getattr(each, "target", "") == norm.bias]
    yield "shift", norm.name, bias, 0, -1.0, edit.values
    for name in norm.linears:
        yield "shift", name, BIAS, 1, 1.0, edit.values
    for name in norm.added:
        yield "shift", name, BIAS, 0, 1.0, edit.values


def _scales(edit: Edit, chain: Chain | None) -> Iterator[Change]:
    if chain is None or {*chain.ops} != {*edit.ops}:
        raise QuantizeError(
            f"{edit}: these are not all ops that write and read the same channels, with weights of their own and only "
            "what is proportional to each channel between them"
        )
    if len(chain.labels) != len(edit.numbers):
        raise QuantizeError(f"{edit}: {chain.ops[0]} has {len(chain.labels)} channels to scale")
    factors = torch.ones(int(chain.labels[-1]) + 1).scatter_(0, chain.labels, torch.tensor(edit.numbers))
    for side in chain.sides:
        own = torch.where(torch.isin(side.labels, chain.labels), side.labels, 0)
        yield "scale", side.op, side.argument, side.axis, side.power, in_base64(factors[own].tolist())
