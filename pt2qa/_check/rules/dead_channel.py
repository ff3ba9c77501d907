"""Channels of a weight that int8 rounds to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Weights with channels that are zero once quantized, and were worth a step of the op's output in float."""
    rows = [row for row in context.weights.rows if row.quantized]
    if not rows:
        raise DoesNotApplyError("to models without quantized weights")
    products = {(product.name, "weight"): product for product in context.integer_products}
    for row in rows:
        product = products.get((row.name, row.attr))
        if not row.dead_channels:
            continue
        dead, scale, channels = row.dead_channels, row.scale, row.shape[max(row.axis, 0)]
        if product is not None:
            zero = (product.integers.flatten(1) == 0).all(1) & (product.largest > 0) & product.visible
            if not bool(zero.any()):
                continue
            dead, scale, channels = int(zero.sum()), float(product.scales[zero].max()), len(zero)
        yield Found(
            row.name,
            f"{dead} of {channels} channels of its {row.attr} are zero: none of their values reaches half a step of "
            f"{scale:.3g}",
            fix=_ONE_SCALE_FIX if row.axis < 0 else _OWN_SCALE_FIX,
            value=dead / channels,
        )


_ONE_SCALE_FIX = (
    "give each channel a scale of its own where the backend takes per-channel weights, or equalise the ranges of the "
    "channels across layers before capture"
)
_OWN_SCALE_FIX = (
    "the scale is the smallest that the weight observer gives: give it a smaller eps, or scale the layer up"
)

RULE = Rule(
    id="dead-channel",
    severity="warning",
    title="channels whose weights become zero",
    why="With one scale for the whole weight, a channel whose values are much smaller than the largest of another "
    "rounds to zero: its output is its bias, whatever the input, while the weight's SQNR stays high.",
    fix=_ONE_SCALE_FIX,
    needs=("pair",),
    find=find,
)
