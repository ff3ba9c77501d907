"""The float values of constants, looked up in the reference graph by handle and argument position."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import attribute_of, handle_of
from pt2qa._graph.internals.torch import version_of
from pt2qa._simulator import op_rules
from pt2qa._simulator.lifetimes import memory_of
from pt2qa._simulator.strides import copied_together

_Key = int | str | tuple[str, int]
"""A handle, ``output``, or for an op without a handle its kind and its order."""

Path = tuple[int | str, ...]
"""The position of an argument: ``(1,)`` is the second one, ``(0, 2)`` the third item of the first."""


@dataclass(frozen=True, slots=True)
class FloatConstant:
    """A constant of the reference graph; its value is several tensors if it comes from an op with several outputs."""

    value: Any
    attribute: str
    is_parameter: bool


class FloatConstants:
    """Looks up what an op reads at a given argument in the reference graph.

    Ops are found by handle.  Those without, which a quantizer put in, are found by their order among the ops of their
    kind, if both graphs have as many.
    """

    def __init__(self, reference: GraphModule, quantized: GraphModule) -> None:
        self._root = reference
        self._keys = _reader_keys(quantized)
        self._readers: dict[_Key, list[Node]] = defaultdict(list)
        self._values: dict[Node, FloatConstant | None] = {}
        self._literals: dict[Any, FloatConstant] = {}
        found = _reader_keys(reference)
        counts = [Counter(key[0] for key in keys.values() if isinstance(key, tuple)) for keys in (found, self._keys)]
        for node, key in found.items():
            if not isinstance(key, tuple) or counts[0][key[0]] == counts[1][key[0]]:
                self._readers[key].append(node)
        self._when_read: dict[tuple[Node, Node], FloatConstant] = {}
        self._follow_writes()

    def lookup(self, reader: Node, path: Path, like: Tensor, *, at_start: bool = False) -> FloatConstant | None:
        """The constant, if all counterparts of ``reader`` that have one of the shape of ``like`` have the same one.

        ``like`` is the value that ``reader``, an op of the quantized graph or its output node, has at ``path``.  Of a
        constant that the graph writes to, it is the value when ``reader`` runs, or that before the first write.
        """
        found = []
        for node in self._counterparts(reader):
            argument = _argument(node, path)
            if not isinstance(argument, Node):
                constant = self._literal(argument, like)
            elif at_start or (node, argument) not in self._when_read:
                constant = self._evaluate(argument)
            else:
                constant = self._when_read[node, argument]
            if constant is not None and isinstance(constant.value, Tensor) and constant.value.shape == like.shape:
                found.append(constant)
        return found[0] if found and all(other.value is found[0].value for other in found) else None

    def nested(self, reader: Node, path: Path) -> GraphModule | None:
        """The nested graph that the one counterpart of ``reader`` calls; None if it has none, or several."""
        arguments = [_argument(node, path) for node in self._counterparts(reader)]
        read = [found for each in arguments if (found := attribute_of(self._root, each)) is not None]
        return read[0] if len(read) == 1 and isinstance(read[0], GraphModule) else None

    def _counterparts(self, reader: Node) -> list[Node]:
        return self._readers[self._keys[reader]] if reader in self._keys else []

    def _literal(self, argument: Any, like: Tensor) -> FloatConstant | None:
        """A number that a quantizer's rewriting made a tensor, as XNNPACK's does."""
        if isinstance(argument, bool) or not isinstance(argument, int | float) or like.numel() != 1:
            return None
        made = FloatConstant(torch.full(like.shape, argument, dtype=like.dtype, device=like.device), "", False)
        return self._literals.setdefault((argument, like.shape, like.dtype), made)

    def _follow_writes(self) -> None:
        """Runs the ops that read constants alone, in order, if any of them writes: what others read depends on when."""
        nodes, constant = self._root.graph.nodes, set[Node]()
        for node in nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr" or (node.op == "call_function" and inputs and constant.issuperset(inputs)):
                constant.add(node)
        self._written = {memory_of(node) for node in constant if op_rules.mutates_first_argument(node.target)}
        start = {
            node: known
            for node in nodes
            if node.op == "get_attr" and memory_of(node) in self._written and (known := self._evaluate(node))
        }
        own = copied_together([known.value for known in start.values()])
        for (node, known), value in zip(start.items(), own, strict=True):
            self._values[node] = replace(known, value=value)
        copies: dict[tuple[Node, int], FloatConstant] = {}
        for node in nodes if self._written else ():
            for arg in constant.intersection(node.all_input_nodes):
                found = self._evaluate(arg)
                if found is not None and isinstance(found.value, Tensor) and memory_of(arg) in self._written:
                    kept = copies.setdefault((arg, version_of(found.value)), _copied(found))
                    self._when_read[node, arg] = kept
            made = self._evaluate(node) if node in constant else None
            if memory_of(node) is node in self._written and made is not None:
                start[node] = _copied(made)
        self._values |= {node: start.get(node) for node in constant if memory_of(node) in self._written}

    def _evaluate(self, node: Node) -> FloatConstant | None:
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> FloatConstant | None:
        if node.op == "get_attr":
            value = constant_of(self._root, node)
            if not isinstance(value, Tensor):
                return None
            return FloatConstant(value, str(node.target), isinstance(value, nn.Parameter))
        if node.op == "call_module" and len(node.all_input_nodes) == 1:
            return self._evaluate(node.all_input_nodes[0])
        if node.op != "call_function":
            return None
        writes_elsewhere = op_rules.mutates_first_argument(node.target) and memory_of(node) not in self._written
        if op_rules.is_random(node.target) or writes_elsewhere:
            return None
        known = {arg: constant for arg in node.all_input_nodes if (constant := self._evaluate(arg)) is not None}
        if not known or len(known) != len(node.all_input_nodes):
            return None
        value = run_on_constants(node, lambda arg: known[arg].value)
        if not isinstance(value, Tensor | list | tuple):
            return None
        first = next(iter(known.values()))
        return FloatConstant(value, first.attribute, any(constant.is_parameter for constant in known.values()))


def _copied(constant: FloatConstant) -> FloatConstant:
    return replace(constant, value=copy.deepcopy(constant.value))


def constant_of(graph_module: GraphModule, node: Node) -> Any:
    """The value of a ``get_attr`` node; of a tensor from inference mode a copy, because no gradient passes that."""
    value = attribute_of(graph_module, node)
    if not isinstance(value, Tensor) or not value.is_inference():
        return value
    return nn.Parameter(value.clone(), False) if isinstance(value, nn.Parameter) else value.clone()


def run_on_constants(node: Node, value_of: Callable[[Node], Any], *first: Any) -> Any:
    """Runs the op of a node on the values of its arguments, with ``first`` in place of the first ones."""
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    args, kwargs = torch.fx.map_arg((node.args[len(first) :], node.kwargs), value_of)
    with torch.no_grad():
        return function(*first, *args, **kwargs)


def _reader_keys(graph_module: GraphModule) -> dict[Node, _Key]:
    keys: dict[Node, _Key] = {}
    orders = defaultdict[str, Iterator[int]](itertools.count)
    for node in graph_module.graph.nodes:
        if node.op == "output":
            keys[node] = "output"
        elif node.op == "call_function":
            handle, kind = handle_of(node), str(node.target)
            keys[node] = (kind, next(orders[kind])) if handle is None else handle
    return keys


def _argument(node: Node, path: Path) -> Any:
    part: Any = node.kwargs if path and isinstance(path[0], str) else node.args
    for key in path:
        try:
            part = part[key]
        except (IndexError, KeyError, TypeError):
            return None
    return part
