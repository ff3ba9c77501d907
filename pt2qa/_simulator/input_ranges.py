"""Whether calibration saw values as large as those of a batch: the model's inputs against the ranges of their sites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pt2qa._report.set_apart import InputRange
from pt2qa._simulator.positions import Counted
from pt2qa._simulator.program import Program, QuantParams


def limits(params: QuantParams) -> tuple[float, float]:
    """The smallest and the largest value that a site can hold; nan if it has no single scale."""
    if not isinstance(params.scale, float) or not isinstance(params.zero_point, int):
        return math.nan, math.nan
    low, high = params.quant_min - params.zero_point, params.quant_max - params.zero_point
    return low * params.scale, high * params.scale


def input_ranges(program: Program, values: Sequence[Any], counted: Counted | None = None) -> tuple[InputRange, ...]:
    """How many values of each input rounding clamps, at the positions that count; no model runs.

    A value within half a step of an end is rounded to it, which is no clamping.
    """
    read = dict(zip(program.inputs, values if counted is None else counted.inputs(values), strict=True))
    names = dict(zip(program.inputs, program.input_names, strict=True))
    found: dict[tuple[str, float, float], InputRange] = {}
    for site in program.sites:
        low, high = limits(site.params)
        value = read.get(site.source)
        if site.params.dynamic or math.isnan(low) or not isinstance(value, Tensor):
            continue
        key, step = (names[site.source], low, high), site.params.largest_scale / 2
        if key not in found:
            smallest, largest = map(float, value.aminmax()) if value.numel() else (math.inf, -math.inf)
            outside = int(((value < low - step) | (value > high + step)).sum())
            found[key] = InputRange(*key, smallest, largest, outside, value.numel())
    return tuple(found.values())
