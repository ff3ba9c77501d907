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
        steps = _steps(product)
        if steps is None or not bool((over := steps > INT32_MAX).any()):
            continue
        stored = product.bias_params is not None
        yield Found(
            product.name,
            f"{int(over.sum())} of {len(steps)} channels have a bias of up to {float(steps.max()):.2g} steps of "
            f"{_step(product)}" + ("" if stored else ", where the kernel stores it as int32"),
            "error" if stored else None,
            value=float(steps.max()),
        )


def _steps(product: IntegerProduct) -> torch.Tensor | None:
    """The bias in steps of the 32-bit sum: float64 of shape (channels,); None where the scales are not known."""
    assert product.bias is not None
    bias = product.bias.reference
    if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
        return None
    step = _bias_scale(product)
    if step is None:
        return None
    values = bias.detach().double().abs().flatten()
    # A transposed convolution has one scale for the channels of the same number in every group.
    return values / (step if step.numel() in (1, values.numel()) else step.repeat(values.numel() // step.numel()))


def _bias_scale(product: IntegerProduct) -> torch.Tensor | None:
    own, given = product.bias_params, product.input_params
    if own is not None and own.dtype == "int32" and own.scale is not None:
        return torch.as_tensor(own.scale, dtype=torch.float64).flatten()
    if given is None or not isinstance(given.scale, float):
        return None
    return given.scale * product.scales


def _step(product: IntegerProduct) -> str:
    smallest = _bias_scale(product)
    return "unknown size" if smallest is None else f"{float(smallest.min()):.2g}"


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
