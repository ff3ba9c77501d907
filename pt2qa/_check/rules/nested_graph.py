"""Ops inside nested graphs."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import nested_graphs, op_of, walk
from pt2qa.plugins import Found, Rule, Severity

_INLINED = {
    "wrap_with_set_grad_enabled": ("a forward under torch.no_grad()", "torch.no_grad()"),
    "wrap_with_autocast": ("a region without autocast", "autocast"),
}
"""What ``pt2qa.capture`` inlines: what it is, and what to take out of forward."""


def find(context: CheckContext) -> Iterator[Found]:
    """Each op that runs nested graphs, with the number of ops in them."""
    graph = context.graph
    for node in graph.graph.nodes:
        if bodies := nested_graphs(node, graph):
            count = sum(placed.node.op == "call_function" for _, body in bodies for placed in walk(body))
            what = f"the {count} ops in its nested graphs" if count != 1 else "the one op in its nested graph"
            yield Found(context.name_of(node), *_explained(node, what), value=count)


def _explained(node: Node, what: str) -> tuple[str, Severity, str]:
    op = op_of(node.target)
    if op not in _INLINED:
        return f"pt2qa neither quantizes nor analyses {what}", "warning", ""
    region, cause = _INLINED[op]
    if op == "wrap_with_autocast" and node.args[2] is not False:
        why = f"{what} compute in another dtype under autocast, and are neither quantized nor analysed"
        return why, "warning", f"take {cause} out of forward"
    why = f"{what} stay in float: {region} is a graph of its own, where no quantizer looks"
    return why, "error", f"make the graph with pt2qa.capture, which inlines it, or take {cause} out of forward"


RULE = Rule(
    id="nested-graph",
    severity="warning",
    title="ops inside the nested graphs of cond, loops and regions",
    why="Quantizers annotate the outer graph. What a branch, a loop or a torch.no_grad() region does is in graphs of "
    "their own, and no number of pt2qa is about the ops there.",
    fix="take what shall be quantized out of the branch or the loop, or write the choice with torch.where",
    needs=("graph",),
    find=find,
)
