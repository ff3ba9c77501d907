"""Biases that do not fit into the 32-bit sums of integer products."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext
from pt2qa._check.integer_products import IntegerProduct
from pt2qa.plugins import DoesNotApplyError, Found, Rule

INT32_MAX = 2**31 - 1


def find(context: CheckContext) -> Iterator[Found]:
    """Biases of more than 2^31 - 1 steps: ``|bias| / (scale of the input * scale of the weight)``."""
    products = [product for product in context.integer_products if product.bias is not None]
    if not products:
        raise DoesNotApplyError("to models without biases beside quantized weights")
    for product in products:
        scales, bias = _bias_scales(product), product.bias.reference if product.bias else None
        if scales is None or not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            continue
        values = bias.detach().double().abs().flatten()
        # A transposed convolution has one scale for the channels of the same number in every group.
        steps = values / (scales if scales.numel() == 1 else scales.repeat(values.numel() // scales.numel()))
        if over := int((steps > INT32_MAX).sum()):
            stored = product.bias_params is not None
            yield Found(
                product.name,
                f"{over} of {len(steps)} channels have a bias of up to {float(steps.max()):.2g} steps of "
                f"{float(scales.min()):.2g}" + ("" if stored else ", where the kernel stores it as int32"),
                "error" if stored else None,
                value=float(steps.max()),
            )


def _bias_scales(product: IntegerProduct) -> torch.Tensor | None:
    """The steps of the 32-bit sum: float64 of shape (1,) or (channels,); None where they are not known."""
    own, given = product.bias_params, product.input_params
    if own is not None and own.dtype == "int32" and own.scale is not None:
        return torch.as_tensor(own.scale, dtype=torch.float64).flatten()
    return given.scale * product.scales if given is not None and isinstance(given.scale, float) else None


RULE = Rule(
    id="bias-overflow",
    severity="warning",
    title="biases beyond 32 bits",
    why="Integer kernels add the bias to a 32-bit sum, in steps of the input's scale times the weight's. Where that "
    "product is tiny, as for a channel whose weights are zero, the bias exceeds 2^31 - 1 steps and is cut off.",
    fix="give the weight observer a larger eps (2**-12 is usual), or keep the layer in float",
    needs=("pair",),
    find=find,
)
