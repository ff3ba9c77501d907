"""Channels of unequal size made equal, in the weights that write and read them, as far as that helps the output.

All channels of an activation share one range, so its steps are coarse for all that are smaller than the largest.  With
s a factor for each channel, what writes them is divided by s, and the weights that read them are multiplied by it
(:mod:`pt2qa.overrides.channels` says where).  That makes steps of weights coarser, so the factors of all channels of
the model together are those that cost the output least, to first order, and as if the errors of elements were
independent and uniform within their steps::

    sum(g**2 * min((s * step)**2 / 12, x**2)) + sum(G**2 * (s * step)**2 / 12)

with g and G the gradients of random projections of the output, each output divided by its root mean square, at the
activations and at the weights, and s what divides them.  Of a large weight with a scale for each row, some rows stand
for all.  The descent begins at the root of the largest value of each channel.  One forward and one backward pass of
each batch; and nothing is quantized again, because the sites of the given model simply round in other units.

Source:
    scaling through ReLUs is in "Data-Free Quantization Through Weight Equalization and Bias Correction" (Nagel et al.,
    2019), behind norms in "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models"
    (Xiao et al., 2023), both without an output to serve.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2qa._grouping import grouped
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.groups import Group, add_up, fitting, groups_with
from pt2qa._repair.guard import Look
from pt2qa._repair.ranges import moved
from pt2qa._sensitivity.roundings import Rounding, own_rounding, rounding, with_roundings
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.program import Constant, Program, QuantParams, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.outcome import Add, Folds, Sums, total
from pt2qa.errors import SelectionError
from pt2qa.overrides.annotations import observing
from pt2qa.overrides.channels import Chain, Side, channels_in
from pt2qa.overrides.parameters import with_folded_norms
from pt2qa.overrides.plan import Edit, in_base64

STEPS, RATE = 20, 0.3
"""How long a descent is, and how far each of its steps goes at most at first, in powers of two."""

NORM = 6.0
"""Ranges count as this norm of those of all channels: other data reach further, in any channel that fills the range."""

LEAST = 0.02
"""The share of the cost that factors must save."""

ELEMENTS = 1 << 16
"""How many elements of a group stand for all of them, at most, if each row has a scale."""

LARGEST = 10
"""The largest exponent of a factor at which the descent begins."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A rounded weight of an op, the largest values that its scales are for, and by what all chains scale it."""

    step: Step
    constant: Constant
    params: QuantParams
    largest: Tensor
    sides: tuple[Side, ...]

    @property
    def value(self) -> Tensor:
        value: Tensor = self.constant.reference.detach()
        return value

    @property
    def shape(self) -> tuple[int, int, int]:
        """Groups, rows of each, and columns; what has more factors of rows than rows has a row for each."""
        by_axis = [[len(side.labels) for side in self.sides if side.axis == axis] for axis in (0, 1)]
        size = self.value.shape[:2].numel()
        rows = max([len(self.value), *by_axis[0]])
        groups = max([1, *(count * rows // size for count in by_axis[1])])
        return groups, rows // groups, size // rows

    def squared_gradients(self, simulator: Simulator, env: Any, gradients: Sequence[Tensor]) -> Tensor:
        """The sums of the squares of its own for gradients of the op's output, of each pair of channels."""
        weight = self.value.requires_grad_()
        own = {slot: env[slot] for slot in (*self.step.reads, *self.step.constants)} | {self.constant.slot: weight}
        with torch.enable_grad():
            output = simulator.call(self.step, own, False)
        found = torch.zeros_like(weight, requires_grad=False)
        for each in gradients:
            [own_gradient] = torch.autograd.grad(output, weight, each, retain_graph=True)
            found.addcmul_(own_gradient, own_gradient)
        return self._by_channel(found, torch.Tensor.sum)

    def cost(self, squares: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
        """That of rounding it in units of the factors of its sides."""
        peaks = self._by_channel(self.value.abs(), torch.Tensor.amax).to(squares)
        levels = (self.params.quant_max - self.params.quant_min) / 2
        shares = squares.shape[1] / self.shape[1] if self.params.axis == 0 else 1.0
        squares = squares / (12 * levels**2 * shares)

        def cost(by_side: Sequence[Tensor]) -> Tensor:
            by_column = self._factors(1, by_side, peaks)
            sizes = peaks * by_column[:, None]
            by_column = by_column.expand_as(peaks[:, 0])
            if self.params.axis == 0:  # a scale follows the factor of its row
                return torch.einsum("gr,grc,gc->", sizes.amax(2).square(), squares, by_column**-2)
            by_row = self._factors(0, by_side, peaks)
            sizes = sizes * by_row[:, :, None]
            steps = sizes.amax((0, 1)) if self.params.axis else sizes.amax()
            by_row = by_row.expand_as(peaks[:, :, 0])
            return torch.einsum("gr,grc,gc->", by_row**-2, squares, (steps / by_column).square())

        return cost

    def _by_channel(self, value: Tensor, how: Callable[..., Tensor]) -> Tensor:
        """What comes of the positions of a kernel: of some rows if each has a scale, and of all together if none has.

        Of shape (groups, rows, columns).
        """
        every = -(-self.shape[1] * self.shape[2] // ELEMENTS) if self.params.axis == 0 else 1
        found = how(value.reshape(*self.shape, -1)[:, ::every], 3)
        together = self.params.axis != 0 and all(side.axis for side in self.sides)
        return how(found, 1, keepdim=True) if together else found

    def rounding(self, table: Tensor) -> Rounding:
        """How it is rounded in other units; its scale follows its largest values."""
        by_side = [table[side.labels] ** side.power for side in self.sides]
        by_row, by_column = (self._factors(axis, by_side, self.value) for axis in (0, 1))
        by_row, by_column = by_row[:, :, None, None], by_column[:, None, :, None]

        def in_units(value: Tensor) -> Tensor:
            return (value.reshape(*self.shape, -1) * by_column).mul_(by_row).reshape(value.shape)

        def rounded(value: Tensor, *, out: Tensor | None = None) -> Tensor:
            found = in_units(value)
            growth = _largest(found, self.params.axis) / self.largest
            own: Any = self.params.scale
            own = own * growth.to(own) if isinstance(own, Tensor) else own * float(growth)
            found = rounding(replace(self.params, scale=own))(found, out=found)
            found.view(*self.shape, -1).div_(by_column).div_(by_row)
            return found

        return rounded

    def _factors(self, axis: int, by_side: Sequence[Tensor], like: Tensor) -> Tensor:
        """Those of rows or of columns, of shape (groups, rows or columns); one 1 if no side has any."""
        found = torch.ones(1, 1).to(like)
        for side, own in zip(self.sides, by_side, strict=True):
            if side.axis == axis:
                found = found * own.to(like).reshape(self.shape[0], -1)
        return found


def _largest(value: Tensor, axis: int | None) -> Tensor:
    """Of what shares a scale along an axis; channels of zeros keep theirs."""
    others = [each for each in range(value.dim()) if each != axis]
    ends = (value.amax(others), value.amin(others)) if others else (value, value)
    return torch.maximum(ends[0], -ends[1]).clamp(min=1e-30)


@dataclass(frozen=True, slots=True)
class Activations:
    """All labels at all sites of all groups, one after the other, to compute what these cost at once."""

    labels: Tensor
    degrees: Tensor
    groups: Tensor
    ends: Tensor
    gains: Tensor
    levels: Tensor
    symmetric: Tensor

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Activations:
        sizes = [each.ends[0].numel() for each in groups]
        params = [each.sites[0].params for each in groups]
        return cls(
            torch.cat([each.labels.repeat(len(each.sites)) for each in groups]),
            torch.cat([each.degrees.expand_as(each.ends[0]).flatten() for each in groups]),
            torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)),
            torch.cat([_with_zero(each.ends).flatten(1) for each in groups], 1),
            torch.cat([each.gains.flatten(2) for each in groups], 2),
            torch.tensor([each.quant_max - each.quant_min for each in params]),
            torch.tensor([each.group is not None and each.group.symmetric for each in groups]),
        )

    def cost(self, table: Tensor, folds: Collection[int]) -> Tensor:
        divisors = table[self.labels] ** self.degrees
        powers = (self.ends / divisors).abs() ** NORM
        sums = torch.zeros(2, len(self.levels), dtype=powers.dtype).index_add(1, self.groups, powers)
        low, high = sums.clamp(min=1e-200) ** (1 / NORM)
        steps = torch.where(self.symmetric, 2 * torch.maximum(low, high), low + high) / self.levels
        rounded, lost = self.gains[list(folds)].sum(0)
        return torch.minimum((steps[self.groups] * divisors).square() / 12 * rounded, lost).sum()


def _roundings(group: Group, pair: QuantizedPair, table: Tensor, minmax: bool) -> Iterator[tuple[int, Rounding]]:
    """How each site rounds in units of its factors, over all values, or as much of these as its range has now."""
    ends = _with_zero(group.ends)
    before, after = (
        (float(each[0].min()), float(each[1].max())) for each in (ends, ends / table[group.labels] ** group.degrees)
    )
    for site, each in zip(group.sites, group.values, strict=True):
        own = own_rounding(pair.simulator, site)
        if group.group is not None:
            own = rounding(moved(group.group, limits(group.group.params) if minmax else before, after))
        inverse = table[each.labels] ** -each.degree
        if bool((inverse != 1).any()):
            yield site.index, _in_units(own, functools.partial(_fitted, inverse))
        elif group.group is not None:
            yield site.index, own


def _with_zero(ends: Tensor) -> Tensor:
    """Ranges with 0, which is all of those that are missing."""
    return torch.stack([ends[0].clamp(max=0.0), ends[1].clamp(min=0.0)])


def _in_units(own: Rounding, factors: Callable[[Tensor], Tensor]) -> Rounding:
    """A rounding of what values are in other units."""

    def rounded(value: Tensor, *, out: Tensor | None = None) -> Tensor:
        units = factors(value)
        return own(value * units).div_(units)

    return rounded


def _fitted(factors: Tensor, value: Tensor) -> Tensor:
    return fitting(factors, value).to(value)


@dataclass(frozen=True, slots=True)
class FittedScales:
    """A factor for each label: what an edit has for each chain, and how the sites of a pair round then."""

    look: Equalization
    table: Tensor
    minmax: bool
    weaker: tuple[FittedScales, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        by_chain = ((chain.ops, self.table[chain.labels]) for chain in self.look.chains)
        scales = [Edit("scale", ops, values=in_base64(own.tolist())) for ops, own in by_chain if bool((own != 1).any())]
        return (*scales, *(self.look.observers if self.minmax else ()))

    def program(self, pair: QuantizedPair) -> Program:
        """Biases that are rounded stay as they are: their scales follow those of inputs, but hardly cost anything."""
        roundings = {
            site: each for group in self.look.groups for site, each in _roundings(group, pair, self.table, self.minmax)
        }
        for weight in self.look.weights:
            assert weight.constant.site is not None
            roundings[weight.constant.site] = weight.rounding(self.table)
        return with_roundings(pair.program, roundings)


@dataclass(frozen=True, slots=True)
class Equalization(Look):
    """What one look at the data tells about all chains.

    ``products`` are squared gradients of weights, by fold; ``observers`` the edit that gives activations the range of
    all values, if that is another.
    """

    name: ClassVar[str] = "equalization"

    chains: tuple[Chain, ...]
    groups: tuple[Group, ...]
    weights: tuple[Weight, ...]
    products: tuple[Sums, Sums]
    activations: Activations
    count: int
    observers: tuple[Edit, ...]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Equalization:
        assert pair.float_graph is not None, "what is repaired was captured"
        channels = channels_in(with_folded_norms(pair.float_graph), pair.names)
        groups, chains = groups_with(pair, channels)
        if not chains and all(each.group is None for each in groups):
            raise SelectionError(
                "no activation has a range, and no ops with weights of their own write and read its channels"
            )
        weights = tuple(_weights_in(pair, chains))
        by_step = {weight.step.index: (number, weight) for number, weight in enumerate(weights)}

        def add_weight(step: Step, gradients: Sequence[Tensor], env: Any, add: Add) -> None:
            if step.index in by_step:
                number, weight = by_step[step.index]
                add(number, weight.squared_gradients(pair.simulator, env, gradients))

        products = add_up(pair, data, groups, add_weight)
        assert pair.recipe is not None, "what is repaired is quantized again"
        observers = observing(pair.recipe.annotations, "minmax")
        return cls(chains, groups, weights, products, Activations.of(groups), channels.count, observers)

    def fit(self, folds: Collection[int]) -> FittedScales:
        cost = self._cost(folds)
        ones = torch.ones(self.count, dtype=torch.float64)
        best, before = self._start(), math.inf
        least = float(cost(best))
        free = torch.cat([torch.tensor([], dtype=torch.long), *(chain.labels for chain in self.chains)])
        while least < before / 2:  # from far away, one descent does not arrive
            before = least
            least, best = min((least, best), *_descent(cost, best, free), key=lambda each: each[0])
        table = best if least < float(cost(ones)) * (1 - LEAST) else ones
        minmax = bool(self.observers)
        found, half = (FittedScales(self, self._stored(each), minmax) for each in (table, table.sqrt()))
        return replace(found, weaker=(replace(found, minmax=False), half))

    def _stored(self, table: Tensor) -> Tensor:
        """Factors as an edit has them; powers of two where weights are too coarse for others."""
        exact = all(weight.value.dtype == torch.float32 for weight in self.weights)
        return table.float().double() if exact else table.log2().round().exp2()

    def _cost(self, folds: Collection[int]) -> Callable[[Tensor], Tensor]:
        sums = total(self.products, folds)
        known = [(self.weights[number], self.weights[number].cost(squares)) for number, squares in sums.items()]
        # One gather for all sides: the gradient of each would be as large as the table.
        sides = [side for weight, _ in known for side in weight.sides]
        labels = torch.cat([torch.tensor([0]), *(side.labels for side in sides)])
        sizes = [1, *(len(side.labels) for side in sides)]

        def cost(table: Tensor) -> Tensor:
            parts = iter(table[labels].split(sizes)[1:])
            costs = [self.activations.cost(table, folds)]
            for weight, own in known:
                costs.append(own([next(parts) ** side.power for side in weight.sides]).cpu().double())
            return torch.stack(costs).sum()

        return cost

    def _start(self) -> Tensor:
        """The root of the largest value of each channel, 1 for the channel in the middle."""
        sizes = torch.zeros(self.count, dtype=torch.float64)
        for group in self.groups:
            for place, each in enumerate(group.values):
                own = torch.isin(group.labels, each.labels)
                found = _with_zero(group.ends)[:, place, own].abs().amax(0) ** (1 / each.degree)
                labels = group.labels[own]
                sizes[labels] = torch.maximum(sizes[labels], found / found.max().clamp(min=1e-30))
        table = torch.ones_like(sizes)
        for chain in self.chains:
            size = sizes[chain.labels]
            if bool((size > 0).any()):
                exponents = torch.where(size > 0, (size / size[size > 0].median()).log2() / 2, 0.0)
                table[chain.labels] = exponents.clamp(-LARGEST, LARGEST).exp2()
        return table


def _descent(cost: Callable[[Tensor], Tensor], table: Tensor, free: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Tables on the way down, each with its cost; only ``free`` labels change."""
    exponents = table.log2()[free].requires_grad_()
    optimizer = torch.optim.Adam([exponents], RATE, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        with torch.enable_grad():
            found = table.index_copy(0, free, exponents.exp2())
            costs = cost(found)
            [exponents.grad] = torch.autograd.grad(costs.log(), exponents)
        yield float(costs.detach()), found.detach()
        optimizer.step()
        schedule.step()


def _weights_in(pair: QuantizedPair, chains: Sequence[Chain]) -> Iterator[Weight]:
    sides = grouped(((side.op, side.argument), side) for chain in chains for side in chain.sides)
    constants = {each.slot: each for each in pair.program.constants}
    for step in pair.program.steps:
        for constant in (constants[slot] for slot in step.constants if step.site is None):
            own = sides.get((step.name, constant.argument))
            if own and constant.site is not None and pair.sites[constant.site].params.scale is not None:
                params = pair.sites[constant.site].params
                yield Weight(step, constant, params, _largest(constant.reference, params.axis), tuple(own))
