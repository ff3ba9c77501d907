"""Batch norms that prepare cannot fold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext
from pt2qa._check.rules.train_mode import trains
from pt2qa._graph.handles import handle_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Batch norms that are left once torchao has folded what it folds, on a copy."""
    if context.qat:
        raise DoesNotApplyError("to quantization-aware training, whose prepare folds no batch norm")
    if not any(_is_batch_norm(node) for node in context.graph.graph.nodes):
        raise DoesNotApplyError("to models without batch norm")
    for node in _unfolded(context.graph):
        before = node.all_input_nodes[0]
        op = "an input" if before.op == "placeholder" else op_of(before.target)
        rank = f" with {before.meta[VALUE].dim()} dimensions" if op == "linear" else ""
        yield Found(context.name_of(node), f"it reads {op}{rank}, and stays a float op")


def _unfolded(graph: GraphModule) -> list[Node]:
    folded = GraphModule(graph, copy.deepcopy(graph.graph))
    with warnings.catch_warnings():
        # of linears that it does not fold, which are what is asked for
        warnings.filterwarnings("ignore", message="Not fusing linear")
        fold_batch_norms(folded)
    left = {handle_of(node) for node in folded.graph.nodes if _is_batch_norm(node)}
    return [node for node in graph.graph.nodes if _is_batch_norm(node) and handle_of(node) in left]


def _is_batch_norm(node: Node) -> bool:
    return node.op == "call_function" and op_of(node.target) == "batch_norm" and not trains(node)


RULE = Rule(
    id="unfoldable-batch-norm",
    severity="warning",
    title="batch norms that cannot be folded",
    why="A batch norm is free only where it is multiplied into the weight of the convolution or linear before it. "
    "Behind anything else it stays in float, between a dequantize and a quantize; and convert_pt2e spends some ten "
    "seconds looking for QAT patterns as soon as one is left.",
    fix="put the batch norm directly behind a convolution (conv, norm, relu in the place of norm, relu, conv), or "
    "count on its time in float",
    needs=("graph",),
    find=find,
)
