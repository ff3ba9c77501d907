"""Channels of a weight that are small beside the largest, where all share one scale."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.integer_products import FEW_CHANNELS
from pt2qa._decibels import LOW_SQNR
from pt2qa.plugins import DoesNotApplyError, Found, Rule

RATIO = 16.0
"""A channel with a sixteenth of the weight's range has 16 of its 256 integers: four bits of eight."""


def find(context: CheckContext) -> Iterator[Found]:
    """Weights with one scale in which more than a few channels are small because others are 16 times as large."""
    shared = [product for product in context.integer_products if product.weight_params.axis is None]
    if not shared:
        raise DoesNotApplyError("to models without weights that have one scale for the whole tensor")
    worst = {(row.name, row.attr): row.worst_channel_sqnr for row in context.weights.rows}
    for product in shared:
        largest = product.largest
        alive = (product.integers.flatten(1) != 0).any(1) & product.visible
        small = alive & (largest * RATIO <= largest.max())
        share = float(small.sum()) / len(small)
        if share <= FEW_CHANNELS or not worst[product.name, "weight"] < LOW_SQNR:
            continue
        ratio = float(largest.max() / largest[small].min())
        yield Found(
            product.name,
            f"{int(small.sum())} of {len(largest)} channels have less than 1/{RATIO:.0f} of the weight's range, the "
            f"smallest 1/{ratio:.0f}",
            value=share,
        )


RULE = Rule(
    id="channel-range",
    severity="warning",
    title="channels of very different ranges under one scale",
    why="The largest channel sets the scale, so that the others get few integers: four bits less where their range is "
    f"a 16th. Listed where that is so for more than a tenth of the channels, and one is below {LOW_SQNR:.0f} dB.",
    fix="give each channel a scale of its own where the backend takes per-channel weights; where it does not, equalise "
    "the ranges across layers before capture: Nagel et al. 2019, Data-free quantization through weight equalization "
    "and bias correction",
    needs=("pair",),
    find=find,
)
