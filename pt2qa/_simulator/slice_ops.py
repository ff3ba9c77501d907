"""Dynamic quantization with a scale for each slice of a value, as ops for a converted graph.

``convert_pt2e`` computes one scale for the whole tensor. A kernel may compute one for each row of a linear's input, or
for each image of a convolution's: a *slice* is what some of the axes hold. The ops mirror those of
``quantized_decomposed``; a graph with them is lowered and run like any other.

Source: ``xnn_f32_qd8_asymmetric_quantization_params`` in XNNPACK's ``src/xnnpack/quantization.h``. torch's
``choose_qparams_per_token_asymmetric`` follows it too, but limits the scale to the eps of float32, and
``quantize_per_token`` rounds after it adds the zero point, so that ties differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("pt2qa", "DEF")


def _choose(x: Tensor, axes: list[int], quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """Maps the range of each slice, widened to include zero, to that of the integers.

    ``scale = (high - low) / (quant_max - quant_min)``, 1 where all of a slice is zero.

    Returns:
        scale, float64, whose reciprocal has the float32 value with which kernels multiply, and zero point, float32;
        both of size 1 along ``axes``.
    """
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    inverse = torch.where(low == high, 1.0, (quant_max - quant_min) / (high - low))
    low, high = low * inverse, high * inverse
    zero_point = torch.where(quant_min + low + quant_max + high > 0, quant_min - low, quant_max - high)
    return inverse.double().reciprocal(), zero_point.clamp(quant_min, quant_max).round()


def _quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, axes: list[int], quant_min: int, quant_max: int, dtype: torch.dtype
) -> Tensor:
    steps = (x * scale.reciprocal().to(x.dtype)).round_()
    return steps.add_(zero_point).clamp_(quant_min, quant_max).to(dtype)


def _dequantize(
    integers: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axes: list[int],
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Tensor:
    return (integers - zero_point) * scale.to(zero_point.dtype)


_LIBRARY.define("choose_qparams_per_slice(Tensor x, int[] axes, int quant_min, int quant_max) -> (Tensor, Tensor)")
_LIBRARY.impl("choose_qparams_per_slice", _choose, "CompositeExplicitAutograd")
_PARAMETERS = "Tensor scale, Tensor zero_point, int[] axes, int quant_min, int quant_max, ScalarType dtype"
_LIBRARY.define(f"quantize_per_slice(Tensor x, {_PARAMETERS}) -> Tensor")
_LIBRARY.impl("quantize_per_slice", _quantize, "CompositeExplicitAutograd")
_LIBRARY.define(f"dequantize_per_slice(Tensor x, {_PARAMETERS}) -> Tensor")
_LIBRARY.impl("dequantize_per_slice", _dequantize, "CompositeExplicitAutograd")

choose_qparams_per_slice = torch.ops.pt2qa.choose_qparams_per_slice.default
quantize_per_slice = torch.ops.pt2qa.quantize_per_slice.default
dequantize_per_slice = torch.ops.pt2qa.dequantize_per_slice.default
