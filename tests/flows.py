"""Shared steps of tests: a model through capture and a quantizer."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import pt2qa
from tests.models import images, residual

NARROW = not torch.cpu.get_capabilities()["avx512_vnni"]
"""A CPU without VNNI adds pairs of products in 16 bits, which holds those of integers of seven bits."""


def unedited_pair(model: nn.Module, x: Tensor, mode: str) -> pt2qa.QuantizedPair:
    """A model quantized for XNNPACK without what :func:`pt2qa.quantize` edits for the kernels, as these compute it."""
    capture, plugin = pt2qa.capture(model.eval(), x), pt2qa.quantizer("xnnpack", mode=mode)
    prepared = prepare_pt2e(graph := capture.module(), plugin.build(graph, qat=False))
    prepared(x)
    return pt2qa.pair(capture, convert_pt2e(prepared)).as_deployed(plugin)


def quantized_pair(
    model: nn.Module,
    example: Any,
    quantizer: Any = "xnnpack",
    *,
    batches: Iterable[Any] | None = None,
    **options: Any,
) -> pt2qa.QuantizedPair:
    """Captures a model on ``example`` and quantizes it, calibrated on ``batches`` or on the example itself."""
    capture_options = {key: options.pop(key) for key in ("dynamic_shapes", "strict") if key in options}
    capture = pt2qa.capture(model.eval(), example, **capture_options)
    return pt2qa.quantize(capture, quantizer, [example] if batches is None else batches, progress=False, **options)


@functools.cache
def residual_pair(quantizer: str = "xnnpack") -> pt2qa.QuantizedPair:
    """The shared model, quantized once for all tests; analyses do not change a pair."""
    return quantized_pair(residual(), images(), quantizer)


def direct_sqnr(reference: Tensor, quantized: Tensor) -> float:
    """SQNR in float64, written out once more."""
    ref, quant = reference.detach().double(), quantized.detach().double()
    return float(10 * torch.log10((ref**2).sum() / ((ref - quant) ** 2).sum()))
