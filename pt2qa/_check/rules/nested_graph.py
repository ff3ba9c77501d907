"""Ops inside nested graphs."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import nested_graphs, op_of, walk
from pt2qa.plugins import Found, Rule, Severity

_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def find(context: CheckContext) -> Iterator[Found]:
    """Each op that runs nested graphs, with the number of ops in them."""
    graph = context.graph
    for node in graph.graph.nodes:
        bodies = nested_graphs(node, graph)
        if bodies:
            yield _found(node, sum(_count_ops(body) for _, body in bodies), context)


def _found(node: Node, count: int, context: CheckContext) -> Found:
    op = op_of(node.target)
    what = f"the {count} ops in its nested graphs" if count != 1 else "the one op in its nested graph"
    severity: Severity = "error"
    if op == _GRAD:
        why = f"{what} stay in float: a forward under torch.no_grad() is a graph of its own, where no quantizer looks"
        fix = "make the graph with pt2qa.capture, which inlines it, or take torch.no_grad() out of forward"
    elif op == _AUTOCAST and node.args[2] is False:
        why = f"{what} stay in float: a region without autocast is a graph of its own, where no quantizer looks"
        fix = "make the graph with pt2qa.capture, which inlines it, or take autocast out of forward"
    elif op == _AUTOCAST:
        why, severity = (
            f"{what} compute in another dtype under autocast, and are neither quantized nor analysed",
            "warning",
        )
        fix = "take autocast out of forward"
    else:
        why, severity = f"pt2qa neither quantizes nor analyses {what}", "warning"
        fix = ""
    return Found(context.name_of(node), why, severity, fix, value=count)


def _count_ops(body: GraphModule) -> int:
    return sum(placed.node.op == "call_function" for placed in walk(body))


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
