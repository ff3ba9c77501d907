"""Offsets of a norm's channels moved into the biases around it, as far as that helps the output.

All channels of an activation share one range.  If they lie in different places, it is wider than that of any channel;
with z subtracted from each channel it need not be.  What reads the norm adds it again: linears in their bias, as
``weight @ z``, and a residual in the bias of the linear whose output is added there.  The output of that linear moves
instead, which is why it has to be counted where it is rounded, too.  Two shifts are tried for each norm:

- all channels around 0;
- the smallest ones with which all channels lie within the range of the widest.

The first is better where ranges are drawn in afterwards, the second moves less of what is added.  For each norm, one of
them, or none, is what costs the output least, to first order, and as if the errors of elements
were independent, summed over the sites that round what moves::

    sum(g**2 * (rounded(x - z) + z - x)**2)

with g the gradient of a random projection of the output, each output divided by its root mean square.

Source:
    the shift of each channel is that of "Outlier Suppression+: Accurate quantization of large language models by
    equivalent and effective shifting and scaling" (Wei et al., 2023), there around 0, and not across a residual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2qa._graph.internals.flow_runtime import BIAS
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._repair.guard import visit_gradients
from pt2qa._report.prose import counted
from pt2qa._sensitivity.roundings import Rounding, fitted, own_rounding, rounding, with_roundings
from pt2qa._simulator.program import Program, Step
from pt2qa._trials.folds import Add, Folds, Sums, total
from pt2qa._trials.reference import Item
from pt2qa.errors import SelectionError
from pt2qa.overrides.norms import KEEPS_CHANNELS, ReadNorm, norms_in
from pt2qa.overrides.plan import Edit, in_base64

LEAST = 0.1
"""The share of a norm's cost that a shift must save, against none, and against one that is tried before it; and that of
all norms' cost that all shifts must save, so that calibrating again is worth it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value that moves is rounded: the number of the norm, the op that makes it, and the step of the site.

    ``sign`` is -1 at the norm, from which z is subtracted, and 1 at what is added to it; ``sites`` are that site and
    those behind it that round the rounded value.
    """

    norm: int
    source: Step
    rounded: Step
    sign: int
    sites: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FittedShifts:
    """Shifts of some norms, float32 of shape (channels,), and how sites round what is shifted."""

    weaker: ClassVar[tuple[()]] = ()

    shifts: tuple[tuple[ReadNorm, Tensor], ...]
    roundings: Mapping[int, Rounding]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(Edit("shift", norm.ops, values=in_base64(values.tolist())) for norm, values in self.shifts)

    def program(self, pair: QuantizedPair) -> Program:
        program = pair.program
        constants = {(each.reader, each.argument): each for each in program.constants}

        def add(name: str, argument: int, shift: Tensor) -> None:
            bias = constants[name, argument]
            constants[name, argument] = replace(bias, stored=bias.reference + shift.to(bias.reference))

        for norm, shift in self.shifts:
            [argument] = [number for (_, number), each in constants.items() if each.attribute == norm.bias]
            add(norm.name, argument, -shift)
            for name in norm.linears:
                weight: Tensor = constants[name, 1].reference.detach()
                add(name, BIAS, weight @ shift.to(weight))
            for name in norm.added:
                add(name, BIAS, shift)
        return with_roundings(replace(program, constants=tuple(constants.values())), self.roundings)


@dataclass(frozen=True, slots=True)
class Shifting:
    """What one look at the data tells about norms: their candidates, no shift first.

    Attributes:
        roundings: for each place, how it rounds with each candidate.
        costs: by fold and place, of shape (candidates,).
    """

    name: ClassVar[str] = "shifting"

    left_out: str

    norms: tuple[ReadNorm, ...]
    candidates: tuple[tuple[Tensor, ...], ...]
    places: tuple[Place, ...]
    roundings: tuple[tuple[Rounding, ...], ...]
    costs: tuple[Sums, Sums]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Shifting:
        norms, places = _norms_in(pair)
        if not norms:
            raise SelectionError("no quantized norm has a bias that the biases around it can absorb")
        ranges = _ranges_by_channel(pair, {place.source.index for place in places}, data)
        at_norm = {place.norm: ranges[place.source.index] for place in places if place.sign < 0}
        candidates = tuple(tuple(_candidates(*at_norm[number])) for number in range(len(norms)))
        roundings = tuple(
            tuple(
                _rounding(pair, place, place.sign * shift, ranges[place.source.index])
                for shift in candidates[place.norm]
            )
            for place in places
        )
        by_step = {place.rounded.index: number for number, place in enumerate(places)}

        def add_batch(item: Item, add: Add) -> None:
            def visit(step: Step, gradients: Sequence[Tensor], env: Any) -> None:
                number = by_step.get(step.index)
                if number is not None:
                    own, value = places[number], env[step.reads[0]]
                    moved = (value + own.sign * shift.to(value) for shift in candidates[own.norm])
                    errors = (rounded(each) - each for rounded, each in zip(roundings[number], moved, strict=True))
                    add(number, _costs(gradients, errors))

            visit_gradients(pair, item, visit)

        costs = data.summed(add_batch)
        all_norms = sum(step.op == "layer_norm" for step in pair.program.steps)
        left = all_norms - len({place.norm for place in places if place.source.op == "layer_norm"})
        left_out = f"{left} of {counted(all_norms, 'norm')} unchanged: not quantized, or no biases to absorb a shift"
        return cls(left_out if left > 0 else "", norms, candidates, places, roundings, costs)

    def fit(self, folds: Collection[int]) -> FittedShifts:
        found: list[tuple[ReadNorm, Tensor]] = []
        chosen: dict[int, Rounding] = {}
        by_place = total(self.costs, folds)
        before = saved = 0.0
        for number, norm in enumerate(self.norms):
            own = [place for place, each in enumerate(self.places) if each.norm == number]
            none = torch.zeros(len(self.candidates[number]), dtype=torch.float64)
            costs = sum((by_place[place] for place in own if place in by_place), none).tolist()
            best = 0
            for candidate, cost in enumerate(costs):
                if cost < costs[best] * (1 - LEAST):
                    best = candidate
            if best:
                found.append((norm, self.candidates[number][best]))
                for place in own:
                    chosen |= dict.fromkeys(self.places[place].sites, self.roundings[place][best])
            before, saved = before + costs[0], saved + costs[0] - costs[best]
        return FittedShifts(tuple(found), chosen) if saved >= before * LEAST else FittedShifts((), {})


def _norms_in(pair: QuantizedPair) -> tuple[tuple[ReadNorm, ...], tuple[Place, ...]]:
    """The norms that an edit can shift and that are rounded, and the places at which shifts are felt."""
    assert pair.float_graph is not None, "what is repaired was captured"
    steps = {step.name: step for step in pair.program.steps if step.site is None}
    times = Counter(step.name for step in pair.program.steps if step.site is None)
    norms: list[ReadNorm] = []
    places: list[Place] = []
    for norm in norms_in(pair.float_graph, pair.names):
        if not norm.can_shift or any(times[name] != 1 for name in norm.ops):
            continue
        ends = ((norm.name, -1), *((name, 1) for name in norm.added))
        own = [
            Place(len(norms), steps[name], rounded, sign, sites)
            for name, sign in ends
            for rounded, sites in _rounded(pair, steps[name])
        ]
        if any(place.sign < 0 for place in own):
            norms.append(norm)
            places += own
    return tuple(norms), tuple(places)


def _rounded(pair: QuantizedPair, source: Step) -> Iterator[tuple[Step, tuple[int, ...]]]:
    """The first sites behind an op, through ops that leave the channels where they are, each with those behind it."""
    first: dict[int, Step | None] = {source.out: None}
    behind: dict[int, tuple[Step, list[int]]] = {}
    for step in pair.program.steps[source.index + 1 :]:
        if not step.reads or step.reads[0] not in first:
            continue
        before = first[step.reads[0]]
        if step.site is not None and step.duplicate_of is None:
            first[step.out] = before = before or step
            behind.setdefault(before.index, (before, []))[1].append(step.site)
        elif step.site is not None or step.op in KEEPS_CHANNELS:
            first[step.out] = before
    for step, sites in behind.values():
        yield step, tuple(sites)


def _candidates(low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Shifts of channels with some lowest and highest values: none, around 0, and into the range of the widest."""
    yield torch.zeros_like(low)
    yield (low + high) / 2
    widest = int((high - low).argmax())
    yield (high - high[widest]).clamp(min=0.0) + (low - low[widest]).clamp(max=0.0)


def _costs(gradients: Sequence[Tensor], errors: Iterable[Tensor]) -> Tensor:
    """What the errors of candidates cost the output: float64 of shape (candidates,)."""
    weights = torch.stack([each.square() for each in gradients]).sum(0)
    costs = [(error.square() * weights).sum(dtype=torch.float64) for error in errors]
    return torch.stack(costs).nan_to_num(0.0, 0.0, 0.0).cpu()


def _ranges_by_channel(pair: QuantizedPair, steps: Collection[int], data: Folds) -> dict[int, tuple[Tensor, Tensor]]:
    """The lowest and highest value of some steps' outputs by channel, the last axis, over all data."""
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def visit(step: Step, value: Any) -> None:
        if step.index in steps and isinstance(value, Tensor):
            rows = value.reshape(-1, value.shape[-1]).float().nan_to_num(0.0, 0.0, 0.0)
            low, high = rows.amin(0).cpu(), rows.amax(0).cpu()
            known = own.get(step.index, (low, high))
            own[step.index] = torch.minimum(low, known[0]), torch.maximum(high, known[1])

    for item in data:
        pair.simulator.run(item.values, on=False, visit=visit)
    parts = everywhere(own)
    return {
        step: (
            torch.stack([each[step][0] for each in parts if step in each]).amin(0),
            torch.stack([each[step][1] for each in parts if step in each]).amax(0),
        )
        for step in steps
    }


def _rounding(pair: QuantizedPair, place: Place, shift: Tensor, ends: tuple[Tensor, Tensor]) -> Rounding:
    """How a place would round values that are shifted; dynamic scales adapt."""
    assert place.rounded.site is not None
    site = pair.sites[place.rounded.site]
    params = site.params
    if not isinstance(params.scale, float):
        own = own_rounding(pair.simulator, site)
        return lambda value, out=None: own(value)
    low, high = (end + shift for end in ends)
    lowest, highest = float(low.min().clamp(max=0.0)), float(high.max().clamp(min=0.0))
    if params.zero_point == 0 and params.quant_min < 0:  # symmetric, or as good as that
        highest = max(-lowest, highest)
        lowest = -highest
    found = fitted(lowest, highest, params.quant_min, params.quant_max)
    return rounding(replace(params, scale=found.scale, zero_point=found.zero_point))
