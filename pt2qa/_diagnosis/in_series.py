"""Sites in series: one behind the other, with only ops between them that pick values or clip them.

A nested graph is in series with what it is given and what reads its results.

Behind a relu that is not fused, a value is rounded that was rounded before it, often alike.  Alone, the second site
makes the noise of the first; behind it, it adds little or nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import HigherOrderOperator, pytree
from pt2qa._sensitivity.roundings import Rounding, own_rounding
from pt2qa._simulator import op_rules
from pt2qa._simulator.program import Nested, Program, Site, Slot, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.site_functions import is_elementwise

MOST = 1 << 16
"""Most values of a site that are tried one by one."""

CLOSE = 1e-3
"""Change, as a share of the scale, up to which a value counts as unchanged."""


@dataclass(frozen=True, slots=True)
class Before:
    """The site before another one.

    ``leaves`` maps the reference's value of the second site to its value with the first one on; ``settles`` says that
    the second site changes none of these.
    """

    site: Site
    leaves: Rounding
    settles: bool


def sites_before(simulator: Simulator) -> dict[int, Before]:
    """By site, the one before it in series; both have fixed scales for their whole tensor."""
    found = {}
    for series in _Series(simulator.program, simulator.program.sites, {}).each():
        for step in series.program.steps:
            if step.site is not None and step.duplicate_of is None and is_elementwise(step.function):
                site, origin = series.sites[step.site], series.origin(step.reads[0])
                if origin is not None:
                    effect = _effect(simulator, *origin, own_rounding(simulator, site))
                    found[site.index] = Before(origin[0], *effect)
    return found


_Origin = tuple[Site, tuple[Step, ...]]
"""A site that a value comes from, through ops that pick, and the clips among them, in order."""


@dataclass(frozen=True, slots=True)
class _Series:
    """A program, its sites as numbered in the outermost one, and where its inputs come from, by slot."""

    program: Program
    sites: Sequence[Site]
    inputs: Mapping[int, _Origin | None]

    def origin(self, slot: int) -> _Origin | None:
        """The site that a value comes from.

        Values that are put together come from one if their sites round alike.
        """
        producer = self.program.producers.get(slot)
        if producer is None:
            return self.inputs.get(slot)
        step = self.program.steps[producer]
        if step.site is not None:
            return (self.sites[step.site], ()) if is_elementwise(step.function) else None
        if step.op == "cat" and not step.constants:
            return _one_origin([self.origin(read) for read in step.reads])
        if step.function is operator.getitem:
            before = self.program.steps[self.program.producers[step.reads[0]]]
            if bodies := self._bodies(before):  # the first graph of a while_loop only says whether to go on
                giving = bodies[1:] if op_of(before.function) == "while_loop" else bodies
                return _one_origin([None if body is None else body.output(step.args[1]) for body in giving])
        clips = op_rules.keeps_order(step.function)
        if not step.reads or step.args[:1] != (Slot(step.reads[0]),) or not (clips or _picks(step)):
            return None
        found = self.origin(step.reads[0])
        return found if found is None or not clips else (found[0], (*found[1], step))

    def output(self, number: int) -> _Origin | None:
        outputs = self.program.outputs if isinstance(self.program.outputs, list | tuple) else [self.program.outputs]
        return self.origin(outputs[number].number) if isinstance(outputs[number], Slot) else None

    def each(self) -> Iterator[_Series]:
        yield self
        for step in self.program.steps:
            for body in self._bodies(step):
                yield from () if body is None else body.each()

    def _bodies(self, step: Step) -> list[_Series | None]:
        """The nested graphs that a step calls, None for one without sites.

        What a loop carries comes from one site if the loop is given it and returns it rounded alike.
        """
        if not isinstance(step.function, HigherOrderOperator):
            return []
        stored = {constant.slot: constant.stored for constant in self.program.constants}
        called = [stored.get(each.number) if isinstance(each, Slot) else None for each in step.args]
        graphs = [number for number, each in enumerate(called) if isinstance(each, Nested | GraphModule)]
        given = step.args[graphs[-1] + 1 :] if graphs else ()
        origins = [self.origin(each.number) if isinstance(each, Slot) else None for each in pytree.tree_leaves(given)]
        carried = len(given[0]) if op_of(step.function) in ("while_loop", "scan") else 0

        def made(first: Sequence[_Origin | None]) -> list[_Series | None]:
            inputs = [*first, *origins[carried:]]
            return [
                _Series(each.program, [self.sites[own] for own in each.sites], _by_slot(each.program, inputs))
                if isinstance(each := called[number], Nested)
                else None
                for number in graphs
            ]

        *_, body = made([None] * carried) or [None]
        if body is None:
            return made([None] * carried)
        return made([_one_origin([origins[number], body.output(number)]) for number in range(carried)])


def _by_slot(program: Program, inputs: Sequence[_Origin | None]) -> dict[int, _Origin | None]:
    return dict(zip(program.inputs, inputs, strict=False))


def _one_origin(found: Sequence[_Origin | None]) -> _Origin | None:
    origins = [each for each in found if each is not None]
    alike = {(site.params, *(id(clip) for clip in clips)) for site, clips in origins}
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
