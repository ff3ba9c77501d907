"""What edits change in the parameters of a graph before the quantizer sees it: channels between ops.

``scale`` divides the channels between ops by factors, see :mod:`pt2qa.overrides.channels`, and ``shift`` moves those of
a norm, see :mod:`pt2qa.overrides.norms`.  The float model stays what it is but for the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.fx import GraphModule

from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import OpName, ops_of
from pt2qa._graph.internals.flow_runtime import Change, change_parameters
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa.errors import QuantizeError
from pt2qa.overrides.channels import Chain, Channels, channels_in
from pt2qa.overrides.norms import norms_in
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
    known = {
        finds: {chain.ops[0]: chain for chain in finds(graph_module, names).chains}
        for finds in {_finds(edit) for edit in chosen}
    }
    return [change for edit in chosen for change in _changes(edit, known[_finds(edit)].get(edit.ops[0]))]


def _finds(edit: Edit) -> Callable[[GraphModule, Mapping[int, OpName]], Channels]:
    return norms_in if edit.kind == "shift" else channels_in


def _changes(edit: Edit, chain: Chain | None) -> Iterator[Change]:
    kind, none, expected = ("shift", 0.0, _SHIFTED) if edit.kind == "shift" else ("scale", 1.0, _SCALED)
    if chain is None or {*chain.ops} != {*edit.ops}:
        raise QuantizeError(f"{edit}: these are not {expected}")
    if len(chain.labels) != len(edit.numbers):
        raise QuantizeError(f"{edit}: {chain.ops[0]} has {len(chain.labels)} channels to {kind}")
    table = torch.full((int(chain.labels[-1]) + 1,), none).scatter_(0, chain.labels, torch.tensor(edit.numbers))
    for side in chain.sides:
        own = torch.where(torch.isin(side.labels, chain.labels), side.labels, 0)
        yield kind, side.op, side.argument, side.axis, side.power, in_base64(table[own].tolist())


_SHIFTED = "a norm and all that reads it, linears with weights, or are added to it, with biases of their own"
_SCALED = (
    "all ops that write and read the same channels, with weights of their own and only what is proportional to each "
    "channel between them"
)
