"""Weights that several ops read: tied and shared parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import memory_of
from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import attribute_of, module_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Weights with two readers or more in different modules; calls of one module are shared-module's."""
    for constants in constants_by_memory(context.graph).values():
        readers = [reader for constant in constants for reader in _readers(constant)]
        if not _is_weight(constants[0]) or len(readers) < 2 or len({_place(reader) for reader in readers}) < 2:
            continue
        names = ", ".join(dict.fromkeys(context.name_of(reader) for reader in readers))
        also = ", ".join(dict.fromkeys(str(constant.target) for constant in constants[1:]))
        called = f" (also called {also})" if also else ""
        yield Found(str(constants[0].target), f"one tensor{called}, read by {names}")


def _is_weight(constant: Node) -> bool:
    value = constant.meta.get(VALUE)
    return value is not None and value.dim() > 1 and value.is_floating_point()


def _place(reader: Node) -> str:
    """The module that an op belongs to; an op that none called is a place of its own."""
    return module_of(reader)[0] or reader.name


def constants_by_memory(graph: GraphModule) -> dict[int, list[Node]]:
    """The ``get_attr`` nodes of the tensors of a graph, by a number for their memory, in graph order."""
    found: dict[int, list[Node]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attribute_of(graph, node)
        memory = memory_of(value) if isinstance(value, Tensor) else None
        if memory is not None:
            found[memory].append(node)
    return found


def _readers(constant: Node) -> list[Node]:
    """The ops that read a constant beside something else; its views, which read nothing else, are looked through."""
    found: list[Node] = []
    for user in constant.users:
        if user.op != "call_function":
            continue
        found += [user] if len(user.all_input_nodes) > 1 else _readers(user)
    return list(dict.fromkeys(found))


RULE = Rule(
    id="shared-weight",
    severity="note",
    title="weights that ops of several modules read",
    why="Each reader gets a rounded copy of its own. Where one of them stays in float, such as an embedding tied to "
    "the last linear, the weight is stored twice, and a change of one copy does not reach the other.",
    fix="nothing where that is meant; else quantize all readers or none, by settings of the quantizer",
    needs=("graph",),
    find=find,
)
