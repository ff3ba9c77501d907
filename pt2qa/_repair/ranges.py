"""Ranges chosen by what they do to the output, for each group of values that share one.

To first order, and as if the errors of elements were independent, rounding a value x changes the output by::

    sum(g**2 * (rounded(x) - x)**2)

with g the gradient of a random projection of the output, each output divided by its root mean square.  Candidates are
the group's own range, and the range of the data with each end drawn in; so a few large values are clamped where that
costs less than the coarser steps that they require.  All candidates are compared on one histogram of x with weights
g**2, for which one forward and one backward pass of each batch suffice.

Far from the range that calibration chose, that is too optimistic: clamping changes a value in the same direction each
time, so what several groups clamp adds up, and behind a large value a norm is far from linear.  So weaker repairs are
tried, too: with r how much an end of a range is drawn in, for all groups r**(1/2) or r**(1/4), as in a line search.

Source:
    the squared error of clipping against that of rounding is in "Post-training 4-bit quantization of convolution
    networks for rapid-deployment" (Banner et al., 2019); weighted with gradients, as the Fisher information is, in
    "Up or Down? Adaptive Rounding for Post-Training Quantization" (Nagel et al., 2020).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2qa._metrics import chunks, float64
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import Look, squared, visit_gradients
from pt2qa._sensitivity.gradients import float_tensors
from pt2qa._sensitivity.ranges import observe
from pt2qa._sensitivity.roundings import fitted, fitted_by_channel, rounding, with_roundings
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.data import Counted
from pt2qa._simulator.program import Program, QuantParams, Site, Step
from pt2qa._trials.outcome import Add, Folds, Item, Sums, total
from pt2qa.errors import SelectionError
from pt2qa.overrides.edits import can_observe
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import Point

FACTORS = tuple(step / 20 for step in range(20, -1, -1))
"""How far each end of the range of the data is drawn in."""

LEAST = 0.02
"""The share of a group's cost that another range must save."""

WEAKER = (0.5, 0.25)
"""Exponents of how much ends are drawn in."""

BINS = 1 << 12
"""Bins of a histogram: at least 16 for each of 256 steps."""


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Sites that share a range; ``symmetric`` ranges have their middle at 0."""

    sites: tuple[int, ...]
    name: str
    params: QuantParams
    symmetric: bool


@dataclass(frozen=True, slots=True)
class Histogram:
    """The weights of a group's values by multiples of ``width``, the first of them ``start * width``."""

    start: int
    width: float
    weights: Tensor

    def cost(self, candidates: QuantParams) -> Tensor:
        """The cost of each scale with its zero point, of shape (candidates,): float64 of that shape."""
        values = (torch.arange(len(self.weights), dtype=torch.float64) + self.start) * self.width
        scale, zero = (torch.as_tensor(each).double()[:, None] for each in (candidates.scale, candidates.zero_point))
        steps = torch.round(values / scale).clamp(candidates.quant_min - zero, candidates.quant_max - zero)
        return (steps * scale - values).square() @ self.weights


def groups_in(pair: QuantizedPair) -> tuple[RangeGroup, ...]:
    assert pair.recipe is not None, "what is repaired is quantized again"
    annotations = pair.recipe.annotations
    by_group: dict[Point, list[Site]] = defaultdict(list)
    fixed: set[Point] = set()
    for index, points in annotations.points_at(pair.sites).items():
        site = pair.sites[index]
        if site.kind == "activation":
            for group in {annotations.groups[point] for point in points}:
                by_group[group].append(site)
            fixed |= {
                annotations.groups[point]
                for point in points
                if not can_observe(point, annotations.specs, annotations.graph)
            }
    found = []
    for group, sites in by_group.items():
        params = sites[0].params
        known = all(isinstance(each.params.scale, float) and isinstance(each.params.zero_point, int) for each in sites)
        if known and group not in fixed and all(site.params == params for site in sites):
            symmetric = annotations.facts(group).scheme == "per_tensor_symmetric"
            found.append(RangeGroup(tuple(site.index for site in sites), sites[0].name, params, symmetric))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class FittedRanges:
    groups: Mapping[RangeGroup, QuantParams]

    @property
    def weaker(self) -> tuple[FittedRanges, ...]:
        return tuple(
            FittedRanges({group: _between(group, each, exponent) for group, each in self.groups.items()})
            for exponent in WEAKER
        )

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(
            Edit("range", (group.name,), scale=float(each.scale), zero_point=int(each.zero_point))  # type: ignore[arg-type]
            for group, each in self.groups.items()
        )

    def program(self, pair: QuantizedPair) -> Program:
        roundings = {site: rounding(each) for group, each in self.groups.items() for site in group.sites}
        return with_roundings(pair.program, roundings)


@dataclass(frozen=True, slots=True)
class Ranges(Look):
    """By fold, the histograms of groups whose values are not all alike, over ``spans``, the ranges of all data."""

    name: ClassVar[str] = "ranges"

    groups: tuple[RangeGroup, ...]
    spans: Mapping[int, tuple[float, float]]
    histograms: tuple[Sums, Sums]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Ranges:
        groups = groups_in(pair)
        if not groups:
            raise SelectionError("no activation has a range that calibration chose")
        observed = observe(pair, ((item.values, Counted(None, {}, pair.program)) for item in data))
        spans = {}
        for number, group in enumerate(groups):
            ends = [end for site in group.sites for end in observed[site].whole]
            low, high = min(*ends, 0.0), max(*ends, 0.0)
            if high > low and math.isfinite(high - low):
                spans[number] = (low, high)
        group_of = {site: number for number in spans for site in groups[number].sites}

        def add_batch(item: Item, add: Add) -> None:
            def visit(step: Step, gradients: Sequence[Tensor], env: Any) -> None:
                number = None if step.site is None or step.duplicate_of is not None else group_of.get(step.site)
                if number is not None:
                    [value] = float_tensors(env[step.reads[0]])
                    add(number, _weighted(value, gradients, *spans[number]))

            visit_gradients(pair, item, visit)

        return cls(groups, spans, data.summed(add_batch))

    def fit(self, folds: Collection[int]) -> FittedRanges:
        found = {}
        for number, weights in total(self.histograms, folds).items():
            low, high = self.spans[number]
            start, width = _grid(low, high)
            group = self.groups[number]
            best = _best(group, low, high, Histogram(start, width, weights))
            if best is not group.params:
                found[group] = best
        return FittedRanges(found)


def _grid(low: float, high: float) -> tuple[int, float]:
    width = (high - low) / BINS
    return round(low / width) - 1, width


def _weighted(value: Tensor, gradients: Sequence[Tensor], low: float, high: float) -> Tensor:
    """The sums of the squared gradients by bin of the value: float64 of shape (BINS + 3,)."""
    start, width = _grid(low, high)
    sums = torch.zeros(BINS + 3, dtype=torch.float64)
    for own, squares in chunks((value, squared(gradients))):
        bins = torch.add(0.5 - start, own.float(), alpha=1 / width).clamp_(0.0, BINS + 2.5).nan_to_num_(0.0)
        weights = float64(squares)  # on the CPU where the device has no float64
        sums += torch.bincount(bins.to(torch.int32).to(weights.device), weights=weights, minlength=BINS + 3).cpu()
    return sums


def _best(group: RangeGroup, low: float, high: float, histogram: Histogram) -> QuantParams:
    """The range of the least cost, each end drawn in by itself, in turns."""
    own = group.params

    def params(ends: Tensor) -> QuantParams:
        """Of ranges whose ends are drawn in, of shape (candidates, 2): a scale and a zero point for each."""
        left, right = ends.unbind(1)
        if group.symmetric:
            scale = 2 * max(-low, high) * right / (own.quant_max - own.quant_min)
            return replace(own, scale=scale.float(), zero_point=torch.full_like(right, int(own.zero_point)))  # type: ignore[arg-type]
        return fitted_by_channel((low * left).float(), (high * right).float(), None, own.quant_min, own.quant_max)

    whole = replace(own, scale=torch.tensor([own.scale]), zero_point=torch.tensor([own.zero_point]))
    ends, best, least = torch.ones(2, dtype=torch.float64), own, float(histogram.cost(whole)[0]) * (1 - LEAST)
    for end in (1,) if group.symmetric else (1, 0, 1, 0):
        tries = ends.repeat(len(FACTORS), 1)
        tries[:, end] = torch.tensor(FACTORS, dtype=torch.float64)
        tries = tries[(low * tries[:, 0] < high * tries[:, 1]) & (tries[:, 1] > 0 if group.symmetric else True)]
        found = params(tries)
        costs = histogram.cost(found)
        number = int(costs.argmin())
        better = float(costs[number]) < least
        if better or best is own:
            ends = tries[number]
        if better:
            scale, zero_point = (torch.as_tensor(each)[number].item() for each in (found.scale, found.zero_point))
            best, least = replace(own, scale=float(scale), zero_point=int(zero_point)), float(costs[number])
    return best


def _between(group: RangeGroup, other: QuantParams, exponent: float) -> QuantParams:
    """The group's own range, each end times the share that another range leaves of it to the power of ``exponent``."""
    own = group.params
    if group.symmetric:
        return replace(own, scale=_power(float(own.scale), float(other.scale), exponent))  # type: ignore[arg-type]
    low, high = (_power(*each, exponent) for each in zip(limits(own), limits(other), strict=True))
    return with_ends(group, low, high)


def moved(group: RangeGroup, before: tuple[float, float], after: tuple[float, float]) -> QuantParams:
    """The group's own range, each end as far within that of the values as it was, where that has become another."""
    own = group.params
    if group.symmetric:
        growth = max(-after[0], after[1], 1e-30) / max(-before[0], before[1], 1e-30)  # 1 where all values are 0
        return replace(own, scale=float(own.scale) * growth)  # type: ignore[arg-type]
    low, high = (
        own_end * end / whole if whole else own_end
        for own_end, whole, end in zip(limits(own), before, after, strict=True)
    )
    return with_ends(group, low, high)


def with_ends(group: RangeGroup, low: float, high: float) -> QuantParams:
    """The group's parameters with another range; a symmetric one reaches as far as its longer end on both sides."""
    own = group.params
    if group.symmetric:
        return replace(own, scale=2 * max(-low, high) / (own.quant_max - own.quant_min))
    found = fitted(low, high, own.quant_min, own.quant_max)
    return replace(own, scale=found.scale, zero_point=found.zero_point)


def _power(own: float, other: float, exponent: float) -> float:
    """The geometric mean with weights; the arithmetic one where there is none."""
    if own * other > 0:
        return own * math.pow(other / own, exponent)
    return own + (other - own) * exponent
