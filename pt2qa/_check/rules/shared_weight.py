"""Weights that several ops read: tied and shared parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._check.readers import constants_by_memory, readers_of
from pt2qa._graph.handles import module_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Weights with two readers or more in different modules; calls of one module are shared-module's."""
    for constants in constants_by_memory(context.graph).values():
        readers = [reader for constant in constants for reader in readers_of(constant)]
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
