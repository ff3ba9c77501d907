"""The norms whose channels can be moved, by what the biases around them take back.

With z a shift for each channel::

    norm(x) - z,   bias + weight @ z,   added + z

where weight and bias are those of the linears that read the norm, and added is the bias of a linear whose output is
added to that of the norm, as by the residual of a post-norm transformer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, attribute_of, name_of, op_of
from pt2qa._graph.internals.nodes import VALUE

_ATEN = torch.ops.aten
_BIASED = (_ATEN.layer_norm.default, _ATEN.add.Tensor)
"""Ops that add their last parameter to each channel; a norm written out may end with an addition."""

_RESHAPES = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "dropout")
_BY_AXES = {"transpose": (1, 2), "select": (1,), "slice": (1,)}
KEEPS_CHANNELS = frozenset((*_RESHAPES, *_BY_AXES, "permute"))
"""Ops that can leave the channels, the last axis, where they are."""


@dataclass(frozen=True, slots=True)
class ReadNorm:
    """A norm and all that reads it, through ops that leave the channels where they are.

    Parameters are given by attribute; "" stands for one that is missing, or that another op reads, too.

    Attributes:
        name: the norm.
        channels: how many it has.
        bias: the parameter that is added to each channel.
        linears: the linears that read it, with weight and bias.
        added: the linears whose outputs are added to its own, with their bias.
    """

    name: str
    channels: int
    bias: str
    linears: Mapping[str, tuple[str, str]]
    added: Mapping[str, str]

    @property
    def ops(self) -> tuple[str, ...]:
        """The names that an edit has."""
        return (self.name, *self.linears, *self.added)

    @property
    def can_shift(self) -> bool:
        """Whether a shift can move: it has a bias, and all around it weights and biases of their own."""
        return all([self.bias, *(each for pair in self.linears.values() for each in pair), *self.added.values()])


def norms_in(graph_module: GraphModule, names: Mapping[int, OpName]) -> Iterator[ReadNorm]:
    """The norms of a graph that linears read, and nothing else but additions of another linear's output."""
    counts = Counter(str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr" for _ in node.users)

    def own(node: object, channels: int) -> str:
        if not isinstance(node, Node) or node.op != "get_attr" or counts[str(node.target)] != 1:
            return ""
        value = attribute_of(graph_module, node)
        return str(node.target) if isinstance(value, nn.Parameter) and value.shape[-1:] == (channels,) else ""

    for node in graph_module.graph.nodes:
        value = node.meta.get(VALUE)
        read = [source for source in node.all_input_nodes if source.op == "get_attr"]
        if node.target not in _BIASED or not read or not isinstance(value, Tensor) or not value.dim():
            continue
        linears, added = _around(node) or ([], [])
        known = {name_of(each, names) for each in (node, *linears, *added)}
        if not linears or None in known or len(known) != 1 + len(linears) + len(added):
            continue
        width = int(value.shape[-1])
        yield ReadNorm(
            str(name_of(node, names)),
            width,
            own(read[-1], width) if _adds(node, attribute_of(graph_module, read[-1])) else "",
            {
                str(name_of(each, names)): (own(each.args[1], width), own(_bias(each), each.meta[VALUE].shape[-1]))
                for each in linears
            },
            {str(name_of(each, names)): own(_bias(each), width) for each in added},
        )


def _adds(node: Node, last: Tensor) -> bool:
    """Whether an op adds its last parameter, one number for each channel."""
    if node.target is _ATEN.layer_norm.default:
        return len(node.args) > 3 and node.args[3] is not None and last.dim() == 1
    return node.target in _BIASED and not node.kwargs and last.dim() == 1


def _bias(linear: Node) -> object:
    return linear.args[2] if len(linear.args) > 2 else None


def _around(node: Node) -> tuple[list[Node], list[Node]] | None:
    """The linears that read a value, and those whose outputs are added to it; None if anything else reads it."""
    linears, added = [], []
    for reader in node.users:
        op = op_of(reader.target) if reader.op == "call_function" else ""
        if op == "linear" and reader.args[0] is node and node not in reader.args[1:]:
            linears.append(reader)
        elif reader.target is _ATEN.add.Tensor and not reader.kwargs:
            other = _linear_before([each for each in reader.args if each is not node], node)
            if other is None:
                return None
            added.append(other)
        elif _keeps_channels(reader, op, node):
            behind = _around(reader)
            if behind is None:
                return None
            linears += behind[0]
            added += behind[1]
        else:
            return None
    return linears, added


def _linear_before(others: list[object], node: Node) -> Node | None:
    """The linear that makes the one other operand of an addition, of the shape of ``node``, and of that alone."""
    source = others[0] if len(others) == 1 else None
    shape = node.meta[VALUE].shape
    while isinstance(source, Node) and source.op == "call_function" and len(source.users) == 1:
        value, op = source.meta.get(VALUE), op_of(source.target)
        if not isinstance(value, Tensor) or value.shape[-1:] != shape[-1:]:
            return None
        if op == "linear":
            return source if value.numel() == node.meta[VALUE].numel() else None
        before = source.args[0]
        if not isinstance(before, Node) or not _keeps_channels(source, op, before):
            return None
        source = before
    return None


def _keeps_channels(reader: Node, op: str, node: Node) -> bool:
    """Whether the last axis of an op's output is that of its input."""
    before, after = (each.meta.get(VALUE) for each in (node, reader))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not after.dim():
        return False
    last = before.dim() - 1
    if op in _BY_AXES:
        axes = [reader.args[place] if len(reader.args) > place else 0 for place in _BY_AXES[op]]
        return all(isinstance(axis, int) and axis % before.dim() != last for axis in axes)
    if op == "permute":
        *_, axis = cast(list[int], reader.args[1])
        return axis % before.dim() == last
    return op in _RESHAPES and after.shape[-1] == before.shape[-1]
