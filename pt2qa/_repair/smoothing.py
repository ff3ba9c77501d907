"""Outliers of norms moved into the weights of the linears that read them, as far as that helps the output.

A few large channels of an activation make its steps coarse for all others.  With s a factor for each channel, the
output of the norm is divided by s and the columns of the weights are multiplied by it::

    s = amax(|x|)**alpha / amax(|weight|)**(1 - alpha),   to the nearest power of two, 1 for the median channel

so the float model is the same, bit for bit.  For each norm, alpha, or no change, is what costs the output least, to
first order, and as if the errors of elements were independent::

    sum(g**2 * (s * rounded(x / s) - x)**2) + sum((gy.T @ x)**2 * (rounded(weight * s) / s - weight)**2)

with g and gy the gradients of a random projection of the output, each output divided by its root mean square, at the
norm and at each linear's output.

Source:
    the formula of s is that of "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
    Models" (Xiao et al., 2023), with one alpha for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import visit_gradients
from pt2qa._repair.norms import FittedNorms, costs_of, on_all_ranks, ranges_by_channel, rounding_of
from pt2qa._report.prose import counted
from pt2qa._sensitivity.roundings import rounding
from pt2qa._simulator.program import Constant, Site, Slot, Step
from pt2qa._trials.folds import Folds
from pt2qa.errors import SelectionError
from pt2qa.overrides.norms import norms_in

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""What is tried for each norm, beside no change."""

LEAST = 0.02
"""The share of a norm's cost that a change must save."""

LARGEST = 16
"""The largest exponent of a factor."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm whose output only linears read: the ops of an edit, the steps, the weights, and the site of the output."""

    ops: tuple[str, ...]
    step: int
    linears: Mapping[int, Constant]
    site: Site | None


@dataclass(frozen=True, slots=True)
class Smoothing:
    """What one look at the data tells about norms: their candidates, no change first, and what these cost by fold."""

    name: ClassVar[str] = "smoothing"

    left_out: str

    norms: tuple[Norm, ...]
    candidates: tuple[tuple[Tensor, ...], ...]
    costs: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Smoothing:
        norms = tuple(_norms_in(pair))
        if not norms:
            raise SelectionError("no norm with a weight is read by quantized linears only")
        by_step = ranges_by_channel(pair, {norm.step for norm in norms}, data)
        ranges = [by_step[norm.step] for norm in norms]
        candidates = tuple(tuple(_candidates(norm, *found)) for norm, found in zip(norms, ranges, strict=True))
        meter = _Meter(pair, norms, ranges, candidates)
        costs = on_all_ranks(data.added_up(meter.add, meter.costs))
        all_norms = sum(step.op in ("layer_norm", "rms_norm") for step in pair.program.steps)
        own = sum(pair.program.steps[norm.step].op != "mul" for norm in norms)
        left_out = f"{all_norms - own} of {counted(all_norms, 'norm')} unchanged: not read by quantized linears only"
        return cls(left_out if all_norms > own else "", norms, candidates, costs)

    def fit(self, folds: Collection[int]) -> FittedNorms:
        found = {}
        for number, norm in enumerate(self.norms):
            costs = torch.stack([self.costs[fold][number] for fold in folds]).sum(0)
            best = int(costs.argmin())
            if float(costs[best]) < float(costs[0]) * (1 - LEAST):
                found[norm.ops] = self.candidates[number][best]
        return FittedNorms("smooth", found)


def _norms_in(pair: QuantizedPair) -> Iterator[Norm]:
    """The norms that an edit can smooth, with a rounded weight behind them."""
    assert pair.float_graph is not None, "what is repaired was captured"
    program = pair.program
    steps = {step.name: step for step in program.steps if step.site is None}
    times = Counter(step.name for step in program.steps if step.site is None)
    constants = {each.slot: each for each in program.constants}
    for found in norms_in(pair.float_graph, pair.names):
        if not found.can_smooth or any(times[name] != 1 for name in found.ops):
            continue
        linears = [steps[name] for name in found.linears]
        weights = {step.index: constants[slot] for step in linears for slot in _slots(step.args[1:2])}
        sites = [pair.sites[site] for step in linears for site in _sites_before(pair, step)]
        rounded = any(each.site is not None for each in weights.values())
        if rounded and len(weights) == len(linears):
            yield Norm(found.ops, steps[found.name].index, weights, sites[0] if sites else None)


def _slots(args: Sequence[Any]) -> list[int]:
    return [each.number for each in args if isinstance(each, Slot)]


def _sites_before(pair: QuantizedPair, step: Step) -> Iterator[int]:
    program = pair.program
    for slot in _slots(step.args[:1]):
        site = program.steps[program.producers[slot]].site if slot in program.producers else None
        if site is not None:
            yield site


def _candidates(norm: Norm, low: Tensor, high: Tensor) -> Iterator[Tensor]:
    """Factors: ones, and those of each alpha."""
    activation = torch.maximum(-low, high).double()
    weights = [constant.reference.detach().abs().amax(0).cpu() for constant in norm.linears.values()]
    weight = torch.stack(weights).amax(0).double()
    yield torch.ones(len(activation))
    both = (activation > 0) & (weight > 0)
    if not both.any():
        return
    for alpha in ALPHAS:
        exponents = alpha * activation.log2() - (1 - alpha) * weight.log2()
        exponents = (exponents - exponents[both].median()).round().clamp(-LARGEST, LARGEST)
        yield torch.where(both, exponents, 0.0).exp2().float()


class _Meter:
    """The costs of candidates, and what those of weights need: sums of the squares of ``gy.T @ x``."""

    def __init__(
        self,
        pair: QuantizedPair,
        norms: Sequence[Norm],
        ranges: Sequence[tuple[Tensor, Tensor]],
        candidates: Sequence[Sequence[Tensor]],
    ) -> None:
        self.pair, self.norms, self.candidates = pair, norms, candidates
        self.by_step = {norm.step: number for number, norm in enumerate(norms)}
        self.linears = {step for norm in norms for step, weight in norm.linears.items() if weight.site is not None}
        self.roundings = [
            [rounding_of(pair, norm.site, low / factors, high / factors) for factors in own]
            for norm, (low, high), own in zip(norms, ranges, candidates, strict=True)
        ]
        self.activations = tuple([torch.zeros(len(own), dtype=torch.float64) for own in candidates] for _ in (0, 1))
        self.products: tuple[dict[int, Tensor], ...] = ({}, {})

    def add(self, fold: int, values: list[Any]) -> None:
        def visit(step: Step, gradients: Sequence[Tensor], env: Any) -> None:
            number = self.by_step.get(step.index)
            if number is not None and self.norms[number].site is not None:
                self.activations[fold][number] += costs_of(gradients, self._errors(number, env[step.out]))
            elif step.index in self.linears:
                [slot] = _slots(step.args[:1])
                rows = env[slot].reshape(-1, env[slot].shape[-1])
                for gradient in gradients:
                    product = (gradient.reshape(-1, gradient.shape[-1]).T @ rows).square()
                    known = self.products[fold].get(step.index)
                    self.products[fold][step.index] = product if known is None else known.add_(product)

        visit_gradients(self.pair, values, visit)

    def _errors(self, number: int, value: Tensor) -> Iterator[Tensor]:
        for factors, rounded in zip(self.candidates[number], self.roundings[number], strict=True):
            own = factors.to(value)
            yield rounded(value / own) * own - value

    def costs(self) -> tuple[tuple[Tensor, ...], ...]:
        found = tuple([each.clone() for each in own] for own in self.activations)
        for number, norm in enumerate(self.norms):
            for step, weight in norm.linears.items():
                if weight.site is None:
                    continue
                for place, factors in enumerate(self.candidates[number]):
                    error = self._weight_error(weight, factors).square()
                    for fold in (0, 1):
                        if step in self.products[fold]:
                            cost = (error * self.products[fold][step]).sum(dtype=torch.float64)
                            found[fold][number][place] += cost.nan_to_num(0.0, 0.0, 0.0).cpu()
        return tuple(map(tuple, found))

    def _weight_error(self, weight: Constant, factors: Tensor) -> Tensor:
        """The error of a weight with factors, in terms of the one without; its scale follows its largest values."""
        assert weight.site is not None
        params, value = self.pair.sites[weight.site].params, weight.reference.detach()
        own = factors.to(value)
        scaled = value * own
        others = [axis for axis in range(value.dim()) if axis != params.axis]
        growth = (scaled.abs().amax(others) / value.abs().amax(others).clamp(min=1e-30)).float()
        growth = growth.clamp(min=1e-30) if params.axis is not None else growth
        scale: Any = params.scale
        scale = scale * growth if isinstance(scale, Tensor) else scale * float(growth.max())
        error: Tensor = rounding(replace(params, scale=scale))(scaled) / own - value
        return error
