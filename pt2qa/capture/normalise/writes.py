"""Makes writes to a part of a tensor functional.

After ``y[:, :2].mul_(0.1)`` a model goes on to read ``y``, in the graph a value from before the write.  In one memory that
is right; in a quantized graph ``y`` and the slice are two tensors with a quantize and a dequantize between them, the
write is lost, and the model computes nonsense without a word.  Here the later reads get
``slice_scatter(y, mul(y[:, :2], 0.1))``.  In-place ops whose argument is read nowhere else stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2qa.capture.aliases import in_place_argument, storage_of
from pt2qa.capture.changes import Change
from pt2qa.capture.normalise.editing import graph_modules, names_by_node, read_instead
from pt2qa.handles import op_of

_RULE = "partial write"
_ATEN = torch.ops.aten
_CHANGES_NO_VALUE = {
    "as_strided",
    "detach",
    "rename",
    "requires_grad",
    "resize",
    "set",
    "squeeze",
    "swapaxes",
    "t",
    "transpose",
    "unsqueeze",
}
_SAME_ORDER = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "alias", "contiguous", "to"}
"""Views with the elements of what they look at, in the same order."""


class _Unsupported(Exception):
    """This write cannot be made functional; the text is the reason."""


def make_writes_functional(program: ExportedProgram) -> tuple[Change, ...]:
    """Lets what is read after a write to a part of it, or to the whole of which it is a part, read the result, in place.

    Writes to an input or a buffer stay: they are meant to be seen from outside.
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
                what = _rewrite(program, graph_module, node, argument, readers)
            except _Unsupported as reason:
                what = f"left as it is, so a quantizer that rounds this tensor changes what is computed: {reason}"
            changes.append(Change(_RULE, name, what))
        graph_module.recompile()
    return tuple(changes)


def _stale_readers(node: Node, argument: Node, graph: Graph) -> list[tuple[Node, Node]]:
    """Who reads after ``node``, under a name from before it, the memory that it writes: pairs of name and reader."""
    storage = storage_of(argument)
    position = {other: i for i, other in enumerate(graph.nodes)}
    older = [
        other
        for other in graph.nodes
        if storage is not None and storage_of(other) == storage and position[other] < position[node]
    ]
    return [
        (other, user)
        for other in older
        for user in other.users
        if position[user] > position[node] and not _overwrites(user, other)
    ]


def _overwrites(node: Node, value: Node) -> bool:
    """Whether all that an op does with a value is to write over it: ``torch.export`` ends so a write to a buffer."""
    return node.target is _ATEN.copy_.default and node.args[0] is value and node.args[1] is not value


def _rewrite(
    program: ExportedProgram, graph_module: GraphModule, node: Node, argument: Node, readers: list[tuple[Node, Node]]
) -> str:
    graph, storage = graph_module.graph, storage_of(argument)
    writer = _Writer(node, argument)
    try:
        with graph.inserting_before(node):
            writer.write()
            new = {old: writer.rebuilt(old) for old, _ in readers}
        for old, reader in readers:
            read_instead(program, old, new[old], [reader])
        read_instead(program, node, writer.rebuilt(argument))
        _renew_values(node, storage)
        graph.erase_node(node)
    finally:
        _drop_unread([*writer.made, *(old for old, _ in readers)])
    return f"computed out of place, for {len(readers)} later read{'s' * (len(readers) > 1)} of the tensor that it changes"


def _drop_unread(nodes: list[Node]) -> None:
    """Erases those of the nodes that nothing reads any more, and what only they read."""
    waiting, gone = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node not in gone and node.op == "call_function" and not node.users and not node.is_impure():
            waiting.extend(node.all_input_nodes)
            gone.add(node)
            node.graph.erase_node(node)


def _renew_values(written: Node, storage: int | None) -> None:
    """Traces the later views of a memory anew: they look at the result now, which has a memory of its own."""
    later = written.next
    while later.op != "root":
        leaves = pytree.tree_leaves(later.meta.get("val"))
        looks = any(isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == storage for leaf in leaves)
        if looks and later.op == "call_function":
            later.meta["val"] = _value(later)
        later = later.next


def _value(node: Node) -> Any:
    """What an op gives for the traced values of its arguments."""
    args, kwargs = pytree.tree_map_only(Node, lambda argument: argument.meta["val"], (node.args, node.kwargs))
    mode = detect_fake_mode(pytree.tree_leaves((args, kwargs)))
    assert mode is not None
    assert callable(node.target)
    with torch.no_grad(), mode:
        return node.target(*args, **kwargs)


class _Writer:
    """Makes the functional form of one in-place op, at the graph's point of insertion.

    Args:
        node: the in-place op.
        argument: what it writes to.

    Attributes:
        made: every node that was made.
    """

    def __init__(self, node: Node, argument: Node) -> None:
        self.made: list[Node] = []
        self._node = node
        self._argument = argument
        self._rebuilt: dict[Node, Node] = {}

    def write(self) -> None:
        """Makes the result, and from it every larger tensor that its argument was a part of.

        Raises:
            _Unsupported: there is no functional form.
        """
        chain = [self._argument]
        while (parent := _looked_at(chain[-1])) is not None:
            chain.append(parent)
        if chain[-1].op != "call_function":
            raise _Unsupported("it writes to an input, a parameter or a buffer")
        part = self._rebuilt[self._argument] = self._functional(self._argument)
        for view, parent in zip(chain, chain[1:], strict=False):
            part = self._rebuilt[parent] = self._put_back(view, parent, part)

    def rebuilt(self, old: Node) -> Node:
        """The same look at the written memory, after the write."""
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
        target, wanted = self._node.target, argument.meta["val"]
        assert isinstance(target, OpOverload)
        if target is _ATEN.copy_.default:
            source = self._node.args[1]
            assert isinstance(source, Node)
            given = source.meta["val"]
            if given.dtype != wanted.dtype:
                source = self._emit(_ATEN.to.dtype, source, wanted.dtype)
            # Without a copy the source itself would be written to by the next write.
            return self._emit(_ATEN.clone.default, self._emit(_ATEN.expand.default, source, _fixed_shape(wanted)))
        name = target._schema.name.rpartition("::")[2]
        packet = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
        function = getattr(packet, target._overloadname, None)
        if function is None:
            raise _Unsupported(f"{target} has no form that is not in place")
        made = self._emit(function, *self._node.args, **self._node.kwargs)
        if (made.meta["val"].shape, made.meta["val"].dtype) != (wanted.shape, wanted.dtype):
            raise _Unsupported(f"{function} gives another shape or dtype")
        return made

    def _put_back(self, view: Node, parent: Node, part: Node) -> Node:
        """What ``parent`` is after its ``view`` became ``part``."""
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
            return self._emit(_ATEN.reshape.default, part, _fixed_shape(parent.meta["val"]))
        raise _Unsupported(f"it writes through {view.target}")

    def _emit(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        assert callable(target)
        made = self._node.graph.call_function(target, args, kwargs)
        kept = ("nn_module_stack", "stack_trace", "torch_fn")
        self.made.append(made)
        made.meta = {**{key: self._node.meta[key] for key in kept if key in self._node.meta}, "val": _value(made)}
        return made


def _looked_at(node: Node) -> Node | None:
    """What a view looks at, or the argument of an in-place op; None for a node with memory of its own."""
    parent = node.args[0] if node.op == "call_function" and node.args else None
    if node.target is operator.getitem and isinstance(parent, Node):
        parent = parent.args[0]
    if not isinstance(parent, Node) or storage_of(parent) is None or storage_of(parent) != storage_of(node):
        return None
    return parent


def _fixed_shape(value: Tensor) -> list[int]:
    if not all(isinstance(size, int) for size in value.shape):
        raise _Unsupported("it writes to a tensor with a dynamic shape")
    return list(value.shape)
