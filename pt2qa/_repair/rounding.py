"""Rounding of weights with error feedback, so that what an op computes changes less than its weights do.

Each column of a weight is rounded to the scale that it has, and its error is taken back, as far as that is possible, in
the columns that are not rounded yet.  With x the rounded inputs of the op as rows, ``H = x.T @ x`` with a hundredth of
its mean diagonal added, and U the upper Cholesky factor of its inverse::

    column j:   q = round(w[:, j]),   w[:, j + 1:] -= (w[:, j] - q) / U[j, j] * U[j, j + 1:]

columns with large inputs first.  A grouped convolution has an H for each group.  One forward of each batch, and
groups * (inputs of a group)**2 numbers for each fold of the data.

Source:
    "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (Frantar et al., 2022).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class FittedIntegers(Fit):
    """Weights as int8, by the name of the op that reads them; with it, the site and how it rounds."""

    integers: Mapping[str, tuple[int, QuantParams, Tensor]]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(
            Edit("round", (name,), values=in_base64(values.flatten().tolist(), "b"))
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

    left_out: str

    pair: QuantizedPair
    ops: tuple[tuple[Step, Constant], ...]
    grams: tuple[Sums, Sums]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Rounding:
        ops = tuple(_ops_in(pair))
        if not ops:
            raise SelectionError("no linear or convolution has an int8 weight of its own")

        def add_batch(item: Item, add: Add) -> None:
            run = GradientRun(pair.simulator, item.values)
            for number, (step, weight) in enumerate(ops):
                assert isinstance(step.args[0], Slot)
                rows = _rows(step, quantized_input(pair.simulator, run, step.args[0].number).detach(), weight)
                add(number, rows.mT @ rows)

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


def _rows(step: Step, value: Tensor, weight: Constant) -> Tensor:
    """The inputs as rows of a product with the weight: float32 of shape (groups, places, inputs of a group)."""
    value = value.float()
    if step.op == "linear":
        return value.reshape(1, -1, value.shape[-1])
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
    groups = step.args[6] if len(step.args) > 6 else 1
    return unfolded.reshape(len(unfolded), groups, -1, unfolded.shape[2]).permute(1, 0, 3, 2).flatten(1, 2)


def _scales(params: QuantParams) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(params.scale).reshape(-1), torch.as_tensor(params.zero_point).reshape(-1)


def _rounded(weight: Tensor, params: QuantParams, grams: Tensor) -> Tensor:
    """The integers of a weight: int8 of its shape; ``grams`` are of shape (groups, inputs, inputs)."""
    groups, columns = grams.shape[:2]
    left = weight.float().reshape(groups, -1, columns).clone()
    scale, zero_point = (
        each.float().to(weight.device).reshape(groups if len(each) > 1 else 1, -1, 1) for each in _scales(params)
    )
    order = grams.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    left = left.gather(2, order[:, None].expand_as(left))
    grams = grams.gather(1, order[:, :, None].expand_as(grams)).gather(2, order[:, None].expand_as(grams)).double()
    damping = (DAMPING * grams.diagonal(dim1=1, dim2=2).mean(1)).clamp(min=1e-12)
    damped = grams + damping[:, None, None] * torch.eye(columns).to(grams)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    integers = torch.empty_like(left)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.empty_like(left[:, :, start:end])
        for column in range(start, end):
            own = left[:, :, column : column + 1]
            steps = (torch.round(own / scale) + zero_point).clamp(params.quant_min, params.quant_max)
            integers[:, :, column : column + 1] = steps
            error = (own - (steps - zero_point) * scale) / upper[:, column, column, None, None]
            left[:, :, column:end] -= error * upper[:, column, None, column:end]
            errors[:, :, column - start : column - start + 1] = error
        left[:, :, end:] -= errors @ upper[:, start:end, end:]
    result = torch.empty_like(integers).scatter_(2, order[:, None].expand_as(integers), integers)
    return result.reshape(weight.shape).to(torch.int8)
