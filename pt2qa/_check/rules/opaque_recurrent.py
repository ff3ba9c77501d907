"""Recurrent ops, which hide their matrix products."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator.products import CELLS
from pt2qa.plugins import Found, Rule

HALF = 0.5
"""Share of the weights from which on quantizing the rest is hardly worth it: int8 then saves less than 3/8 of them."""

_KINDS = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


def find(context: CheckContext) -> Iterator[Found]:
    """Each recurrent op with the weights that it holds; an error where that is half of the model's."""
    graph = context.graph
    total = sum(parameter.numel() for parameter in graph.parameters())
    for name, node in context.nodes.items():
        op = op_of(node.target)
        if node.op != "call_function" or op not in (*_KINDS, *CELLS):
            continue
        matrices = _matrices(node)
        held = sum(matrices)
        share = held / total if total else 0.0
        yield Found(
            name,
            f"{len(matrices)} matrices with {held:,} of the model's {total:,} parameters ({share:.0%}) stay in float: "
            f"{op} is one op to every quantizer",
            "error" if share >= HALF else "warning",
            _FIX_CELL if op in CELLS else _fix(_KINDS[op]),
            value=share,
        )


def _matrices(node: Node) -> list[int]:
    """Sizes of the weights of a recurrent op: the parameters with two dimensions."""
    values = [source.meta.get(VALUE) for source in node.all_input_nodes if source.op == "get_attr"]
    return [value.numel() for value in values if isinstance(value, Tensor) and value.dim() == 2]


def _fix(kind: str) -> str:
    return (
        f'pt2qa.capture(model, args, decompose=("{kind}",)) writes it out as linears, step by step; the length of the '
        "sequence is fixed then"
    )


_FIX_CELL = "write the cell with nn.Linear: a product of the input, one of the state, and the gates"

RULE = Rule(
    id="opaque-recurrent",
    severity="warning",
    title="recurrent ops, which no quantizer looks into",
    why="torch.export writes an LSTM, GRU or RNN as one op with all its matrix products inside. Quantizers leave it in "
    "float without a word.",
    fix='pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) writes it out as linears',
    needs=("graph",),
    find=find,
)
