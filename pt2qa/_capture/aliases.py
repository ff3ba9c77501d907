"""Which values of a graph may share memory, and which ops write to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import nested_graphs, walk
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import (
    HigherOrderOperator,
    OpOverload,
    arguments_of,
    is_mutable,
    pytree,
    results_of,
    storage_number,
)

_RETURNS_ITS_INPUT = {
    *("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
    *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "chain_matmul", "einsum", "meshgrid"),
}
"""aten ops that may return their input, although their schema does not say so."""


class Aliases:
    """Groups of values that may share memory, and when each is written, before later edits of the graph.

    If a group is too large, a pass merely leaves an op alone; so when in doubt, groups are merged.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._parent: dict[Node, Node] = {}
        self._position = {node: i for i, node in enumerate(graph_module.graph.nodes)}
        self._writes: list[tuple[int, Node]] = []
        for node in graph_module.graph.nodes:
            for shared in _shares_memory_with(node):
                self._parent[self._find(node)] = self._find(shared)
            self._writes.extend((self._position[node], written) for written in written_by(node, graph_module))

    def group(self, node: Node) -> list[Node]:
        """Every node whose value may share memory with that of ``node``, itself included."""
        root = self._find(node)
        return [other for other in self._position if self._find(other) is root]

    def written_after(self, node: Node, value: Node) -> bool:
        root = self._find(value)
        return any(
            position > self._position[node] and self._find(written) is root for position, written in self._writes
        )

    def written(self, values: Iterable[Node]) -> list[Node]:
        roots = {self._find(written) for _, written in self._writes}
        return [value for value in values if self._find(value) in roots]

    def read_after(self, node: Node, value: Node) -> bool:
        """Whether an op after ``node``, or the caller, reads the memory of ``value``."""
        return any(self._position[user] > self._position[node] for member in self.group(value) for user in member.users)

    def _find(self, node: Node) -> Node:
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node


def written_by(node: Node, graph_module: GraphModule) -> list[Node]:
    if isinstance(node.target, OpOverload):
        return _arguments(node, write=True)
    if any(
        isinstance(inner.node.target, OpOverload) and is_mutable(inner.node.target)
        for _, body in nested_graphs(node, graph_module)
        for inner in walk(body)
    ):
        return list(node.all_input_nodes)
    return []


def in_place_argument(node: Node) -> Node | None:
    """The argument that an in-place op writes and returns: ``x`` of ``relu_(x)``; None for other ops."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    returns = results_of(node.target)
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    written = _arguments(node, write=True)
    return written[0] if len(written) == 1 else None


def storage_of(node: Node) -> int | None:
    """The memory that a node's value had when the model was traced; None if it is not a plain tensor."""
    return memory_of(node.meta.get(VALUE))


def memory_of(value: object) -> int | None:
    """A number for the memory of a tensor, the same for its views; None for anything else."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return storage_number(value)


def _shares_memory_with(node: Node) -> list[Node]:
    if node.op not in ("call_function", "call_module"):
        return []
    if node.op == "call_module" or node.target is operator.getitem or isinstance(node.target, HigherOrderOperator):
        # An observer and getitem return what they are given; of a nested graph nothing is known.
        return list(node.all_input_nodes)
    if not isinstance(node.target, OpOverload):
        return []
    if node.target.overloadpacket.__name__ in _RETURNS_ITS_INPUT:
        return list(node.all_input_nodes)
    storage = storage_of(node)
    traced = [other for other in node.all_input_nodes if storage is not None and storage_of(other) == storage]
    return _arguments(node, write=False) + traced


def _arguments(node: Node, *, write: bool) -> list[Node]:
    """The nodes at those arguments of an op that its schema marks as written, or as aliased at all."""
    found: list[Node] = []
    for i, argument in enumerate(arguments_of(node.target)):
        alias = argument.alias_info
        if alias is None or (write and not alias.is_write):
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        found.extend(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node))
    return found
