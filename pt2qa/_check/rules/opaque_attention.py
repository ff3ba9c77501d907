"""Attention as one op."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import op_of
from pt2qa._simulator.products import ATTENTION
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Each attention op; which are as many pairs of matrix products in float."""
    for name, node in context.nodes.items():
        if node.op == "call_function" and op_of(node.target) in ATTENTION:
            yield Found(name, "its two matrix products are computed in float")


RULE = Rule(
    id="opaque-attention",
    severity="note",
    title="attention in one op, which no quantizer looks into",
    why="scaled_dot_product_attention holds two matrix products and a softmax. Quantizers leave it in float, which is "
    "what most backends want; its inputs may still be rounded.",
    fix='nothing where float attention is meant; pt2qa.capture(model, args, decompose=("attention",)) writes it out as '
    "matmul, softmax and matmul",
    needs=("graph",),
    find=find,
)
