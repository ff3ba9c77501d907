"""Biases that take back the mean error of an op, as far as that helps the output.

Rounding inputs and weights of a convolution or a linear changes the mean of each output channel; its opposite, added
to the bias, costs nothing.  But the errors of successive ops cancel or add up, so taking back all of each may hurt.
With d the mean change of an op's output by channel, J its derivative of the output and e the error of the output, the
shares of d that are taken back minimise, summed over samples::

    |e - sum(share * J d for each op)|**2 + RIDGE * sum(share**2 * |J d|**2 for each op),   0 <= share <= 1

A backward pass with e itself as the vector gives the products of e and J d; those of J d with each other are estimated
with random vectors.  One unknown for each op; one forward, and one forward and backward pass of each batch.

Source:
    bias correction by the mean error is in "Data-Free Quantization Through Weight Equalization and Bias Correction"
    (Nagel et al., 2019); there it is applied op by op, in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pt2qa._graph.handles import ops_of
from pt2qa._graph.internals.flow_runtime import BIAS
from pt2qa._metrics import float64
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import lacks_bias
from pt2qa._repair.guard import Fit, Look, quantized_input, started_on
from pt2qa._sensitivity.gradients import GradientRun, Gradients, WithoutGradient
from pt2qa._sensitivity.metrics import finished, float_leaves
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.program import Constant, Program, Slot, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.outcome import Add, Folds, Item, Sums, total
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit, in_base64

VECTORS = 4
"""Random projections of each batch."""

RIDGE = 0.1
"""How much |J d|**2 of each op weighs against its share."""

ROUNDS = 100
"""Rounds of coordinate descent, at most."""

CLOSE = 1e-9
"""The change of shares in a round at which it ends."""

CHANNELS = {"conv1d": 1, "conv2d": 1, "conv3d": 1, "linear": -1}
"""The axis of the output channels."""

PARTS = ((0,), (1,), (0, 1))
"""The folds of the data that are fitted to."""


@dataclass(frozen=True, slots=True)
class FittedBiases(Fit):
    """What is added to biases: by name, the op, its bias if it has one, and float32 of shape (channels,)."""

    added: Mapping[str, tuple[Step, Constant | None, Tensor]]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(
            Edit("bias", (name,), values=in_base64(values.tolist())) for name, (_, _, values) in self.added.items()
        )

    def program(self, pair: QuantizedPair) -> Program:
        program = pair.program
        constants, steps, slots = {each.slot: each for each in program.constants}, list(program.steps), program.slots
        for step, bias, values in self.added.values():
            if bias is None:
                [weight] = [constants[slot] for slot in step.constants if constants[slot].argument == 1]
                zeros = torch.zeros(len(values)).to(weight.reference)
                bias = Constant(
                    slots,
                    zeros,
                    zeros,
                    reader=step.name,
                    op=step.op,
                    handle=step.handle,
                    argument=BIAS,
                    weight_site=weight.site,
                )
                args = (*step.args[:BIAS], Slot(slots), *step.args[BIAS + 1 :])
                steps[step.index] = replace(step, args=args, constants=(*step.constants, slots))
                slots += 1
            reference: Tensor = bias.reference
            stored = (reference.float() + values.to(reference.device)).to(reference.dtype)
            constants[bias.slot] = replace(bias, stored=stored)
        return replace(program, slots=slots, constants=tuple(constants.values()), steps=tuple(steps))


@dataclass(frozen=True, slots=True)
class Biases(Look):
    """The normal equations for each part of the data.

    ``means`` are the mean errors d of each op, of shape (channels,); ``products`` are those of J d with each other,
    ``gram`` of shape (ops, ops), and with e, ``right`` of shape (ops,).
    """

    name: ClassVar[str] = "biases"

    ops: tuple[tuple[Step, Constant | None], ...]
    means: Mapping[tuple[int, ...], Sequence[Tensor]]
    products: Sums

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Biases:
        ops = tuple(_ops_in(pair))
        if not ops:
            raise SelectionError("no convolution or linear with quantized weights has a bias that may change")
        means = _means(pair, ops, data)

        def add_batch(item: Item, add: Add) -> None:
            parts = [part for part in PARTS if data.fold_of[item.key] in part]
            quantized = float_leaves(finished(pair, data.returned(pair, item), None))
            for part, columns in zip(
                parts, _project(pair, item, quantized, ops, [means[part] for part in parts]), strict=True
            ):
                random, along = columns[:VECTORS].flatten(0, 1), columns[VECTORS]
                add(("gram", part), random.T @ random / VECTORS)
                add(("right", part), along.sum(0))

        return cls(ops, means, total(data.summed(add_batch), (0, 1)))

    def fit(self, folds: Collection[int]) -> FittedBiases:
        part = tuple(sorted(folds))
        shares = _shares(self.products["gram", part], self.products["right", part])
        return FittedBiases(
            {
                step.name: (step, bias, (-share * mean).float())
                for (step, bias), mean, share in zip(self.ops, self.means[part], shares.tolist(), strict=True)
                if share > 0 and bool(mean.any())
            }
        )


def _shares(gram: Tensor, right: Tensor) -> Tensor:
    diagonal = gram.diagonal() * (1 + RIDGE)
    shares = torch.zeros_like(right)
    for _ in range(ROUNDS):
        before = shares.clone()
        for number in range(len(shares)):
            if diagonal[number] > 0:
                rest = right[number] - gram[number] @ shares + gram[number, number] * shares[number]
                shares[number] = (rest / diagonal[number]).clamp(0, 1)
        if bool(((shares - before).abs() <= CLOSE).all()):
            break
    return shares


def _ops_in(pair: QuantizedPair) -> Iterator[tuple[Step, Constant | None]]:
    """The ops with rounded weights and a float bias that no other op reads, or no bias: they get one."""
    program = pair.program
    constants = {each.slot: each for each in program.constants}
    readers = Counter(slot for step in program.steps for slot in step.constants)
    names = Counter(step.name for step in program.steps if step.site is None)
    floats = ops_of(pair.reference, pair.names)
    for step in program.steps:
        if step.site is not None or step.op not in CHANNELS or names[step.name] != 1:
            continue
        own = [constants[slot] for slot in step.constants]
        weights = [each for each in own if each.argument == 1 and each.site is not None]
        if not weights:
            continue
        if step.name in floats and lacks_bias(floats[step.name]):
            yield step, None
        bias = [each for each in own if each.argument == BIAS and each.site is None and readers[each.slot] == 1]
        if bias:
            yield step, bias[0]


def _means(
    pair: QuantizedPair, ops: Sequence[tuple[Step, Constant | None]], data: Folds
) -> dict[tuple[int, ...], list[Tensor]]:
    """For each part of the data, the mean change of each op's output, less where it varies from sample to sample."""

    def add_batch(item: Item, add: Add) -> None:
        run = GradientRun(pair.simulator, item.values)
        with torch.no_grad():
            for number, (step, _) in enumerate(ops):
                isolated = _isolated(pair.simulator, run, step)
                error = _by_sample(step, isolated, count_samples(item.values), torch.mean)
                add(number, torch.stack([torch.full_like(error[0], len(error)), error.sum(0), error.square().sum(0)]))

    sums = data.summed(add_batch)
    return {part: [_mean(*total(sums, part)[number]) for number in range(len(ops))] for part in PARTS}


def _mean(count: Tensor, errors: Tensor, squares: Tensor) -> Tensor:
    mean = errors / count
    deviation = (squares / count - mean.square()).clamp(min=0) / (count - 1).clamp(min=1)
    return mean * (1 - deviation / mean.square().clamp(min=1e-30)).clamp(min=0)


def _isolated(simulator: Simulator, run: GradientRun, step: Step) -> Tensor:
    """The change of an op's output if its inputs and weights are rounded, on the reference's values."""
    own = {slot: simulator.on[slot] for slot in step.constants}
    own |= {slot: quantized_input(simulator, run, slot) for slot in step.reads}
    changed: Tensor = simulator.call(step, own, False) - run.env[step.out]
    return changed


def _by_sample(step: Step, value: Tensor, samples: int, how: Callable[..., Tensor]) -> Tensor:
    """The mean or sum over positions: float64 of shape (samples, channels); one row if there is no axis of samples."""
    axis = CHANNELS[step.op] % value.dim()
    rows = value.shape[0] == samples and axis > 0
    others = [each for each in range(int(rows), value.dim()) if each != axis]
    value = how(value, others) if others else value
    value = value.cpu().double()
    return value if rows else value.unsqueeze(0)


def _project(
    pair: QuantizedPair,
    item: Item,
    quantized: Sequence[Tensor],
    ops: Sequence[tuple[Step, Constant | None]],
    means: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """For each list of means v·(J d), for random vectors and last for e: of shape (VECTORS + 1, samples, ops).

    Each output is divided by its size, in all of these.
    """
    samples = count_samples(item.values)
    started = started_on(pair, item)
    numbers = {step.index: number for number, (step, _) in enumerate(ops)}
    columns = [torch.zeros(VECTORS + 1, samples, len(ops), dtype=torch.float64) for _ in means]

    def visit(step: Step, gradients: Gradients) -> None:
        number = numbers.get(step.index)
        if number is None or gradients[0] is None:
            return
        for vector, gradient in enumerate(gradients[0]):
            own = _by_sample(step, gradient, samples, torch.sum)
            for column, each in zip(columns, means, strict=True):
                found = own @ each[number]
                column[vector, :, number] = found if len(found) == samples else found / samples

    reference = [leaf.detach() for leaf in float_leaves(started.reference)]
    if [each.shape for each in reference] != [each.shape for each in quantized]:
        raise WithoutGradient("quantization changes the shape of an output")
    along = [
        (quant - ref).float() * scale**2 for ref, quant, scale in zip(reference, quantized, started.scales, strict=True)
    ]
    # As long as the random vectors are, roughly, so that half precision can hold it.
    length = math.sqrt(sum(float(float64(each).square().sum()) for each in along)) or 1.0
    vectors = [
        [*random, (each / length).to(random[0].dtype)]
        for random, each in zip(started.signs(VECTORS, started.scales), along, strict=True)
    ]
    with torch.no_grad():
        started.backward(vectors, visit)
    for column in columns:
        column[VECTORS] *= length
    return columns
