"""The functional form of one in-place op: its result, inserted into the tensor that its argument was a view of."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._capture.aliases import in_place_argument, storage_of
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.flow_passes import alike
from pt2qa._graph.internals.nodes import VALUE, origin_of
from pt2qa._graph.internals.torch import OpOverload, detect_fake_mode, pytree, same_overload

_ATEN = torch.ops.aten
_SAME_ORDER = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "alias", "contiguous", "to"}
"""Views that have all elements of their base, in the same order."""


class Unsupported(Exception):
    """This write cannot be made functional; the text is the reason."""


class Writer:
    """Creates the functional form of an in-place op that writes to ``argument``, at the graph's insertion point.

    ``made`` has every node that was created.
    """

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
            raise Unsupported("it writes to an input, a parameter or a buffer")
        part = self._rebuilt[self._argument] = self._functional(self._argument)
        for view, parent in itertools.pairwise(chain):
            part = self._rebuilt[parent] = self._put_back(view, parent, part)

    def rebuilt(self, old: Node) -> Node:
        """The same view of the written memory, after the write."""
        if old not in self._rebuilt:
            parent = _looked_at(old)
            if parent is None:
                raise Unsupported(f"{old.target} shares its memory in a way that is not known")
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
            raise Unsupported(f"{target} has no form that is not in place")
        made = self._emit(function, *self._node.args, **self._node.kwargs)
        if not alike(made.meta[VALUE], wanted):
            raise Unsupported(f"{function} gives another shape or dtype")
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
        raise Unsupported(f"it writes through {view.target}")

    def _emit(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        assert callable(target)
        made = self._node.graph.call_function(target, args, kwargs)
        self.made.append(made)
        made.meta = origin_of(self._node) | {VALUE: traced_value(made)}
        return made


def traced_value(node: Node) -> Any:
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
        raise Unsupported("it writes to a tensor with a dynamic shape")
    return list(value.shape)
