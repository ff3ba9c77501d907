"""The functions that compute activation sites: the fused op, and the converted ops that it must equal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator import quant_ops
from pt2qa._simulator.fused import RoundingStats, is_exact, quantize_dequantize
from pt2qa._simulator.program import QuantParams

SiteFunction = Callable[..., Any]
"""``(x, *, out=None, stats=None) -> dequantized x``; see :func:`pt2qa._simulator.fused.quantize_dequantize`."""


def is_elementwise(function: SiteFunction) -> bool:
    """Whether a site may be computed in pieces: its parameters do not depend on the whole tensor."""
    return isinstance(function, functools.partial) and function.func is _static


def fused_site(quantize: Node, params: QuantParams) -> SiteFunction | None:
    """The fused op; None if it would not be exact (per channel, int32, values that are not float32)."""
    source = quantize.args[0]
    value = source.meta.get(VALUE) if isinstance(source, Node) else None
    if isinstance(value, Tensor) and value.dtype != torch.float32:
        return None
    low, high = params.quant_min, params.quant_max
    if quant_ops.is_static_per_tensor(quantize):
        scale, zero_point = params.scale, params.zero_point
        if isinstance(scale, float) and isinstance(zero_point, int) and scale > 0 and is_exact(low, high, zero_point):
            return functools.partial(_static, scale, zero_point, low, high)
    choose = quant_ops.chosen_by(quantize)
    if choose is not None and quant_ops.is_dynamic_per_tensor(quantize) and is_exact(low, high, high - low):
        return functools.partial(_dynamic, functools.partial(_call, choose), low, high)
    return None


def converted_site(quantize: Node, dequantize: Node, tensor: Callable[[Node], Any]) -> SiteFunction:
    """The ops of the converted graph, one after the other; ``tensor`` returns the constant value of an argument."""
    choose = quant_ops.chosen_by(quantize)
    if choose is not None:

        def dynamic(x: Tensor, *, out: Tensor | None = None, stats: RoundingStats | None = None) -> Any:
            chosen = _call(choose, x)
            return _with(chosen, dequantize, _with(chosen, quantize, x))

        return dynamic
    forth, back = torch.fx.map_arg((quantize.args[1:], dequantize.args[1:]), tensor)

    def static(x: Tensor, *, out: Tensor | None = None, stats: RoundingStats | None = None) -> Any:
        return _call(dequantize, _call(quantize, x, *forth, skip=len(quantize.args)), *back, skip=len(dequantize.args))

    return static


def _call(node: Node, *values: Any, skip: int = 1) -> Any:
    """Runs a node's op on ``values``, followed by its own arguments from number ``skip`` on."""
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(*values, *node.args[skip:], **node.kwargs)


def _with(chosen: Sequence[Any], node: Node, value: Any) -> Any:
    """Runs a node's op on a value, with a scale and zero point that were just computed."""
    args = (chosen[int(str(arg.args[1]))] if isinstance(arg, Node) else arg for arg in node.args[1:])
    function: Callable[..., Any] = node.target  # type: ignore[assignment]
    return function(value, *args, **node.kwargs)


def _static(scale: float, zero_point: int, low: int, high: int, x: Tensor, **options: Any) -> Tensor:
    return quantize_dequantize(x, scale, zero_point, low, high, **options)


def _dynamic(choose: Callable[[Tensor], Any], low: int, high: int, x: Tensor, **options: Any) -> Tensor:
    scale, zero_point = choose(x)
    return quantize_dequantize(x, float(scale), int(zero_point), low, high, **options)
