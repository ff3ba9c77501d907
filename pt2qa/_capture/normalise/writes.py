"""Makes writes to a part of a tensor functional.

After ``y[:, :2].mul_(0.1)``, a model still reads ``y``, which in the graph is a value from before the write.  This is
correct as long as both share memory.  In a quantized graph, ``y`` and the slice are two tensors with a quantize and a
dequantize between them: the write is lost, and the model silently computes nonsense.  This pass makes later readers use
``slice_scatter(y, mul(y[:, :2], 0.1))``.  In-place ops whose argument is read nowhere else do not change.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pt2qa._capture.aliases import in_place_argument, memory_of, storage_of
from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node, renew_outputs
from pt2qa._capture.normalise.out_of_place import Unsupported, Writer, traced_value
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree

_RULE: Final = "partial write"
_CHANGES_NO_VALUE = {
    *("as_strided", "detach", "rename", "requires_grad", "resize", "set", "squeeze", "swapaxes", "t", "transpose"),
    "unsqueeze",
}


def make_writes_functional(program: ExportedProgram) -> tuple[Change, ...]:
    """Makes every read of memory after an in-place write to it use the result of the write, in place.

    Writes to an input or a buffer stay, because they must be visible outside.
    """
    changes = []
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            argument = in_place_argument(node)
            if argument is None or op_of(node.target) in _CHANGES_NO_VALUE:
                continue
            readers = _stale_readers(node, argument, graph_module.graph)
            if not readers:
                continue
            name = names_by_node(program)[node]
            try:
                changes.append(Change(_RULE, name, _rewrite(graph_module.graph, node, argument, readers)))
            except Unsupported as error:
                left = "left as it is, so a quantizer that rounds this tensor changes what is computed"
                changes.append(Change(_RULE, name, f"{left}: {error}", left=str(error)))
        graph_module.recompile()
    renew_outputs(program)
    return tuple(changes)


def _stale_readers(node: Node, argument: Node, graph: Graph) -> list[tuple[Node, Node]]:
    """Readers after ``node`` that use an older name of the memory that it writes: pairs of that name and the reader."""
    storage = storage_of(argument)
    if storage is None:
        return []
    position = {other: i for i, other in enumerate(graph.nodes)}
    older = [other for other in graph.nodes if storage_of(other) == storage and position[other] < position[node]]
    return [
        (other, user)
        for other in older
        for user in other.users
        if position[user] > position[node] and not _overwrites(user, other)
    ]


def _overwrites(node: Node, value: Node) -> bool:
    """Whether an op only overwrites a value, which is how ``torch.export`` ends a write to a buffer."""
    return node.target is torch.ops.aten.copy_.default and node.args[0] is value and node.args[1] is not value


def _rewrite(graph: Graph, node: Node, argument: Node, readers: list[tuple[Node, Node]]) -> str:
    storage = storage_of(argument)
    writer = Writer(node, argument)
    try:
        with graph.inserting_before(node):
            writer.write()
            new = {old: writer.rebuilt(old) for old, _ in readers}
        for old, reader in readers:
            reader.replace_input_with(old, new[old])
        node.replace_all_uses_with(writer.rebuilt(argument))
        _renew_values(node, storage)
        graph.erase_node(node)
    finally:
        _drop_unread([*writer.made, *(old for old, _ in readers)])
    return (
        f"computed out of place, for {len(readers)} later read{'s' * (len(readers) > 1)} of the tensor that it changes"
    )


def _drop_unread(nodes: list[Node]) -> None:
    """Erases those nodes that nothing reads any more, and the nodes that only they read."""
    waiting, gone = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node not in gone and node.op == "call_function" and not node.users and not node.is_impure():
            waiting.extend(node.all_input_nodes)
            gone.add(node)
            node.graph.erase_node(node)


def _renew_values(written: Node, storage: int | None) -> None:
    """Traces the later views again: they are now views of the result, which owns its memory."""
    later = written.next
    while later.op != "root":
        looks = any(memory_of(leaf) == storage for leaf in pytree.tree_leaves(later.meta.get(VALUE)))
        if looks and later.op == "call_function":
            later.meta[VALUE] = traced_value(later)
        later = later.next
