"""A program that ``torch.export`` made, as ``pt2qa.capture`` would have written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2qa._capture.changes import Change
from pt2qa._capture.exporting import export
from pt2qa._capture.normalise import PASSES, inline_regions, write_sources
from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import OpName, assign_handles, handle_of, walk
from pt2qa._graph.internals.nodes import VALUE, calls_guards
from pt2qa._graph.internals.torch import calling_convention, pytree, sizes_of

Pass = Callable[[ExportedProgram], tuple[Change, ...]]

EVERY_PASS: tuple[Pass, ...] = (inline_regions, *PASSES, write_sources)
"""What capture does to every program, in its order."""

_GIVEN = "handle_as_given"


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A copy of a program after capture's passes, and what each changed.

    ``names`` are what the given program calls its ops, by handle; ops that a pass added have none.
    """

    program: ExportedProgram
    names: Mapping[int, OpName]
    changes: Mapping[Pass, tuple[Change, ...]] = field(repr=False)

    def module(self) -> GraphModule:
        """The graph to annotate, without torch's guards."""
        return self.program.module(check_guards=False)


def rewrite(program: ExportedProgram, names: Mapping[int, OpName], passes: Sequence[Pass] = EVERY_PASS) -> Rewritten:
    """Runs passes of capture, in this order, on a copy of a program that has handles."""
    program = copy_to_edit(program)
    for placed in walk(program.graph_module):
        handle = handle_of(placed.node)
        # The passes renumber handles; what they copy keeps its metadata.
        placed.node.meta = {**placed.node.meta, _GIVEN: handle}
    changes = {run: run(program) for run in passes}
    assign_handles(program)
    given = {handle_of(placed.node): placed.node.meta.get(_GIVEN) for placed in walk(program.graph_module)}
    called = {new: names[old] for new, old in given.items() if new is not None and old is not None and old in names}
    return Rewritten(program, called, changes)


def as_program(graph: GraphModule) -> ExportedProgram:
    """Re-exports a graph of ops, for what only a program can tell.  Dynamic sizes become fixed."""
    graph = copy_to_edit(graph)
    inputs = []
    for node in list(graph.graph.nodes):
        if node.op == "placeholder":
            traced = node.meta.get(VALUE)
            inputs.append(pytree.tree_map_only(Tensor, lambda x: torch.zeros(sizes_of(x), dtype=x.dtype), traced))
        elif calls_guards(node):
            graph.graph.erase_node(node)
    graph.recompile()
    convention = calling_convention(graph)
    args, kwargs = (tuple(inputs), {}) if convention is None else pytree.tree_unflatten(inputs, convention.in_spec)
    return export(graph, args, kwargs, None, False)
