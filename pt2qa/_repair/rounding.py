"""Rounding of weights with error feedback, so that what an op computes changes less than its weights do.

Each column of a weight is rounded to the scale that it has, and its error is taken back, as far as that is possible, in
the columns that are not rounded yet.  With x the rounded inputs of the op as rows, ``H = x.T @ x`` with a hundredth of
its mean diagonal added, and L its lower Cholesky factor::

    column j, from the last one on:   q[:, j] = round(w[:, j] + (w - q)[:, j + 1:] @ L[j + 1:, j] / L[j, j])

columns with large inputs last.  A grouped convolution has an H for each group.  One forward of each batch, and
groups * (inputs of a group)**2 numbers for each fold of the data.

Sources:
    "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (Frantar et al., 2022); without
    an inverse, as "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm" (Chen et al., 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pt2qa._graph.internals.flow_runtime import in_float
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import Fit, quantized_input
from pt2qa._report.prose import counted
from pt2qa._sensitivity.gradients import GradientRun
from pt2qa._sensitivity.roundings import with_roundings
from pt2qa._simulator.program import Constant, Program, QuantParams, Slot, Step
from pt2qa._trials.outcome import Add, Folds, Item, Sums, total
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit, in_base64

DAMPING = 0.01
"""The share of the mean diagonal that is added to it."""

BLOCK = 128
"""Columns after which errors go to all others."""

LARGEST = 5000
"""Inputs of an op up to which it is rounded: a matrix of this size takes 100 MB."""

MOST_WEIGHTS = 1 << 25
"""Weights up to which it is a default: a plan with them takes 45 MB."""

MOST_WORK = 1 << 39
"""Sum of the cubes of inputs up to which it is a default; half of that are the multiply-adds of three fits' factors."""


@dataclass(frozen=True, slots=True)
class FittedIntegers(Fit):
    """Weights as int8, by the name of the op that reads them; with it, the site and how it rounds."""

    integers: Mapping[str, tuple[int, QuantParams, Tensor]]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(
            Edit("round", (name,), values=in_base64(values.cpu().numpy(), "<i1"))
            for name, (_, _, values) in self.integers.items()
        )

    def program(self, pair: QuantizedPair) -> Program:
        values = {site: in_float(integers, *_scales(params)) for site, params, integers in self.integers.values()}
        roundings = {site: lambda weight, site=site: values[site].to(weight) for site in values}
        return with_roundings(pair.program, roundings)


@dataclass(frozen=True, slots=True)
class Rounding:
    """``grams`` are ``x.T @ x`` by fold and op, of shape (groups, inputs of a group, inputs of a group)."""

    name: ClassVar[str] = "rounding"
    most: ClassVar[tuple[float, float]] = (inf, inf)
    """Weights, and the sum of the cubes of their inputs."""

    left_out: str

    pair: QuantizedPair
    ops: tuple[tuple[Step, Constant], ...]
    grams: tuple[Sums, Sums]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Rounding:
        ops = tuple(_ops_in(pair))
        if not ops:
            raise SelectionError("no linear or convolution has an int8 weight of its own")
        count = sum(weight.reference.numel() for _, weight in ops)
        work = sum(_groups(step) * weight.reference[0].numel() ** 3 for step, weight in ops)
        for needed, most, what in zip((count, work), cls.most, ("weights", "inputs cubed"), strict=True):
            if needed > most:
                raise SelectionError(f"{needed:.2g} {what}, by default at most {most:.2g}; name it to try it")

        def add_batch(item: Item, add: Add) -> None:
            run = GradientRun(pair.simulator, item.values)
            for number, (step, weight) in enumerate(ops):
                assert isinstance(step.args[0], Slot)
                value = quantized_input(pair.simulator, run, step.args[0].number).detach().float()
                for columns in _columns(step, value, weight):
                    add(number, columns @ columns.mT)

        grams = data.summed(add_batch)
        weights = sum(site.kind == "weight" for site in pair.sites)
        left_out = f"{weights - len(ops)} of {counted(weights, 'weight')} unchanged: shared, very large, or not int8"
        return cls(left_out if weights > len(ops) else "", pair, ops, grams)

    def fit(self, folds: Collection[int]) -> FittedIntegers:
        found = {}
        for number, gram in total(self.grams, folds).items():
            step, weight = self.ops[number]
            assert weight.site is not None
            params = self.pair.sites[weight.site].params
            found[step.name] = (weight.site, params, _rounded(weight.reference.detach(), params, gram))
        return FittedIntegers(found)


class LimitedRounding(Rounding):
    """For models of which it takes no long time, and no large plan."""

    most = (MOST_WEIGHTS, MOST_WORK)


def _ops_in(pair: QuantizedPair) -> Iterator[tuple[Step, Constant]]:
    program = pair.program
    constants = {each.slot: each for each in program.constants}
    readers = Counter(slot for step in program.steps for slot in step.constants)
    names = Counter(step.name for step in program.steps if step.site is None)
    for step in program.steps:
        if step.site is not None or step.op not in ("linear", "conv1d", "conv2d") or names[step.name] != 1:
            continue
        for weight in (constants[slot] for slot in step.constants):
            if weight.argument != 1 or weight.site is None or readers[weight.slot] != 1:
                continue
            params, columns = pair.sites[weight.site].params, weight.reference[0].numel()
            plain = step.op == "linear" or str not in map(type, step.args)
            if params.dtype == "int8" and params.axis in (None, 0) and columns <= LARGEST and plain:
                yield step, weight


def _columns(step: Step, value: Tensor, weight: Constant) -> Tensor:
    """The inputs as columns that the weight multiplies: of shape (samples, groups, inputs of a group, places)."""
    if step.op == "linear":
        return value.reshape(1, 1, -1, value.shape[-1]).mT
    sizes = tuple(weight.reference.shape[2:])
    defaults = ((3, 1), (4, 0), (5, 1))
    options = [step.args[place] if len(step.args) > place else (default,) for place, default in defaults]
    stride, padding, dilation = (tuple(each) * (len(sizes) // len(each)) for each in options)
    if value.dim() == len(sizes) + 1:
        value = value.unsqueeze(0)
    if len(sizes) == 1:
        value, sizes = value.unsqueeze(2), (1, *sizes)
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    unfolded = F.unfold(value, sizes, dilation=dilation, padding=padding, stride=stride)
    return torch.unflatten(unfolded, 1, (_groups(step), -1))


def _groups(step: Step) -> int:
    return step.args[6] if step.op != "linear" and len(step.args) > 6 else 1


def _scales(params: QuantParams) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(params.scale).reshape(-1), torch.as_tensor(params.zero_point).reshape(-1)


def _rounded(weight: Tensor, params: QuantParams, grams: Tensor) -> Tensor:
    """The integers of a weight: int8 of its shape; ``grams`` are of shape (groups, inputs, inputs)."""
    groups, columns = grams.shape[:2]
    scale, zero_point = (
        each.float().to(weight.device).reshape(groups if len(each) > 1 else 1, 1, -1) for each in _scales(params)
    )
    diagonals = grams.diagonal(dim1=1, dim2=2)
    order = diagonals.argsort(dim=1)[:, :, None]
    grams = grams.gather(1, order.expand_as(grams)).gather(2, order.mT.expand_as(grams)).double()
    grams.diagonal(dim1=1, dim2=2).add_((DAMPING * diagonals.double().mean(1, keepdim=True)).clamp(min=1e-12))
    lower = torch.linalg.cholesky(grams)
    shares = lower.div_(lower.diagonal(dim1=1, dim2=2)[:, None].clone()).float()
    given = weight.float().reshape(groups, -1, columns).mT
    order = order.expand_as(given)
    given = given.gather(1, order)
    wanted, errors, integers = given.clone(), torch.empty_like(given), torch.empty_like(given)
    for end in range(columns, 0, -BLOCK):
        start = max(end - BLOCK, 0)
        for column in reversed(range(start, end)):
            own = slice(column, column + 1)
            steps = (torch.round(wanted[:, own] / scale) + zero_point).clamp(params.quant_min, params.quant_max)
            integers[:, own] = steps
            errors[:, own] = given[:, own] - (steps - zero_point) * scale
            wanted[:, start:column].addcmul_(errors[:, own], shares[:, own, start:column].mT)
        wanted[:, :start] += shares[:, start:end, :start].mT @ errors[:, start:end]
    found = torch.empty_like(integers).scatter_(1, order, integers)
    return found.mT.reshape(weight.shape).to(torch.int8, memory_format=torch.contiguous_format)
