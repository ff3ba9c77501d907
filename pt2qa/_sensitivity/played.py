"""A program with other parameters or readers at some sites, to measure what they give without quantizing again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._sensitivity.roundings import Rounding
from pt2qa._simulator.lifetimes import mark_lifetimes, slots_in
from pt2qa._simulator.program import Constant, Nested, Program, QuantParams, Slot
from pt2qa._simulator.simulator import bind
from pt2qa._simulator.site_functions import SiteFunction
from pt2qa._simulator.stored import Stored, ValueCache

EPSILON = torch.finfo(torch.float32).eps
"""The smallest scale, as in torchao's observers."""

INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
"""The whole range of a dtype."""


def with_roundings(program: Program, roundings: Mapping[int, Rounding]) -> Program:
    """A program in which some sites round otherwise; of a constant, any function that rounds its float value."""
    cache = ValueCache(program.weight_cache)
    steps = tuple(
        replace(step, function=_site_function(roundings[step.site]), converted=None, duplicate_of=None)
        if step.site is not None and step.site in roundings
        else step
        for step in program.steps
    )
    constants = tuple(_with_roundings(constant, roundings, cache) for constant in program.constants)
    return replace(program, steps=steps, constants=constants)


def _with_roundings(constant: Constant, roundings: Mapping[int, Rounding], cache: ValueCache) -> Constant:
    if constant.site is not None and constant.site in roundings:
        # Rounded when its op runs: all at once would be a second model in memory.
        make = functools.partial(roundings[constant.site], constant.reference)
        return replace(constant, stored=Stored(make, cache))
    if isinstance(nested := constant.stored, Nested):
        own = {number: roundings[site] for number, site in enumerate(nested.sites) if site in roundings}
        made = replace(nested, program=with_roundings(nested.program, own)) if own else nested
        return replace(constant, reference=made, stored=made)
    return constant


def readers_of(program: Program, slot: int) -> frozenset[str]:
    """The names of what reads a value: ops, a value that a further site rounds, and ``output``."""
    read = frozenset(step.name for step in program.steps if slot in step.reads)
    return read | {"output"} if slot in slots_in(program.outputs) else read


def with_readers(program: Program, readers: Mapping[int, Collection[str]]) -> Program:
    """A program in which only the named readers have what some sites round; all others have the value itself."""
    slots = {slot: Slot(slot) for slot in range(program.slots)}

    def rewired(template: Any, reader: str) -> Any:
        raw = [program.sites[site] for site, names in readers.items() if reader not in names]
        return bind(template, {**slots, **{site.result: Slot(site.source) for site in raw}})

    results = {program.sites[site].result for site in readers}
    steps = tuple(
        replace(
            step,
            args=rewired(step.args, step.name),
            kwargs=rewired(step.kwargs, step.name),
            reads=tuple(dict.fromkeys(slot.number for slot in rewired([*map(Slot, step.reads)], step.name))),
        )
        if results.intersection(step.reads)
        else replace(step)
        for step in program.steps
    )
    outputs = rewired(program.outputs, "output")
    mark_lifetimes(steps, outputs, [*program.inputs, *(constant.slot for constant in program.constants)])
    return replace(program, steps=steps, outputs=outputs)


def fitted(lowest: float, highest: float, low: int, high: int) -> QuantParams:
    """Parameters per tensor that cover a range and 0: ``scale = (highest - lowest) / (high - low)``."""
    by_channel = fitted_by_channel(torch.tensor([lowest]), torch.tensor([highest]), None, low, high)
    scale, zero_point = by_channel.scale, by_channel.zero_point
    assert isinstance(scale, Tensor)
    assert isinstance(zero_point, Tensor)
    return replace(by_channel, scale=float(scale), zero_point=int(zero_point))


def fitted_by_channel(lowest: Tensor, highest: Tensor, axis: int | None, low: int, high: int) -> QuantParams:
    """The same for each channel, which no kernel has for activations: it shows what their unequal ranges cost."""
    lowest, highest = lowest.clamp(max=0.0), highest.clamp(min=0.0)
    scale = ((highest - lowest) / (high - low)).clamp_(min=EPSILON)
    zero_point = (low - torch.round(lowest / scale)).clamp_(low, high)
    return QuantParams("", scale, zero_point, low, high, axis)


def fitted_weight(value: Tensor, axis: int | None) -> QuantParams:
    """int8 as kernels take weights: symmetric, -127..127, one scale for each output channel."""
    others = [each for each in range(value.dim()) if each != axis]
    largest = value.abs().amax(others) if axis is not None and others else value.abs().amax().reshape(1)
    scale = (largest / 127.0).clamp_(min=EPSILON)
    if axis is None:
        return QuantParams("", float(scale), 0, -127, 127)
    return QuantParams("", scale, torch.zeros_like(scale), -127, 127, axis)


def _site_function(rounding: Callable[..., Tensor]) -> SiteFunction:
    def rounded(x: Tensor, *, out: Tensor | None = None, stats: Any = None) -> Tensor:
        return rounding(x, out=out)

    return rounded
