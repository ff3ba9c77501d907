"""Matrix products of which only a part is rounded."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.products import Product
from pt2qa._simulator.products import RECURRENT
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Products with a rounded input and a float weight, or the other way round where others of their kind have both."""
    products = context.products
    whole = {product.op for product in products if product.state == "quantized"}
    for product in products:
        if product.state == "input only" or (product.state == "weight only" and product.op in whole):
            yield Found(product.name, _why(product), fix=_FIX_RECURRENT if product.op in RECURRENT else "")


def _why(product: Product) -> str:
    if product.state == "weight only":
        return f"the {product.op}'s weight is rounded and its input is not, so that it computes in float"
    if product.op in RECURRENT:
        return (
            f"the {product.op}'s input is rounded and its weights are not: it is one opaque op that computes in float"
        )
    return f"the {product.op}'s input is rounded and its weight is not: it computes in float"


_FIX_RECURRENT = (
    'pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) shows its linears to the quantizer; else keep its '
    "input in float"
)

RULE = Rule(
    id="half-quantized",
    severity="warning",
    title="only a part of what is multiplied is rounded",
    why="The rounding costs accuracy, and the op still runs in float: that a value is dequantized for an op does not "
    "mean that the op is quantized.",
    fix="have its other operand quantized too (an nn.Linear instead of addmm, which is what GPT-2's Conv1D makes), or "
    'keep both in float: pt2qa.Edit("float", (name,)) for the op that asks for the rounding',
    find=find,
)
