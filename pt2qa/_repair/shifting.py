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

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._repair.guard import visit_gradients
from pt2qa._report.prose import counted
from pt2qa._sensitivity.roundings import Rounding, fitted, own_rounding, rounding
from pt2qa._simulator.program import Site, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.folds import Folds
from pt2qa.errors import SelectionError
from pt2qa.overrides.norms import KEEPS_CHANNELS, ReadNorm, norms_in
from pt2qa.overrides.plan import Edit, in_base64

LEAST = 0.1
"""The share of a norm's cost that a shift must save, against none, and against one that is tried before it; and that of
all norms' cost that all shifts must save, so that calibrating again is worth it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value that moves is rounded: the number of the norm, the op that makes it, and the step of the site.

    ``sign`` is -1 at the norm, from which z is subtracted, and 1 at what is added to it.
    """

    norm: int
    source: Step
    rounded: Step
    sign: int


@dataclass(frozen=True, slots=True)
class FittedShifts:
    """Shifts of some norms, by the ops of the edit: float32 of shape (channels,)."""

    weaker: ClassVar[tuple[()]] = ()

    values: Mapping[tuple[str, ...], Tensor]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(Edit("shift", ops, values=in_base64(values.tolist())) for ops, values in self.values.items())

    def simulator(self, pair: QuantizedPair) -> Simulator | None:
        """None: observers see other values."""
        return None


@dataclass(frozen=True, slots=True)
class Shifting:
    """What one look at the data tells about norms: their candidates, no shift first, and what they cost at each place.

    ``costs`` are by fold, and of shape (candidates,).
    """

    name: ClassVar[str] = "shifting"

    left_out: str

    norms: tuple[ReadNorm, ...]
    candidates: tuple[tuple[Tensor, ...], ...]
    places: tuple[Place, ...]
    costs: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Shifting:
        norms, places = _norms_in(pair)
        if not norms:
            raise SelectionError("no quantized norm has a bias that the biases around it can absorb")
        ranges = ranges_by_channel(pair, {place.source.index for place in places}, data)
        at_norm = {place.norm: ranges[place.source.index] for place in places if place.sign < 0}
        candidates = tuple(tuple(_candidates(*at_norm[number])) for number in range(len(norms)))
        meter = _Meter(pair, places, candidates, ranges)
        costs = on_all_ranks(data.added_up(meter.add, lambda: meter.sums))
        all_norms = sum(step.op == "layer_norm" for step in pair.program.steps)
        left = all_norms - len({place.norm for place in places if place.source.op == "layer_norm"})
        left_out = f"{left} of {counted(all_norms, 'norm')} unchanged: not quantized, or no biases to absorb a shift"
        return cls(left_out if left > 0 else "", norms, candidates, places, costs)

    def fit(self, folds: Collection[int]) -> FittedShifts:
        found = {}
        before = saved = 0.0
        for number, norm in enumerate(self.norms):
            own = [place for place, each in enumerate(self.places) if each.norm == number]
            costs = torch.stack([self.costs[fold][place] for fold in folds for place in own]).sum(0).tolist()
            best = 0
            for candidate, cost in enumerate(costs):
                if cost < costs[best] * (1 - LEAST):
                    best = candidate
            if best:
                found[norm.ops] = self.candidates[number][best]
            before, saved = before + costs[0], saved + costs[0] - costs[best]
        if saved < before * LEAST:
            found = {}
        return FittedShifts(found)


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
            Place(len(norms), steps[name], rounded, sign)
            for name, sign in ends
            for rounded in _rounded(pair, steps[name])
        ]
        if any(place.sign < 0 for place in own):
            norms.append(norm)
            places += own
    return tuple(norms), tuple(places)


def _rounded(pair: QuantizedPair, source: Step) -> Iterator[Step]:
    """The first sites behind an op, through ops that leave the channels where they are."""
    reached = {source.out}
    for step in pair.program.steps[source.index + 1 :]:
        if step.reads and step.reads[0] in reached:
            if step.site is not None:
                if step.duplicate_of is None:
                    yield step
            elif step.op in KEEPS_CHANNELS:
                reached.add(step.out)


def _candidates(low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Shifts of channels with some lowest and highest values: none, around 0, and into the range of the widest."""
    yield torch.zeros_like(low)
    yield (low + high) / 2
    widest = int((high - low).argmax())
    yield (high - high[widest]).clamp(min=0.0) + (low - low[widest]).clamp(max=0.0)


class _Meter:
    def __init__(
        self,
        pair: QuantizedPair,
        places: Sequence[Place],
        candidates: Sequence[Sequence[Tensor]],
        ranges: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        self.pair = pair
        self.by_step = {place.rounded.index: number for number, place in enumerate(places)}
        self.shifts = [[place.sign * shift for shift in candidates[place.norm]] for place in places]
        self.roundings = [
            [_rounding(pair, place, shift, *ranges[place.source.index]) for shift in shifts]
            for place, shifts in zip(places, self.shifts, strict=True)
        ]
        self.sums = tuple([torch.zeros(len(each), dtype=torch.float64) for each in self.shifts] for _ in (0, 1))

    def add(self, fold: int, values: list[Any]) -> None:
        def visit(step: Step, gradients: Sequence[Tensor], env: Any) -> None:
            number = self.by_step.get(step.index)
            if number is not None:
                self.sums[fold][number] += costs_of(gradients, self._errors(number, env[step.reads[0]]))

        visit_gradients(self.pair, values, visit)

    def _errors(self, number: int, value: Tensor) -> Iterator[Tensor]:
        for shift, rounded in zip(self.shifts[number], self.roundings[number], strict=True):
            moved = value + shift.to(value)
            yield rounded(moved) - moved


def _rounding(pair: QuantizedPair, place: Place, shift: Tensor, low: Tensor, high: Tensor) -> Rounding:
    assert place.rounded.site is not None
    return rounding_of(pair, pair.sites[place.rounded.site], low + shift, high + shift)


def costs_of(gradients: Sequence[Tensor], errors: Iterable[Tensor]) -> Tensor:
    """What the errors of candidates cost the output: float64 of shape (candidates,)."""
    weights = torch.stack([each.square() for each in gradients]).sum(0)
    costs = [(error.square() * weights).sum(dtype=torch.float64) for error in errors]
    return torch.stack(costs).nan_to_num(0.0, 0.0, 0.0).cpu()


def on_all_ranks(parts: Sequence[Sequence[Sequence[Tensor]]]) -> tuple[tuple[Tensor, ...], ...]:
    """The costs of all ranks, by fold."""
    return tuple(
        tuple(torch.stack(each).sum(0) for each in zip(*(costs[fold] for costs in parts), strict=True))
        for fold in (0, 1)
    )


def ranges_by_channel(pair: QuantizedPair, steps: Collection[int], data: Folds) -> dict[int, tuple[Tensor, Tensor]]:
    """The lowest and highest value of some steps' outputs by channel, the last axis, over all data."""
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def visit(step: Step, value: Any) -> None:
        if step.index in steps and isinstance(value, Tensor):
            rows = value.reshape(-1, value.shape[-1]).float().nan_to_num(0.0, 0.0, 0.0)
            low, high = rows.amin(0).cpu(), rows.amax(0).cpu()
            known = own.get(step.index, (low, high))
            own[step.index] = torch.minimum(low, known[0]), torch.maximum(high, known[1])

    for _, values in data:
        pair.simulator.run(values, on=False, visit=visit)
    parts = everywhere(own)
    return {
        step: (
            torch.stack([each[step][0] for each in parts if step in each]).amin(0),
            torch.stack([each[step][1] for each in parts if step in each]).amax(0),
        )
        for step in steps
    }


def rounding_of(pair: QuantizedPair, site: Site | None, low: Tensor, high: Tensor) -> Rounding:
    """How a site would round values of another range; dynamic scales adapt."""
    if site is None:
        return lambda value: value
    if not isinstance(site.params.scale, float):
        return own_rounding(pair.simulator, site)
    params = site.params
    lowest, highest = float(low.min().clamp(max=0.0)), float(high.max().clamp(min=0.0))
    if params.zero_point == 0 and params.quant_min < 0:  # symmetric, or as good as that
        highest = max(-lowest, highest)
        lowest = -highest
    found = fitted(lowest, highest, params.quant_min, params.quant_max)
    return rounding(replace(params, scale=found.scale, zero_point=found.zero_point))
