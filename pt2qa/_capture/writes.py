"""Makes writes to a part of a tensor functional.

After ``y[:, :2].mul_(0.1)``, a model still reads ``y``, which in the graph is a value from before the write.  This is
correct as long as both share memory.  In a quantized graph, ``y`` and the slice are two tensors with a quantize and a
dequantize between them: the write is lost, and the model silently computes nonsense.  This pass makes later readers use
``slice_scatter(y, mul(y[:, :2], 0.1))``.  In-place ops whose argument is read nowhere else do not change.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pt2qa._capture.aliases import in_place_argument, memory_of, storage_of
from pt2qa._capture.changes import Change, graph_modules, names_by_node, renew_outputs
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.flow_passes import alike
from pt2qa._graph.internals.nodes import VALUE, origin_of
from pt2qa._graph.internals.torch import OpOverload, detect_fake_mode, pytree, same_overload

_ATEN = torch.ops.aten
_CHANGES_NO_VALUE = {
    *("as_strided", "detach", "rename", "requires_grad", "resize", "set", "squeeze", "swapaxes", "t", "transpose"),
    "unsqueeze",
}
_SAME_ORDER = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "alias", "contiguous", "to"}
"""Views that have all elements of their base, in the same order."""


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
                changes.append(Change("partial write", name, _rewrite(graph_module.graph, node, argument, readers)))
            except _Unsupported as error:
                left = "left as it is, so a quantizer that rounds this tensor changes what is computed"
                changes.append(Change("partial write", name, f"{left}: {error}", left=str(error)))
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
    return node.target is _ATEN.copy_.default and node.args[0] is value and node.args[1] is not value


def _rewrite(graph: Graph, node: Node, argument: Node, readers: list[tuple[Node, Node]]) -> str:
    storage = storage_of(argument)
    writer = _Writer(node, argument)
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
            later.meta[VALUE] = _traced_value(later)
        later = later.next


class _Unsupported(Exception):
    """This write cannot be made functional; the text is the reason."""


class _Writer:
    """Creates the functional form of an in-place op, at the graph's insertion point; ``made`` has every new node."""

    def __init__(self, node: Node, argument: Node) -> None:
        self.made: list[Node] = []
        self._node = node
        self._argument = argument
        self._rebuilt: dict[Node, Node] = {}

    def write(self) -> None:
        """Creates the result, and from it every larger tensor that its argument was a view of."""
        chain = [self._argument]
        while (parent := _looked_at(chain[-1])) is not None:
            chain.append(parent)
        if chain[-1].op != "call_function":
            raise _Unsupported("it writes to an input, a parameter or a buffer")
        part = self._rebuilt[self._argument] = self._functional(self._argument)
        for view, parent in itertools.pairwise(chain):
            part = self._rebuilt[parent] = self._put_back(view, parent, part)

    def rebuilt(self, old: Node) -> Node:
        """The same view of the written memory, after the write."""
        if old not in self._rebuilt:
            parent = _looked_at(old)
            if parent is None:
                raise _Unsupported(f"{old.target} shares its memory in a way that is not known")
            new = self.rebuilt(parent)
            if in_place_argument(old) is None:
                if old.target is operator.getitem:
                    producer = old.args[0]
                    assert isinstance(producer, Node)
                    new = self._emit(producer.target, new, *producer.args[1:], **producer.kwargs)
                new = self._emit(old.target, new, *old.args[1:], **old.kwargs)
            self._rebuilt[old] = new
        return self._rebuilt[old]

    def _functional(self, argument: Node) -> Node:
        target, wanted = self._node.target, argument.meta[VALUE]
        assert isinstance(target, OpOverload)
        if target is _ATEN.copy_.default:
            source = self._node.args[1]
            assert isinstance(source, Node)
            given = source.meta[VALUE]
            if given.dtype != wanted.dtype:
                source = self._emit(_ATEN.to.dtype, source, wanted.dtype)
            # Without a copy, the next write would change the source itself.
            return self._emit(_ATEN.clone.default, self._emit(_ATEN.expand.default, source, _fixed_shape(wanted)))
        function = same_overload(target, op_of(target))
        if function is None:
            raise _Unsupported(f"{target} has no form that is not in place")
        made = self._emit(function, *self._node.args, **self._node.kwargs)
        if not alike(made.meta[VALUE], wanted):
            raise _Unsupported(f"{function} gives another shape or dtype")
        return made

    def _put_back(self, view: Node, parent: Node, part: Node) -> Node:
        """The value of ``parent`` after its ``view`` was replaced by ``part``."""
        arguments = view.args[1:]
        if in_place_argument(view) is not None:
            return part
        if view.target is _ATEN.slice.Tensor:
            return self._emit(_ATEN.slice_scatter.default, parent, part, *arguments)
        if view.target is _ATEN.select.int:
            return self._emit(_ATEN.select_scatter.default, parent, part, *arguments)
        if view.target is _ATEN.narrow.default:
            axis, start, length = arguments
            return self._emit(_ATEN.slice_scatter.default, parent, part, axis, start, start + length)  # type: ignore[operator]
        if view.target is _ATEN.transpose.int:
            return self._emit(_ATEN.transpose.int, part, *arguments)
        if view.target is _ATEN.permute.default:
            order = [axis % len(arguments[0]) for axis in arguments[0]]  # type: ignore[arg-type, operator, union-attr]
            return self._emit(_ATEN.permute.default, part, [order.index(axis) for axis in range(len(order))])
        if op_of(view.target) in _SAME_ORDER:
            return self._emit(_ATEN.reshape.default, part, _fixed_shape(parent.meta[VALUE]))
        raise _Unsupported(f"it writes through {view.target}")

    def _emit(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        assert callable(target)
        made = self._node.graph.call_function(target, args, kwargs)
        self.made.append(made)
        made.meta = origin_of(self._node) | {VALUE: _traced_value(made)}
        return made


def _traced_value(node: Node) -> Any:
    """What an op returns for the traced values of its arguments."""
    args, kwargs = pytree.tree_map_only(Node, lambda argument: argument.meta[VALUE], (node.args, node.kwargs))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    assert mode is not None
    assert callable(node.target)
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)


def _looked_at(node: Node) -> Node | None:
    """The base of a view, or the argument of an in-place op; None for a node that owns its memory."""
    parent = node.args[0] if node.op == "call_function" and node.args else None
    if node.target is operator.getitem and isinstance(parent, Node):
        parent = parent.args[0] if parent.args else None
    if not isinstance(parent, Node) or storage_of(parent) is None or storage_of(parent) != storage_of(node):
        return None
    return parent


def _fixed_shape(value: Tensor) -> list[int]:
    if not all(isinstance(size, int) for size in value.shape):
        raise _Unsupported("it writes to a tensor with a dynamic shape")
    return list(value.shape)
