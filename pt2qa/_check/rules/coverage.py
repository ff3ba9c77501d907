"""How much of each kind of op is quantized, where something is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pt2qa._check.context import CheckContext
from pt2qa._check.products import Product
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """By kind of op the counts, and their share of the multiply-adds, unless all are quantized."""
    products = context.products
    if all(product.state == "quantized" for product in products):
        return
    for op in dict.fromkeys(product.op for product in products):
        alike = [product for product in products if product.op == op]
        yield Found(op, _counts(alike, context.given == "pair"), value=sum(product.share for product in alike))


def _counts(products: Sequence[Product], is_converted: bool) -> str:
    quantized = [product for product in products if product.state == "quantized"]
    share, covered = (sum(product.share for product in some) for some in (products, quantized))
    annotated = sum(bool(product.annotated) for product in products)
    words = [f"{len(products)} eligible"]
    words += [] if products[0].annotated is None else [f"{annotated} annotated"]
    words += [f"{len(quantized)} {'converted' if is_converted else 'with inputs and weights rounded'}"]
    return f"{', '.join(words)}; these do {covered:.1%} of the model's multiply-adds, all of them {share:.1%}"


RULE = Rule(
    id="coverage",
    severity="note",
    title="how much of each kind of op is quantized",
    why="Eligible is what multiplies matrices: convolutions, linears, matmul, attention, recurrent ops. Their "
    "multiply-adds are counted for the example inputs.",
    fix="float-op, half-quantized and the rules on opaque ops name what is left, and the reasons",
    find=find,
)
