"""What edits change in the parameters of a graph before the quantizer sees it: channels between ops.

``scale`` divides the channels between ops by factors, see :mod:`pt2qa.overrides.channels`, and ``shift`` moves those of
a norm by what the biases around it take back.  The float model stays what it is but for the rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, copy_to_edit, ops_of
from pt2qa._graph.internals.flow_runtime import BIAS, Change, change_parameters
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import sizes_of
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa.errors import QuantizeError
from pt2qa.overrides.channels import (
    MOVES,
    Chain,
    Channels,
    Labelled,
    Walk,
    along,
    channels_in,
    is_floating,
    labelled,
    unlabelled,
)
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


def norms_in(graph_module: GraphModule, names: Mapping[int, OpName]) -> Channels:
    """The chains of a graph that shifts can move, each of a norm and the linears around it, the norm first.

    With z a shift for each channel::

        norm(x) - z,   bias + weight @ z,   added + z

    where weight and bias are those of the linears that read the norm, and added is the bias of a linear whose output is
    added to that of the norm, as by the residual of a post-norm transformer.  Labels are those of
    :mod:`pt2qa.overrides.channels`, of what z times the degree of a value is subtracted from: 0 stands for no shift.

    A side adds shifts times ``power`` to a bias; along axis 1, what the op's weight makes of them.
    """
    found = labelled(_Shifts(graph_module, names))
    chains = (replace(each, sides=tuple(sorted(each.sides, key=lambda side: side.power))) for each in found.chains)
    return replace(found, chains=tuple(chains))


class _Shifts(Walk):
    def _of_op(self, node: Node, op: str) -> Any:
        """The labels of an op's output; None if it does not only move its input's channels."""
        first = self._read(node.args[0]) if node.args else None
        if op in MOVES:
            return self._moved(node)
        if not isinstance(first, Labelled) or not is_floating(node):
            return None
        if op == "layer_norm":
            return self._norm(node, (3,), first)
        if op == "linear":
            return self._linear(node, first)
        if op == "add" and not node.kwargs:
            return self._sum(node)
        return first if op in ("dropout", "clone", "contiguous") else None

    def _linear(self, node: Node, value: Labelled) -> Labelled | None:
        bias = self._own((*node.args, None)[BIAS])
        if bias is None:
            return None
        if self._own(node.args[1]) is None or value.degree < 0:
            self._pin([value, self._read(node.args[1])])
        self._side(node, BIAS, 1, value.degree, self._channels(value.labels, -1))
        outputs = self.fresh(len(bias))
        self._side(node, BIAS, 0, 1.0, outputs)
        return Labelled(along(outputs, -1, sizes_of(node.meta[VALUE])), -1.0)

    def _sum(self, node: Node) -> Labelled | None:
        """Of a norm and a linear, whose shifts cancel; or of a value and a parameter, as a norm written out ends."""
        shape = sizes_of(node.meta[VALUE])
        for place in (0, 1):
            own = self._own(node.args[place])
            if own is not None and list(own.shape) == shape[-1:]:
                self._pin(self._read(node.args[1 - place]))
                labels = self.fresh(len(own))
                self._side(node, place, 0, -1.0, labels)
                return Labelled(labels.expand(shape))
        one, other = (self._read(each) for each in node.args[:2])
        if not isinstance(one, Labelled) or not isinstance(other, Labelled) or one.degree == other.degree:
            return None
        self.join(one.labels.expand(shape), other.labels.expand(shape))
        return unlabelled(node.meta[VALUE])
