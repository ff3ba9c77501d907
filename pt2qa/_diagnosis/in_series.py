"""Sites in series: one behind the other, with only ops between them that pick values or clip them.

Behind a relu that is not fused, a value is rounded that was rounded before it, often alike.  Alone, the second site
makes the noise of the first; behind it, it adds little or nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2qa._sensitivity.roundings import Rounding, own_rounding
from pt2qa._simulator import op_rules
from pt2qa._simulator.program import Program, Site, Slot, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.site_functions import is_elementwise

MOST = 1 << 16
"""Most values of a site that are tried one by one."""

CLOSE = 1e-3
"""Change, as a share of the scale, up to which a value counts as unchanged."""


@dataclass(frozen=True, slots=True)
class Before:
    """The site before another one.

    Attributes:
        site: it.
        leaves: maps the reference's value of the second site to its value with the first one on.
        settles: whether the second site changes none of the values that the first one leaves.
    """

    site: Site
    leaves: Rounding
    settles: bool


def sites_before(simulator: Simulator) -> dict[int, Before]:
    """By site, the one before it in series; both have fixed scales for their whole tensor."""
    found = {}
    for step in simulator.program.steps:
        if step.site is not None and step.duplicate_of is None and is_elementwise(step.function):
            before = _before(simulator, step, simulator.program.sites[step.site])
            if before is not None:
                found[step.site] = before
    return found


def _before(simulator: Simulator, last: Step, site: Site) -> Before | None:
    found = _origin(simulator.program, last.reads[0])
    if found is None:
        return None
    first, clips = found
    return Before(first, *_effect(simulator, first, clips, own_rounding(simulator, site)))


def _origin(program: Program, slot: int) -> tuple[Site, tuple[Step, ...]] | None:
    """The site that a value comes from, through ops that pick and the clips that are returned, in order.

    Values that are put together come from one if their sites round alike.
    """
    producer = program.producers.get(slot)
    if producer is None:
        return None
    step = program.steps[producer]
    if step.site is not None:
        return (program.sites[step.site], ()) if is_elementwise(step.function) else None
    if step.op == "cat" and not step.constants:
        return _one_origin([_origin(program, read) for read in step.reads])
    clips = op_rules.keeps_order(step.function)
    if not step.reads or step.args[:1] != (Slot(step.reads[0]),) or not (clips or _picks(step)):
        return None
    found = _origin(program, step.reads[0])
    return found if found is None or not clips else (found[0], (*found[1], step))


def _one_origin(found: Sequence[tuple[Site, tuple[Step, ...]] | None]) -> tuple[Site, tuple[Step, ...]] | None:
    origins = [each for each in found if each is not None]
    alike = {(site.params, clips) for site, clips in origins}
    return origins[0] if len(origins) == len(found) and len(alike) == 1 else None


def _picks(step: Step) -> bool:
    """Whether each value of the result is one of the first argument, or zero, which every site can represent."""
    if step.op == "pad":
        return not any(isinstance(each, int | float) and each for each in step.args[2:])
    return op_rules.only_moves(step.function) or step.op == "max_pool2d"


def _effect(simulator: Simulator, first: Site, clips: Sequence[Step], own: Rounding) -> tuple[Rounding, bool]:
    before, params = own_rounding(simulator, first), first.params

    def clipped(value: Tensor) -> Tensor:
        return functools.reduce(lambda x, step: simulator.call(step, {step.reads[0]: x}, False), clips, value)

    ends = torch.tensor([-torch.inf, torch.inf])
    with torch.no_grad():
        (low, high), (lowest, highest) = (clipped(each).tolist() for each in (ends, before(ends)))
        alike = clipped(before(clipped(ends))).tolist() == [lowest, highest]

    def leaves(value: Tensor) -> Tensor:
        rounded = clipped(before(value))
        if alike:
            return rounded
        # A value at the end of a clip may have been beyond it.
        return torch.where(value >= high, highest, torch.where(value <= low, lowest, rounded))

    scale, zero_point, count = params.scale, params.zero_point, params.quant_max - params.quant_min + 1
    assert isinstance(scale, float)
    assert isinstance(zero_point, int)
    if count > MOST:
        return leaves, False
    with torch.no_grad():
        values = clipped((torch.arange(count) + (params.quant_min - zero_point)) * scale)
        return leaves, torch.allclose(own(values), values, rtol=0.0, atol=CLOSE * scale)
