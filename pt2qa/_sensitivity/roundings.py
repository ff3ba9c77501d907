"""Roundings of a site's value: as variants whose effect is projected, and of a program that runs with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._metrics import value_range
from pt2qa._simulator.fused import is_exact, quantize_dequantize
from pt2qa._simulator.lifetimes import mark_lifetimes, slots_in
from pt2qa._simulator.program import Constant, Nested, Program, QuantParams, Site, Slot
from pt2qa._simulator.simulator import Body, Simulator, bind
from pt2qa._simulator.stored import Stored, ValueCache, read
from pt2qa._simulator.strides import after_rounding

Rounding = Callable[[Tensor], Tensor]
"""Maps a site's value to a fresh one of its shape; to the value itself if that does not change.  At a site with fixed
parameters it may get some samples of the value at a time."""

HALF = 0.501
"""Steps outside a range up to which an error is rounding: half a step, and some for the error of floats, since the
largest value of a symmetric range, ``scale = largest / 127.5``, lies there exactly."""


EPSILON = torch.finfo(torch.float32).eps
"""The smallest scale, as in torchao's observers."""

INTEGERS = {"int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767)}
"""The whole range of a dtype."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One change of a site's value x: from ``start(x)``, or from x itself, to ``end(x)``.

    Variants of a site that share a rounding (equal objects) compute it once, and those of the same change its effect.
    """

    end: Rounding
    start: Rounding | None = None

    @property
    def both(self) -> tuple[Rounding, ...]:
        return (self.end,) if self.start is None else (self.end, self.start)


@dataclass(frozen=True, slots=True)
class InSeries:
    first: Rounding
    then: Rounding

    def __call__(self, value: Tensor) -> Tensor:
        return self.then(self.first(value))


def changes(value: Tensor, roundings: Sequence[Rounding]) -> Iterator[tuple[list[Rounding], Tensor]]:
    """What roundings make of a value, each computed once; those that come to the same are together.

    The results may be written to; what leaves the value as it is comes with the value itself.
    """
    unchanged: list[Rounding] = []
    for first in dict.fromkeys(each.first if isinstance(each, InSeries) else each for each in roundings):
        before = first(value)
        same = [first] if first in roundings else []
        for each in roundings:
            if isinstance(each, InSeries) and each.first == first:
                after = each.then(before)
                if after is before:
                    same.append(each)
                else:
                    yield [each], after
        if before is value:
            unchanged += same
        elif same:
            yield same, before
    if unchanged:
        yield unchanged, value


@dataclass(frozen=True, slots=True)
class OwnRounding:
    """What the quantized model has in place of a site's value: the very op that the simulator runs, or its constant."""

    simulator: Simulator
    slot: int
    step: int | None

    def __call__(self, value: Tensor) -> Tensor:
        if self.step is None:
            constant: Tensor = read(self.simulator.on[self.slot])
            return constant
        # Looked up at each call, because verification may switch fused ops off.
        rounded: Tensor = self.simulator.site_function(self.simulator.program.steps[self.step])(value, out=None)
        return rounded


def own_rounding(simulator: Simulator, site: Site) -> Rounding:
    """A site's own rounding; equal for each call, so that variants share it."""
    if isinstance(body := simulator.on[site.source], Body):
        return own_rounding(body.simulator, body.own(site))
    return OwnRounding(simulator, site.source, simulator.program.producers.get(site.result))


def clamping(params: QuantParams) -> Rounding:
    """The clamp of a site without its rounding.

    x becomes the end of the range, ``(quant_max - zero_point) * scale`` or ``(quant_min - zero_point) * scale``, if it
    is more than half a scale outside, and stays x elsewhere.  So each element's error is either clamping or rounding:
    what rounding then adds is zero where it clamps, and at most half a scale elsewhere.  Scales that are computed from
    each batch clamp nothing.
    """
    if params.scale is None or params.zero_point is None:
        return lambda value: value

    def clamp(value: Tensor) -> Tensor:
        scale, low, high = _limits(params, value)
        lowest, highest = (low - HALF) * scale, (high + HALF) * scale
        if not isinstance(scale, Tensor) and value.numel():
            smallest, largest = value_range(value)
            # A pass over memory for each end that is exceeded, and none for the other.
            clamped = value if largest <= highest else torch.where(value > highest, high * scale, value)
            return clamped if lowest <= smallest else torch.where(value < lowest, low * scale, clamped)
        above, below = value > highest, value < lowest
        if not (above.any() or below.any()):
            return value
        return torch.where(above, high * scale, torch.where(below, low * scale, value)).to(value.dtype)

    return clamp


def rounding(params: QuantParams) -> Callable[..., Tensor]:
    """Quantize-dequantize with one scale and zero point, or one per channel or block, as a converted graph does it.

    The function writes to ``out``, if it is given, which may be the value itself, unless its strides differ from those
    that the pair returns, as where its elements share memory.
    """
    if params.scale is None or params.zero_point is None:
        raise ValueError("the parameters have no scale or zero point")

    def quantize(value: Tensor, *, out: Tensor | None = None) -> Tensor:
        scale, low, high = _limits(params, value)
        fits = out is not None and out.stride() == after_rounding(value)
        steps = torch.mul(value, 1.0 / scale, out=out if fits else None).round_()
        if isinstance(low, Tensor):  # half the time of clamp_ with tensors
            torch.minimum(torch.maximum(steps, low, out=steps), high, out=steps)
        else:
            steps.clamp_(low, high)
        # + 0.0, because integers have no negative zero.
        return steps.mul_(scale).add_(0.0)

    scale, zero_point, low, high = params.scale, params.zero_point, params.quant_min, params.quant_max
    if isinstance(scale, float) and isinstance(zero_point, int) and is_exact(low, high, zero_point):
        return functools.partial(quantize_dequantize, scale=scale, zero_point=zero_point, quant_min=low, quant_max=high)
    return quantize


def _limits(params: QuantParams, value: Tensor) -> tuple[Any, Any, Any]:
    """Scale, and the lowest and highest step from zero; numbers, or tensors that broadcast against the value."""
    scale, zero_point = params.along(value)
    return scale, params.quant_min - zero_point, params.quant_max - zero_point


def with_roundings(program: Program, roundings: Mapping[int, Rounding]) -> Program:
    """A program in which some sites round otherwise; of a constant, any function that rounds its float value."""
    cache = ValueCache(program.weight_cache)
    steps = tuple(
        replace(step, function=functools.partial(_rounded, roundings[step.site]), converted=None, duplicate_of=None)
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
    scale: Any = by_channel.scale
    zero_point: Any = by_channel.zero_point
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


def _rounded(rounding: Callable[..., Tensor], x: Tensor, *, out: Tensor | None = None, stats: Any = None) -> Tensor:
    return rounding(x, out=out)
