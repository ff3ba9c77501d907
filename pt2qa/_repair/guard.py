"""Whether a repair helps on data that it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._sensitivity.gradients import GradientRun, Gradients
from pt2qa._sensitivity.projection import ProjectedBatch, Projection
from pt2qa._simulator.data import Counted
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.evidence import Gain
from pt2qa._trials.outcome import Folds, Item, outcome_of
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit

LEAST_GAIN = 0.1
"""dB that a repair must gain on both folds together, and not by chance."""


class Fit(Protocol):
    """A repair of a pair; without edits, it changes nothing."""

    @property
    def weaker(self) -> tuple[Fit, ...]:
        """Weaker versions of it, as many for each fit of a method; one that gains more is applied instead."""
        return ()

    @property
    def edits(self) -> tuple[Edit, ...]: ...

    def program(self, pair: QuantizedPair) -> Program:
        """The program of the repaired pair, or one that rounds as that does."""
        ...


class Look(Protocol):
    """What a method measured on both folds of the data."""

    @property
    def left_out(self) -> str:
        """What it cannot change, for a note; may be empty."""
        return ""

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
    ``doubt`` says that it is not certain, so that a fit has to gain for certain elsewhere; empty if it is.
    """

    fit: Fit | None
    gain: float = math.nan
    refused: str = ""
    left_out: str = ""
    doubt: str = ""


def guarded(method: type[Method], pair: QuantizedPair, data: Folds) -> Guarded:
    """Fits to each fold of the data and measures on the other; the fit to all of it, or a weaker one, if that gains."""
    if len(data.fold_of) < 2:
        return Guarded(None, refused="calibration has one distinct batch; cross-validation needs two or more")
    try:
        look = method.look(pair, data)
        fit = look.fit((0, 1))
        if not fit.edits:
            return Guarded(None, refused="no change improves the output")
        tried = _measured(pair, data, fit, (look.fit([1]), look.fit([0])))
    except SelectionError as error:
        return Guarded(None, refused=str(error))
    enough = [(each, gain) for each, gain in tried if gain.value >= LEAST_GAIN]
    if not enough:
        most = max(gain.value for _, gain in tried)
        return Guarded(None, most, f"{most:+.2g} dB on held-out calibration data; at least {LEAST_GAIN:g} dB needed")
    helpful = [(each, gain) for each, gain in enough if gain.is_certain] or enough
    fit, best = helpful[0]
    for weaker, gain in helpful[1:]:
        if gain.value >= best.value + LEAST_GAIN:
            fit, best = weaker, gain
    doubt = "" if best.is_certain else f"which may be chance: {best.low:+.2g} dB or more with other samples"
    return Guarded(fit, best.value, left_out=look.left_out, doubt=doubt)


def _measured(pair: QuantizedPair, data: Folds, fit: Fit, apart: Sequence[Fit]) -> list[tuple[Fit, Gain]]:
    """A fit and weaker versions, each with the gain of those that were fitted without a fold on that fold.

    Once one gains for certain, weaker ones are tried as long as they gain more.
    """
    before, found = data.quality(pair), list[tuple[Fit, Gain]]()
    known: list[list[tuple[Edit, ...]]] = []
    for each, *folds in zip(*((own, *own.weaker) for own in (fit, *apart)), strict=True):
        edits = [own.edits for own in (each, *folds)]
        if not each.edits or edits in known:
            continue
        known.append(edits)
        after = outcome_of(data, _playing(pair, data, folds))
        # The worst output may be another one than before.
        gain = replace(after.gain_over(before), value=after.value - before.value)
        found.append((each, gain))
        certain = [other.value for _, other in found if other.value >= LEAST_GAIN and other.is_certain]
        if certain and gain.value < max(certain) - LEAST_GAIN:
            break
    return found


def _playing(pair: QuantizedPair, data: Folds, fits: Sequence[Fit]) -> Callable[[Item], Any]:
    """Runs a pair with the fit for the fold of each batch."""
    simulators = [Simulator(each.program(pair), fused=pair.simulator.fused) for each in fits]
    return lambda item: simulators[data.fold_of[item.key]].run(item.values, on=True)


def started_on(pair: QuantizedPair, item: Item) -> ProjectedBatch:
    """The gradient run of a batch; its content seeds the random projections."""
    every = Counted(None, {}, pair.program)
    return ProjectedBatch(Projection(pair, None, (), {}, frozenset()), item.values, int(item.key[:12], 16), every)


VECTORS = 2
"""Random projections of each batch."""


def visit_gradients(pair: QuantizedPair, item: Item, visit: Callable[[Step, Sequence[Tensor], Any], None]) -> None:
    """Visits each step with its gradients of random projections, and the reference's values by slot."""
    started = started_on(pair, item)

    def visited(step: Step, gradients: Gradients) -> None:
        if gradients[0] is not None:
            visit(step, gradients[0], started.run.env)

    # What counts is the error of each output relative to its own size.
    with torch.no_grad():
        started.backward(started.signs(VECTORS, started.scales), visited)


def squared(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of a value's gradients, float32; what is not finite counts as 0."""
    found = gradients[0].float().square()
    for each in gradients[1:]:
        found.addcmul_(each.float(), each.float())
    return found.nan_to_num_(0.0, 0.0, 0.0)


def quantized_input(simulator: Simulator, run: GradientRun, slot: int) -> Tensor:
    """A value of the reference, rounded if it is quantized before ops read it."""
    program = simulator.program
    producer = program.steps[program.producers[slot]] if slot in program.producers else None
    value: Tensor = run.env[slot]
    if producer is not None and producer.site is not None:
        value = simulator.site_function(producer)(value, out=None)
    return value
