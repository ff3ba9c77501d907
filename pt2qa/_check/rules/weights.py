"""Channels and biases that do not fit a product's integers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext, require
from pt2qa._check.products import FEW_CHANNELS, IntegerProduct
from pt2qa._decibels import LOW_SQNR
from pt2qa.plugins import Found
from pt2qa.plugins.rules import rule

_ONE_SCALE_FIX = (
    "give each channel its own scale if the backend supports per-channel weights; if not, equalise the ranges of the "
    "channels across layers before capture (Nagel et al. 2019, Data-free quantization through weight equalization and "
    "bias correction)"
)


@rule(
    severity="warning",
    title="channels whose weights become zero",
    why="With one scale for the whole weight, a channel with much smaller values than the largest channel rounds to "
    "zero: its output is its bias, whatever the input, while the weight's SQNR stays high.",
    fix=_ONE_SCALE_FIX,
    needs=("pair",),
)
def dead_channel(context: CheckContext) -> Iterator[Found]:
    """Unless they are too small to change the rounded output in float, too."""
    rows = require([row for row in context.weights if row.quantized], "to models without quantized weights")
    products = {(product.name, "weight"): product for product in context.integer_products}
    for row in rows:
        product = products.get((row.name, row.attr))
        if not row.dead_channels:
            continue
        dead, scale, channels = row.dead_channels, row.scale, row.shape[max(row.axis, 0)]
        if product is not None:
            zero = product.zero & (product.largest > 0) & product.visible
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


_OWN_SCALE_FIX = (
    "the scale is the smallest that the weight observer gives: give it a smaller eps, or scale the layer up"
)

RATIO = 16.0
"""A channel with a sixteenth of the weight's range has 16 of its 256 integers: four bits of eight."""


@rule(
    severity="warning",
    title="channels of very different ranges under one scale",
    why="The largest channel sets the scale, so the others get few integers: four bits less for a 16th of its range. "
    f"Listed if that affects more than a tenth of the channels, and one is below {LOW_SQNR:.0f} dB.",
    fix=_ONE_SCALE_FIX,
    needs=("pair",),
)
def channel_range(context: CheckContext) -> Iterator[Found]:
    shared = [product for product in context.integer_products if product.weight_params.axis is None]
    require(shared, "to models without weights that have one scale for the whole tensor")
    worst = {(row.name, row.attr): row.worst_channel_sqnr for row in context.weights}
    for product in shared:
        largest = product.largest
        alive = ~product.zero & product.visible
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


INT32_MAX = 2**31 - 1


@rule(
    severity="warning",
    title="biases beyond 32 bits",
    why="Integer kernels add the bias to a 32-bit sum, in steps of the input's scale times the weight's. If that "
    "product is tiny, as for a channel whose weights are zero, the bias exceeds 2^31 - 1 steps: it is clamped, or "
    "wraps around to the other sign.",
    fix="give the weight observer a larger eps (2**-12 is usual), or keep the layer in float",
    needs=("pair",),
)
def bias_overflow(context: CheckContext) -> Iterator[Found]:
    """Of more than 2^31 - 1 steps: ``|bias| / (scale of the input * scale of the weight)``."""
    in_int32 = context.int32_bias
    require(in_int32 is not False, "to kernels that add the bias in float")
    products = [product for product in context.integer_products if product.bias is not None]
    require(products, "to models without biases of quantized weights")
    for product in products:
        scales, bias = _bias_scales(product), product.bias.reference if product.bias else None
        if scales is None or not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            continue
        values = bias.detach().cpu().double().abs().flatten()
        # A transposed convolution has one scale for the channels of the same number in every group.
        steps = values / (scales if scales.numel() == 1 else scales.repeat(values.numel() // scales.numel()))
        if over := int((steps > INT32_MAX).sum()):
            stored = in_int32 or product.bias_params is not None
            yield Found(
                product.name,
                f"{over} of {len(steps)} channels have a bias of up to {float(steps.max()):.2g} steps of "
                f"{float(scales.min()):.2g}" + ("" if stored else ", if the kernel stores it as int32"),
                "error" if stored else None,
                value=float(steps.max()),
            )


def _bias_scales(product: IntegerProduct) -> torch.Tensor | None:
    """The steps of the 32-bit sum: float64 of shape (1,) or (channels,); None if they are unknown."""
    own, given = product.bias_params, product.input_params
    if own is not None and own.dtype == "int32" and own.scale is not None:
        return torch.as_tensor(own.scale).cpu().double().flatten()
    return given.scale * product.scales if given is not None and isinstance(given.scale, float) else None
