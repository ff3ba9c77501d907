"""Whether a repair helps on data that it was not fitted to."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from pt2qa._metrics import ErrorSums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._sensitivity.outputs import finished, float_leaves
from pt2qa._simulator.positions import Counted
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.folds import Folds
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit

LEAST_GAIN = 0.1
"""dB that a repair must gain on both folds together; on neither may it lose."""


class Fit(Protocol):
    """A repair of a pair; false if it changes nothing."""

    @property
    def weaker(self) -> tuple[Fit, ...]:
        """Less of the same, as many for each fit of a method: what is taken instead where it gains more."""
        ...

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What quantizing again applies."""
        ...

    def simulator(self, pair: QuantizedPair) -> Simulator:
        """The simulator of the repaired pair, without quantizing again."""
        ...

    def __bool__(self) -> bool: ...


class Look(Protocol):
    """What a method learned about a pair from both folds of the data."""

    @property
    def left_out(self) -> str:
        """What it cannot change, for a note; empty if there is nothing."""
        ...

    def fit(self, folds: Collection[int]) -> Fit:
        """The repair that fits some folds of the data best."""
        ...


class Method(Protocol):
    """A way to repair a pair."""

    name: ClassVar[str]

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Look:
        """Runs the model on the data.

        Raises:
            SelectionError: the method cannot repair this pair; the message says why.
        """
        ...


@dataclass(frozen=True, slots=True)
class Guarded:
    """The fit of a method to all data, if it is to be applied; else ``refused`` says why not.

    ``gain`` is that of the worst output in dB, on each fold of the data with what was fitted to the other; nan if it
    was not measured.  ``left_out`` is what the method cannot change.
    """

    method: str
    fit: Fit | None
    gain: float
    refused: str = ""
    left_out: str = ""


def guarded(method: type[Method], pair: QuantizedPair, data: Folds) -> Guarded:
    """Fits to each fold of the data and measures on the other; the fit to all of it, or a weaker one, if that gains."""
    if data.distinct < 2:
        return Guarded(
            method.name,
            None,
            math.nan,
            "calibration has one distinct batch, so nothing shows whether it fits other data; calibrate with more",
        )
    try:
        look = method.look(pair, data)
    except SelectionError as error:
        return Guarded(method.name, None, math.nan, str(error))
    fit = look.fit((0, 1))
    if not fit:
        return Guarded(method.name, None, math.nan, "nothing that it changes would help")
    folds = [(other, *other.weaker) for other in (look.fit([1]), look.fit([0]))]
    tried = list(zip((fit, *fit.weaker), _gains(pair, data, list(zip(*folds, strict=True))), strict=True))
    helpful = [each for each in tried if each[1][0] >= LEAST_GAIN and each[1][1] >= 0]
    if not helpful:
        gain, least = max(found for _, found in tried)
        change = f"on data that it was not fitted to, it would change {gain:+.2g} dB"
        also = f", and {least:+.2g} dB on one fold" if gain >= LEAST_GAIN else ""
        return Guarded(method.name, None, gain, change + also)
    best, (gain, _) = helpful[0]
    for weaker, (own, _) in helpful[1:]:
        if own >= gain + LEAST_GAIN:
            best, gain = weaker, own
    return Guarded(method.name, best, gain, left_out=look.left_out)


def _gains(pair: QuantizedPair, data: Folds, fits: Sequence[Sequence[Fit]]) -> list[tuple[float, float]]:
    """The gain of the worst output on both folds together, and the smaller of those on each, in dB.

    Each of ``fits`` is a pair: what is played on the first fold of the data, and on the second.
    """
    simulators = [[pair.simulator] * 2, *([fit.simulator(pair) for fit in each] for each in fits)]
    own: dict[tuple[int, int], list[ErrorSums]] = {}
    for fold, values, counted, returned in data.with_outputs():
        reference = _outputs(pair, returned, counted)
        for number, by_fold in enumerate(simulators):
            outputs = _outputs(pair, by_fold[fold].run(values, on=True), counted)
            found = [_error(ref, quant) for ref, quant in zip(reference, outputs, strict=True)]
            known = own.get((fold, number))
            own[fold, number] = found if known is None else _merged(known, found)
    parts = everywhere(own)
    every = []
    for number in range(1, len(simulators)):
        gains = []
        for folds in ((0, 1), (0,), (1,)):
            before, after = (
                _worst([part[fold, which] for part in parts for fold in folds if (fold, which) in part])
                for which in (0, number)
            )
            gains.append(after - before if after != before else 0.0)
        every.append((gains[0], min(gains[1:])))
    return every


def _outputs(pair: QuantizedPair, returned: Any, counted: Counted | None) -> list[Tensor]:
    return float_leaves(finished(pair, returned, None) if counted is None else counted.outputs(returned))


def _error(reference: Tensor, quantized: Tensor) -> ErrorSums:
    """The error of an output; no number where rounding changes its shape."""
    same = reference.shape == quantized.shape
    return ErrorSums().update(reference, quantized) if same else ErrorSums(count=1, nonfinite=1)


def _merged(one: Sequence[ErrorSums], other: Sequence[ErrorSums]) -> list[ErrorSums]:
    return [left.merge(right) for left, right in zip(one, other, strict=True)]


def _worst(found: Sequence[Sequence[ErrorSums]]) -> float:
    together, *others = found
    for each in others:
        together = _merged(together, each)
    return min(sums.sqnr for sums in together)
