"""Whether a repair helps on data that it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._sensitivity.gradients import GradientRun, Gradients
from pt2qa._sensitivity.metrics import finished, float_leaves
from pt2qa._sensitivity.projection import ProjectedBatch, Projection
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.positions import Counted
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import digest_of
from pt2qa._trials.folds import Folds
from pt2qa._trials.outcome import squares_by_row
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit

LEAST_GAIN = 0.1
"""dB that a repair must gain on both folds together, and not by chance."""

DRAWS, TAIL = 200, 0.05
"""Bootstrap samples of the samples, and the share of these in which a repair may lose."""


class Fit(Protocol):
    """A repair of a pair; without edits, it changes nothing."""

    @property
    def weaker(self) -> tuple[Fit, ...]:
        """Weaker versions of it, as many for each fit of a method; one that gains more is applied instead."""
        ...

    @property
    def edits(self) -> tuple[Edit, ...]: ...

    def simulator(self, pair: QuantizedPair) -> Simulator | None:
        """The simulator of the repaired pair; None where the pair has to be quantized again."""
        ...


class Look(Protocol):
    """What a method measured on both folds of the data."""

    @property
    def left_out(self) -> str:
        """What it cannot change, for a note; may be empty."""
        ...

    def fit(self, folds: Collection[int]) -> Fit: ...


class Method(Protocol):
    name: ClassVar[str]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Look:
        """Runs the model on the data; a SelectionError says why the method cannot repair this pair."""
        ...


@dataclass(frozen=True, slots=True)
class Guarded:
    """The fit of a method to all data, if it is to be applied; else ``refused`` says why not.

    ``gain`` is cross-validated: that of the worst output in dB, on each fold with what was fitted to the other.
    """

    fit: Fit | None
    gain: float = math.nan
    refused: str = ""
    left_out: str = ""


Again = Callable[[tuple[Edit, ...]], QuantizedPair]
"""Quantizes a pair again, on all of the data, with edits besides its own."""


def guarded(method: type[Method], pair: QuantizedPair, data: Folds, again: Again) -> Guarded:
    """Fits to each fold of the data and measures on the other; the fit to all of it, or a weaker one, if that gains."""
    if data.distinct < 2:
        return Guarded(None, refused="calibration has one distinct batch; cross-validation needs two or more")
    try:
        look = method.look(pair, data)
    except SelectionError as error:
        return Guarded(None, refused=str(error))
    fit = look.fit((0, 1))
    if not fit.edits:
        return Guarded(None, refused="no change improves the output")
    folds = [(other, *other.weaker) for other in (look.fit([1]), look.fit([0]))]
    simulators = [
        [pair.simulator] * 2,
        *([each.simulator(pair) or again(each.edits).simulator for each in both] for both in zip(*folds, strict=True)),
    ]
    tried = list(zip((fit, *fit.weaker), _gains(pair, data, simulators), strict=True))
    helpful = [each for each in tried if each[1][0] >= LEAST_GAIN and each[1][1] > 0]
    if not helpful:
        gain, least = max(found for _, found in tried)
        chance = f", which may be chance: {least:+.2g} dB or more with other samples"
        also = chance if gain >= LEAST_GAIN else f"; at least {LEAST_GAIN:g} dB needed"
        return Guarded(None, gain, f"{gain:+.2g} dB on held-out calibration data{also}")
    best, (gain, _) = helpful[0]
    for weaker, (own, _) in helpful[1:]:
        if own >= gain + LEAST_GAIN:
            best, gain = weaker, own
    return Guarded(best, gain, left_out=look.left_out)


def projected(pair: QuantizedPair, values: list[Any]) -> ProjectedBatch:
    """The gradient run of a batch; its content seeds the random projections."""
    return ProjectedBatch(Projection(pair, None, (), {}, frozenset()), values, int(digest_of(values)[:12], 16), None)


VECTORS = 2
"""Random projections of each batch."""


def visit_gradients(
    pair: QuantizedPair, values: list[Any], visit: Callable[[Step, Sequence[Tensor], Any], None]
) -> None:
    """Visits each step with its gradients of random projections, and the reference's values by slot."""
    started = projected(pair, values)

    def visited(step: Step, gradients: Gradients) -> None:
        if gradients[0] is not None:
            visit(step, gradients[0], started.run.env)

    # What counts is the error of each output relative to its own size.
    with torch.no_grad():
        started.backward(started.signs(VECTORS, relative=True), visited)


def quantized_input(simulator: Simulator, run: GradientRun, slot: int) -> Tensor:
    """A value of the reference, rounded if it is quantized before ops read it."""
    program = simulator.program
    producer = program.steps[program.producers[slot]] if slot in program.producers else None
    value: Tensor = run.env[slot]
    if producer is not None and producer.site is not None:
        value = simulator.site_function(producer)(value, out=None)
    return value


def _gains(pair: QuantizedPair, data: Folds, simulators: Sequence[Sequence[Simulator]]) -> list[tuple[float, float]]:
    """The gain of the worst output over all samples, in dB, and the lower end of its interval.

    Each of ``simulators`` is a pair, for the first fold of the data and for the second; the first two are the baseline.
    """
    own: list[list[Tensor]] = [[] for _ in simulators]
    for fold, values, counted, returned in data.with_outputs():
        reference = _outputs(pair, returned, counted)
        for found, by_fold in zip(own, simulators, strict=True):
            outputs = _outputs(pair, by_fold[fold].run(values, on=True), counted)
            found.append(_by_sample(reference, outputs, count_samples(values)))
    every = everywhere(own)
    before, *others = (torch.cat([rows for part in every for rows in part[number]]) for number in range(len(own)))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(before), (DRAWS, len(before)), generator=generator)
    times = torch.cat([torch.ones(1, len(before)), F.one_hot(drawn, len(before)).sum(1)]).double()
    gains = [(_worst(times, after) - _worst(times, before)).tolist() for after in others]
    return [(gain, sorted(again)[int(TAIL * DRAWS)]) for gain, *again in gains]


def _outputs(pair: QuantizedPair, returned: Any, counted: Counted | None) -> list[Tensor]:
    return float_leaves(finished(pair, returned, None) if counted is None else counted.outputs(returned))


def _by_sample(reference: Sequence[Tensor], quantized: Sequence[Tensor], samples: int) -> Tensor:
    """Signal and noise: float64 of shape (samples, outputs, 2); one row if an output has no axis of samples."""
    rows = samples if all(each.dim() and each.shape[0] == samples for each in reference) else 1
    sums = [
        squares_by_row(ref, quant if ref.shape == quant.shape else torch.full_like(ref, math.nan), rows)
        for ref, quant in zip(reference, quantized, strict=True)
    ]
    return torch.stack(sums).permute(2, 0, 1)


def _worst(times: Tensor, sums: Tensor) -> Tensor:
    """The SQNR of the worst output that is not all zeros, with each sample so many times."""
    signal, noise = torch.tensordot(times, sums, 1).unbind(2)
    ratios = 10 * (signal / noise.clamp(min=1e-300)).log10()
    return torch.where(signal == 0, math.inf, ratios).amin(1)
