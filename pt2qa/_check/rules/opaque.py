"""Ops that hide others: attention, recurrent ops, nested graphs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import nested_graphs, op_of, walk
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator.products import ATTENTION, CELLS
from pt2qa.plugins import Found, Severity
from pt2qa.plugins.rules import rule

HALF = 0.5
"""Share of the weights from which on quantizing the rest is hardly worth it: int8 then saves less than 3/8 of them."""

_KINDS = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


@rule(
    severity="warning",
    title="recurrent ops, whose inner products no quantizer sees",
    why="torch.export writes an LSTM, GRU or RNN as one op with all its matrix products inside. Quantizers leave it in "
    "float.",
    fix='pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) decomposes it into linears',
    needs=("graph",),
)
def opaque_recurrent(context: CheckContext) -> Iterator[Found]:
    """An error if they hold half of the model's weights."""
    graph = context.graph
    total = sum(parameter.numel() for parameter in graph.parameters())
    for name, node in context.nodes.items():
        op = op_of(node.target)
        if node.op != "call_function" or op not in (*_KINDS, *CELLS):
            continue
        values = [source.meta.get(VALUE) for source in node.all_input_nodes if source.op == "get_attr"]
        matrices = [value.numel() for value in values if isinstance(value, Tensor) and value.dim() == 2]
        held = sum(matrices)
        share = held / total if total else 0.0
        yield Found(
            name,
            f"{len(matrices)} matrices with {held:,} of the model's {total:,} parameters ({share:.0%}) stay in float",
            "error" if share >= HALF else "warning",
            _FIX_CELL if op in CELLS else _FIX_RECURRENT.format(_KINDS[op]),
            value=share,
        )


_FIX_RECURRENT = 'pt2qa.capture(model, args, decompose=("{}",)) unrolls it into linears, for sequences of one length'
_FIX_CELL = "write the cell with nn.Linear: a product of the input, one of the state, and the gates"


@rule(
    severity="note",
    title="attention as one op, whose inner products no quantizer sees",
    why="scaled_dot_product_attention holds two matrix products and a softmax. Quantizers leave it in float, as most "
    "backends require; its inputs may still be rounded.",
    fix='nothing if float attention is intended; pt2qa.capture(model, args, decompose=("attention",)) decomposes it '
    "into matmul, softmax and matmul",
    needs=("graph",),
)
def opaque_attention(context: CheckContext) -> Iterator[Found]:
    for name, node in context.nodes.items():
        if node.op == "call_function" and op_of(node.target) in ATTENTION:
            yield Found(name, "its two matrix products are computed in float")


_INLINED = {
    "wrap_with_set_grad_enabled": ("a forward under torch.no_grad()", "torch.no_grad()"),
    "wrap_with_autocast": ("a region without autocast", "autocast"),
}
"""What ``pt2qa.capture`` inlines, and what to remove from forward."""


@rule(
    severity="warning",
    title="ops inside the nested graphs of cond, loops and regions",
    why="The ops of a branch, a loop or a torch.no_grad() region are in graphs of their own. prepare_pt2e annotates "
    "those of while_loop and scan like the outer graph, and no others. Edits reach none of them, and their ops have no "
    "rows.",
    fix="move what should be quantized out of the branch or the loop, or write the choice with torch.where",
    needs=("graph",),
)
def nested_graph(context: CheckContext) -> Iterator[Found]:
    graph = context.graph
    for node in graph.graph.nodes:
        if bodies := nested_graphs(node, graph):
            count = sum(placed.node.op == "call_function" for _, body in bodies for placed in walk(body))
            what = f"the {count} ops in its nested graphs" if count != 1 else "the one op in its nested graph"
            yield Found(context.name_of(node), *_explained(node, what), value=count)


def _explained(node: Node, what: str) -> tuple[str, Severity, str]:
    op = op_of(node.target)
    if op in ("while_loop", "scan"):
        why = f"prepare quantizes {what}, but edits do not reach them, and only rounded values have rows"
        return why, "warning", ""
    if op not in _INLINED:
        return f"prepare leaves {what} in float, and they have no rows", "warning", ""
    region, cause = _INLINED[op]
    if op == "wrap_with_autocast" and node.args[2] is not False:
        why = f"{what} compute in another dtype under autocast, and are neither quantized nor analysed"
        return why, "warning", f"remove {cause} from forward"
    why = f"{what} stay in float: {region} is a graph of its own, which no quantizer enters"
    return why, "error", f"quantize the graph of pt2qa.capture, which inlines it, or remove {cause} from forward"
