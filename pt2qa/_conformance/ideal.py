"""Textbook rounding at a quantizer's sites: the best that its bits and its choice of sites allow.

A uniform quantizer with the smallest range that covers the data has an error variance of ``step² / 12``; each bit
halves the step: 6.02 dB.  Source: Widrow and Kollár, Quantization Noise (2008), chapter 5; Jacob et al., Quantization
and Training of Neural Networks (2018), section 2, for the affine scheme, whose range includes 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any, Final

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import error_sums
from pt2qa._simulator.program import Program, QuantParams, Step
from pt2qa._simulator.simulator import Simulator

BIT: Final = 6.02
"""dB of one bit: ``20 · log10(2)``."""

ALLOWANCE: Final = 2 * BIT
"""dB by which a sound quantizer may fall short of the ideal: one bit for a symmetric scheme on one-sided data, such as
a ReLU's output, and one bit for an observer that clips or widens the calibrated range."""

Range = tuple[Tensor, Tensor]


class IdealSimulator(Simulator):
    """Runs the quantized model with ideal scales: each range is taken from the values of this batch.

    Number of levels, channel axis and sites are the quantizer's own. Activations that share a scale in the quantized
    model share one here, with a range that covers them all.
    """

    def __init__(self, program: Program, values: Sequence[Any]) -> None:
        super().__init__(program)
        for constant in program.constants:
            if constant.site is not None and isinstance(constant.reference, Tensor):
                params = program.sites[constant.site].params
                self.on[constant.slot] = ideal_rounding(constant.reference, params)
        self._ranges: dict[int, Range] = {}
        self._shared: dict[int, Range] = {}
        self.run(values, on=True)
        groups: dict[Hashable, list[Range]] = defaultdict(list)
        for index, found in self._ranges.items():
            groups[_scale_of(index, program)].append(found)
        self._shared = {
            index: _union(groups[_scale_of(index, program)]) if program.sites[index].params.axis is None else found
            for index, found in self._ranges.items()
        }

    def site_function(self, step: Step) -> Callable[..., Any]:
        """Ideal rounding for the site of a step; the first run records the ranges."""
        assert step.site is not None
        index, params = step.site, self.program.sites[step.site].params

        def rounded(value: Tensor, out: Tensor | None = None) -> Tensor:
            self._ranges.setdefault(index, range_of(value, params.axis))
            return ideal_rounding(value, params, self._shared.get(index))

        return rounded


def ideal_rounding(value: Tensor, params: QuantParams, limits: Range | None = None) -> Tensor:
    """A value rounded to a site's number of levels in the range ``limits``; None for the value's own range.

    With ``low ≤ 0 ≤ high``: ``step = (high - low) / (quant_max - quant_min)``, ``z = round(-low / step)``,
    ``(clamp(round(x / step) + z, 0, quant_max - quant_min) - z) · step``.
    """
    stored = getattr(torch, params.dtype)
    if stored.is_floating_point:
        return value.to(stored).to(value.dtype)
    low, high = range_of(value, params.axis) if limits is None else limits
    levels = params.quant_max - params.quant_min
    step = torch.where(high > low, (high - low) / levels, 1.0)
    zero = torch.round(-low / step)
    return ((torch.round(value.double() / step) + zero).clamp(0, levels) - zero).mul(step).to(value.dtype)


def range_of(value: Tensor, axis: int | None) -> Range:
    """The smallest range that covers 0 and the finite values, per tensor or per channel; float64."""
    finite = torch.where(value.isfinite(), value, 0.0).double()
    dims = [dim for dim in range(value.dim()) if dim != axis]
    if axis is None:
        low, high = finite.min(), finite.max()
    else:
        low, high = finite.amin(dims, keepdim=True), finite.amax(dims, keepdim=True)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def output_sqnr(reference: Any, quantized: Any) -> float:
    """The lowest SQNR of the float outputs in dB; inf if they are identical or none is float.

    An output that is wrongly infinite or NaN counts as -inf; one whose reference is zero does not count.
    """
    pairs = zip(pytree.tree_leaves(reference), pytree.tree_leaves(quantized), strict=True)
    sums = [error_sums(want, got) for want, got in pairs if isinstance(want, Tensor) and want.is_floating_point()]
    found = [-inf if each.nonfinite else each.sqnr for each in sums]
    return min((each for each in found if each == each), default=inf)


def _scale_of(site: int, program: Program) -> Hashable:
    """Equal for activations that share a scale."""
    params = program.sites[site].params
    if params.dynamic or isinstance(params.scale, Tensor) or params.scale is None:
        return site
    return params.dtype, params.quant_min, params.quant_max, params.scale, params.single_zero_point


def _union(ranges: Sequence[Range]) -> Range:
    return torch.stack([low for low, _ in ranges]).amin(), torch.stack([high for _, high in ranges]).amax()
