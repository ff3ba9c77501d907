"""Inputs whose first dimension has one size."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import user_inputs
from pt2qa._graph.internals.nodes import VALUE, calls_guards
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Inputs with a fixed first dimension, where no input has a dynamic one."""
    graph = context.graph
    values = {str(node.target): node.meta.get(VALUE) for node in user_inputs(graph)}
    inputs = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.dim()}
    if not inputs:
        raise DoesNotApplyError("to models without tensors as inputs")
    # The size of a dynamic dimension is a symbol, which must not be compared.
    if any(not isinstance(value.shape[0], int) for value in inputs.values()):
        return
    guarded = any(calls_guards(node) for node in graph.graph.nodes)
    shapes = "{" + ", ".join(f"{name!r}: {{0: torch.export.Dim.AUTO}}" for name in inputs) + "}"
    for name, value in inputs.items():
        if guarded:
            why = f"takes size {value.shape[0]} in dimension 0; _guards_fn fails on any other, before and after convert"
            yield Found(name, why, "warning", _FIX_GUARDS.format(shapes))
        elif context.given != "graph":
            yield Found(name, f"takes batches of {value.shape[0]} only", fix=_FIX.format(shapes))


_FIX = "capture with dynamic_shapes={} where batches of other sizes come, a last one that is smaller too"
_FIX_GUARDS = "export with dynamic_shapes={}, or take the graph without guards: program.module(check_guards=False)"

RULE = Rule(
    id="fixed-batch",
    severity="note",
    title="inputs that take one batch size",
    why="What torch.export makes for one size computes nonsense for another, or fails. torch's check of that is a "
    "node, _guards_fn, that stays in the graph through prepare and convert; pt2qa checks each batch itself.",
    fix="capture with dynamic_shapes where batches of other sizes come, a last one that is smaller too",
    needs=("graph",),
    find=find,
)
