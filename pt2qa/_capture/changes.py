"""What normalisation changed in a program, and edits of its graphs that keep its signature valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import assign_handles, handle_of, names_of, walk

Rule = Literal[
    "add of zero",
    "attention",
    "dead code",
    "nested region",
    "op source",
    "padding",
    "partial write",
    "recurrent op",
    "scalar",
    "shared module",
]
"""Passes of capture, by what they rewrite."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a pass changed.  No change alters what the program computes.

    Attributes:
        rule: which pass.
        name: the op or module that was changed.
        what: what was done, as a sentence without its subject.
        left: why nothing was done; empty if something was.
    """

    rule: Rule
    name: str
    what: str
    left: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}: {self.what}"


def graph_modules(program: ExportedProgram) -> list[GraphModule]:
    return list({id(placed.graph_module): placed.graph_module for placed in walk(program.graph_module)}.values())


def complete_users(program: ExportedProgram) -> None:
    """Enters readers that ``torch.export`` forgot, in place: before a ``no_grad`` region, those that nothing reads."""
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            for source in node.all_input_nodes:
                source.users.setdefault(node)


def names_by_node(program: ExportedProgram) -> dict[Node, str]:
    """What to call each op of a program as it is now.  Numbers the program's handles, in place."""
    assign_handles(program)
    names = names_of(program)
    return {
        placed.node: names[handle].name
        for placed in walk(program.graph_module)
        if (handle := handle_of(placed.node)) is not None
    }


def changes_of(
    program: ExportedProgram, rule: Rule, edit: Callable[[GraphModule], Iterable[tuple[Node, str]]]
) -> tuple[Change, ...]:
    """Edits every graph of a program, in place; ``edit`` returns the ops that it changed, and how."""
    names = names_by_node(program)
    found = [change for graph_module in graph_modules(program) for change in edit(graph_module)]
    renew_outputs(program)
    return tuple(Change(rule, names[node], what) for node, what in found)


def renew_outputs(program: ExportedProgram) -> None:
    """Gives the signature of a program the names of its outputs, in place, after edits of the graph."""
    outputs: Any = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, outputs, strict=True):
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(name=node.name)
