"""Quantization that does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """A model of whose matrix products none is quantized."""
    products = context.products
    if any(product.state != "float" for product in products):
        return
    kinds = ", ".join(f"{count} {op}" for op, count in Counter(product.op for product in products).items())
    macs = sum(product.macs for product in products)
    owners = list(dict.fromkeys(product.owner for product in products))
    nested = f"; they stand inside {', '.join(owners)}, whose graph no quantizer enters" if all(owners) else ""
    why = f"0 % is quantized: {kinds} with {macs:,} multiply-adds stay in float{nested}"
    rounds = context.given == "pair" and bool(context.pair.sites)
    yield Found("", f"{why}; only other ops are rounded" if rounds else why)


RULE = Rule(
    id="no-coverage",
    severity="error",
    title="nothing that costs time is quantized",
    why="What costs time runs in float, so that comparing it shows little error or none. Common reasons are a "
    "program that torch.export wrote so that the quantizer finds no op, a forward under torch.no_grad(), whose ops are "
    "in a nested graph, and a quantizer without settings.",
    fix="quantize the graph of pt2qa.capture(model, args), which takes such regions apart and says of every op what it "
    "stands for; then see that the quantizer has settings (set_global) and that its filters match",
    find=find,
)
