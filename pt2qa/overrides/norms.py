"""Which channels of a norm can be moved, by what the biases around it take back.

With z a shift for each channel::

    norm(x) - z,   bias + weight @ z,   added + z

where weight and bias are those of the linears that read the norm, and added is the bias of a linear whose output is
added to that of the norm, as by the residual of a post-norm transformer.  Labels are those of
:mod:`pt2qa.overrides.channels`, of what z times the degree of a value is subtracted from: label 0 stands for no shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName
from pt2qa._graph.internals.flow_runtime import BIAS
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import sizes_of
from pt2qa.overrides.channels import MOVES, Channels, Labelled, Walk, along, is_floating, labelled, unlabelled


def norms_in(graph_module: GraphModule, names: Mapping[int, OpName]) -> Channels:
    """The chains of a graph that shifts can move, each of a norm and the linears around it, the norm first.

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
