"""Which ops of two graphs of one model are the same, where they do not say so by handle."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable

from torch.fx import GraphModule, Node

from pt2qa._graph.handles import (
    OUTPUTS,
    assign_handles,
    copy_nodes,
    custom_of,
    handle_of,
    input_handles,
    is_quantization,
    op_of,
    remove_handles,
    stems_of,
    walk,
)
from pt2qa._graph.internals.nodes import CUSTOM, HANDLE, first_ancestor
from pt2qa._grouping import grouped


def has_handles(graph_module: GraphModule) -> bool:
    return any(handle_of(placed.node) is not None for placed in walk(graph_module))


def with_common_handles(known: GraphModule, other: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Two graphs of one model with the same handles: themselves where they have them, or copies.

    Copies share parameters and buffers.  If one graph has no handles, the first one's are taken, or assigned, and given
    to the ops of the other one that are the same.
    """
    handled = has_handles(known)
    if handled and has_handles(other):
        completed = copy_nodes(other)
        return known, completed if complete_handles(known, completed) else other
    other = copy_nodes(other)
    if not handled:
        known = copy_nodes(known)
        assign_handles(known)
        remove_handles(other)
    give_handles(known, other)
    return known, other


def give_handles(known: GraphModule, graph: GraphModule) -> None:
    """Gives the ops of a graph that has none the handles of the same ops in another one, in place.

    Ops are the same if they go back to one node of one graph, which torch notes.  Where no two ops of the graphs do,
    as after ``copy.deepcopy`` of the program or a second export, they are the same by module path, kind of op and
    ordinal, if both graphs have as many of that kind in that module.  What is left is for :func:`complete_handles`.
    """
    there = _ops(known, lambda node: handle_of(node) is not None)
    here = _ops(graph, lambda node: handle_of(node) is None)
    origins, made = _grouped(there, first_ancestor), _grouped(here, first_ancestor)
    shared = (origins.keys() & made.keys()) - {None}
    for origin in shared:
        if len(origins[origin]) == 1:
            # The quantizer may have decomposed it: all its parts have its handle, as they would have copied it.
            _adopt(made[origin], origins[origin] * len(made[origin]))
        else:
            _match(origins[origin], made[origin], lambda node: op_of(node.target))
    if shared:
        # The ops of nested graphs alone have no note; what goes back to no op of the other graph is new.
        there, here = origins.get(None, []), made.get(None, [])
    stems = {**stems_of(known), **stems_of(graph)}
    _match(filter(_is_alive, there), filter(_is_alive, here), stems.__getitem__)
    complete_handles(known, graph)


def complete_handles(known: GraphModule, graph: GraphModule) -> int:
    """Gives handles to the ops of a graph that were put in place of others, in place; how many.

    Those that torchao's switch to training replaces, such as dropouts, have no metadata.  An op without a handle is
    the one of the same kind that reads the same values in the other graph, if this graph lacks that one's handle.
    """
    present = {handle_of(node) for node in graph.graph.nodes}
    there, here = _Values(known), _Values(graph)
    missing = _ops(known, lambda node: handle_of(node) is not None and handle_of(node) not in present, nested=False)
    candidates = _grouped(missing, there.read_by)
    nameless = _ops(graph, lambda node: handle_of(node) is None and not is_quantization(node), nested=False)
    count = 0
    for node in nameless if candidates else ():
        found = candidates.get(here.read_by(node), [])
        if found and here.read_by(node) is not None:
            readers = here.readers(node)
            best = max(found, key=lambda other: len(readers & there.readers(other)))
            found.remove(best)
            _adopt([node], [best])
            count += 1
    return count


class _Values:
    """The values of a graph by handle; observers and quantization pass on what they read."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._inputs = input_handles(graph_module)

    def read_by(self, node: Node) -> tuple[Hashable, ...] | None:
        """The kind of an op and the handles of the values that it reads, without constants; None if one has none."""
        sources = [source for source in map(self._source, node.all_input_nodes) if source.op != "get_attr"]
        handles = [self._inputs.get(source, handle_of(source)) for source in sources]
        return (op_of(node.target), *handles) if handles and None not in handles else None

    def readers(self, node: Node) -> set[int | None]:
        found = set[int | None]()
        for user in node.users:
            found |= self.readers(user) if self._passes_on(user) else {handle_of(user)}
        return found - {None}

    def _source(self, node: Node) -> Node:
        while self._passes_on(node) and isinstance(node.args[0], Node):
            node = node.args[0]
        return node

    def _passes_on(self, node: Node) -> bool:
        return node.op == "call_module" or (handle_of(node) is None and is_quantization(node))


def _ops(graph_module: GraphModule, chosen: Callable[[Node], bool], *, nested: bool = True) -> list[Node]:
    """The chosen ops; outputs of an op with several follow from its own handle."""
    return [
        placed.node
        for placed in walk(graph_module)
        if placed.node.op == "call_function"
        and placed.node.target is not operator.getitem
        and (nested or placed.owner is None)
        and chosen(placed.node)
    ]


def _grouped(nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> dict[Hashable, list[Node]]:
    return grouped((key(node), node) for node in nodes)


def _match(known: Iterable[Node], nodes: Iterable[Node], key: Callable[[Node], Hashable]) -> None:
    """Gives nodes the handles of those with the same key, in graph order, where there are as many of them."""
    there, here = _grouped(known, key), _grouped(nodes, key)
    for each in there.keys() & here.keys():
        if len(there[each]) == len(here[each]):
            _adopt(here[each], there[each])


def _adopt(nodes: Collection[Node], known: Collection[Node]) -> None:
    for node, other in zip(nodes, known, strict=True):
        given = {key: value for key, value in custom_of(other).items() if key in (HANDLE, OUTPUTS)}
        node.meta = {**node.meta, CUSTOM: {**custom_of(node), **given}}


def _is_alive(node: Node) -> bool:
    """Whether anything reads an op, or it writes to what others read; graphs are rid of the others here and there."""
    return bool(node.users) or node.is_impure()
