"""The bench of planted faults: what a diagnosis says of each, against what was planted."""

from __future__ import annotations

import csv
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

import pt2qa
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator.data import Data
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Treatment
from tests.diagnosis.faults import Fault
from tests.diagnosis.subject import Planted, Subject

LEAST_LOSS = 3.0
"""dB that a fault must cost where it costs accuracy: half of what the planted model's noise is."""


@dataclass(frozen=True)
class Outcome:
    """What came of one fault in one model.

    Attributes:
        fault, model, quantizer: which; the fault is empty for untouched models.
        untouched, planted: SQNR of the output in dB without and with the fault; nan where there is none.
        cause, name: what the diagnosis names first; empty if nothing.
        rows: how many causes it names.
        right_cause, right_place: whether these are the planted ones; for what costs nothing, whether it is shown and no
            cause is named.
        share: of the lost dB, how much the first remedy brings back on a third set of data, 0..1; nan where nothing was
            lost, or nothing can be applied.
        gain, low, high: of the first remedy, in dB, and its interval.
        third: the same gain on the third set; nan where it was measured in another way.
        holds: whether all rows gain on the third set, as far as they are measured on outputs.
        seconds: that the diagnosis took.
        said: the verdict, or the error.
    """

    fault: str
    model: str
    quantizer: str
    untouched: float
    planted: float
    cause: str
    name: str
    rows: int
    right_cause: bool
    right_place: bool
    share: float
    gain: float
    low: float
    high: float
    third: float
    holds: bool
    seconds: float
    said: str

    @property
    def right(self) -> bool:
        """Whether both are."""
        return self.right_cause and self.right_place

    @property
    def within(self) -> bool | None:
        """Whether the gain on the third set is in the interval; None where there is no interval."""
        return None if math.isnan(self.low + self.third) else self.low <= self.third <= self.high


def sqnr(model: Callable[..., Any], reference: Callable[..., Any], batches: Iterable[Any]) -> float:
    """SQNR in dB of a model's worst output, in float64."""
    sums: dict[int, tuple[float, float]] = {}
    with torch.no_grad():
        for batch in batches:
            for number, (expected, got) in enumerate(
                zip(_outputs(reference, batch), _outputs(model, batch), strict=True)
            ):
                signal, noise = sums.get(number, (0.0, 0.0))
                sums[number] = signal + float(expected.square().sum()), noise + float((expected - got).square().sum())
    return min(_decibels(*each) for each in sums.values())


def _outputs(model: Callable[..., Any], batch: Any) -> list[Tensor]:
    return [output.double() for output in pytree.tree_leaves(model(batch))]


def _decibels(signal: float, noise: float) -> float:
    if math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise) if noise else math.inf


class Bench:
    """Plants faults and has them diagnosed; what is measured of untouched models is kept."""

    def __init__(self) -> None:
        self._untouched: dict[tuple[str, str], float] = {}

    def untouched(self, model: str, quantizer: str) -> float:
        """SQNR of an untouched model."""
        if (model, quantizer) not in self._untouched:
            subject = Subject.healthy(model, quantizer)
            pair = subject.pair()
            self._untouched[model, quantizer] = sqnr(pair.quantized, pair.reference, subject.evaluation)
        return self._untouched[model, quantizer]

    def healthy(self, model: str, quantizer: str) -> Outcome:
        """What a diagnosis says of an untouched model: nothing, if it is right."""
        subject = Subject.healthy(model, quantizer)
        planted = subject.planted()
        before = self.untouched(model, quantizer)
        found, seconds = _diagnosed(planted)
        quiet = not found.rows
        return _outcome("", model, quantizer, before, before, planted, found, seconds, quiet, quiet)

    def planted(self, fault: Fault, model: str, quantizer: str) -> Outcome | None:
        """What it says of a fault; None where that cannot be planted."""
        before = self.untouched(model, quantizer)
        begun = time.monotonic()
        after = math.nan
        try:
            planted = fault.plant(Subject.healthy(model, quantizer))
            if planted is None:
                return None
            against = planted.pair.reference if planted.against is None else planted.against
            after = sqnr(planted.pair.quantized, against, planted.evaluation)
            found, seconds = _diagnosed(planted)
            if planted.deployed:
                before, after = after, found.reports["deployed"].sqnr
        except Exception as error:  # where none is expected, a wrong answer that is printed
            said = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - begun
            refused = bool(fault.error) and re.search(fault.error, str(error)) is not None
            share = math.nan if fault.error else 0.0
            return Outcome(
                fault.id,
                model,
                quantizer,
                before,
                after,
                "an error",
                "",
                0,
                refused,
                refused,
                share,
                0.0,
                math.nan,
                math.nan,
                math.nan,
                True,
                seconds,
                said,
            )
        if not fault.costs:
            noted = fault.note and any(re.search(fault.note, line) for line in (*found.lines(), *found.notes))
            shown = bool(noted or (fault.finding and _checked(planted, fault.finding)))
            return _outcome(fault.id, model, quantizer, before, after, planted, found, seconds, shown, not found.rows)
        first = found.rows[0] if found.rows else None
        right = first is not None and first.cause in fault.causes
        if fault.beside:
            right = right and fault.beside in [row.cause for row in found.rows[1:]]
        place = first is not None and planted.is_place(first.name)
        return _outcome(fault.id, model, quantizer, before, after, planted, found, seconds, right, place)


def _checked(planted: Planted, rule: str) -> bool:
    """Whether the structure check finds it in the pair, or in the model that it is from."""
    pair = planted.pair
    if pt2qa.check(pair, progress=False).of(rule):
        return True
    capture, recipe = pair.capture, pair.recipe
    assert capture is not None, "what costs nothing is planted by pt2qa.quantize"
    assert recipe is not None, "as above"
    found = pt2qa.check(capture.eager, capture.args, quantizer=recipe.plugin, progress=False)
    return bool(found.of(rule))


def _diagnosed(planted: Planted) -> tuple[pt2qa.Diagnosis, float]:
    begun = time.monotonic()
    batches, evaluation, _ = thirds(planted.evaluation)
    found = pt2qa.diagnose(
        planted.pair,
        batches,
        evaluation=evaluation,
        deployed=planted.deployed,
        verify_code=False,
        progress=False,
    )
    return found, time.monotonic() - begun


def thirds(batches: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """What analyses read, what they are measured on, and what the bench measures their gains on."""
    return batches[2::3], batches[1::3], batches[::3]


def _on_third(planted: Planted, found: pt2qa.Diagnosis) -> list[float]:
    """The gain of each row in sequence on the third set, in dB at its output; nan where it was measured otherwise."""
    judge = Judge(planted.pair, Data("third", thirds(planted.evaluation)[2]), None, "third")
    state, before, gains = Treatment(), judge.outcome(Treatment()), list[float]()
    for row, treatment in zip(found.rows, found.treatments, strict=True):
        state = state.then(treatment)
        after = judge.outcome(state)
        gain = after.gain_over(before, row.output).value
        gains.append(math.nan if row.how in ("compared", "deployed") else gain)
        before = after
    return gains


def _outcome(
    fault: str,
    model: str,
    quantizer: str,
    before: float,
    after: float,
    planted: Planted,
    found: pt2qa.Diagnosis,
    seconds: float,
    right_cause: bool,
    right_place: bool,
) -> Outcome:
    first = found.rows[0] if found.rows else None
    gain = math.nan if first is None else first.gain
    gains = _on_third(planted, found) if found.rows else []
    third = gains[0] if gains else math.nan
    lost = before - after
    share = math.nan
    if fault and not lost < LEAST_LOSS and (first is None or not math.isnan(gain)):
        real = gain if math.isnan(third) else third
        share = 0.0 if first is None else 1.0 if math.isinf(real) else min(max(real / lost, 0.0), 1.0)
    return Outcome(
        fault,
        model,
        quantizer,
        before,
        after,
        "" if first is None else first.cause,
        "" if first is None else first.name,
        len(found.rows),
        right_cause,
        right_place,
        share,
        gain,
        math.nan if first is None else first.low,
        math.nan if first is None else first.high,
        third,
        all(math.isnan(each) or each > 0 for each in gains),
        seconds,
        found.verdict,
    )


@dataclass(frozen=True)
class Score:
    """The bench in three numbers.

    Attributes:
        diagnosed: how many planted faults were diagnosed.
        right: share of them whose first cause and place are the planted ones, 0..1.
        brought_back, mean_back: median and mean share of the lost dB that the first remedy brings back, 0..1.
        within: share of the gains with an interval that hold the one on the third set, 0..1.
        untouched, false_alarms: how many untouched models; how many of them have a row that does not hold on the third
            set.
        unplanted: faults that cost too little to count, as ``fault model quantizer``.
    """

    diagnosed: int
    right: float
    brought_back: float
    mean_back: float
    within: float
    intervals: int
    untouched: int
    false_alarms: int
    unplanted: tuple[str, ...]


def score(outcomes: Sequence[Outcome], faults: dict[str, Fault]) -> Score:
    """Adds up outcomes."""
    planted = [each for each in outcomes if each.fault]
    healthy = [each for each in outcomes if not each.fault]
    costly = [each for each in planted if faults[each.fault].costs]
    weak = [each for each in costly if each.untouched - each.planted < LEAST_LOSS]
    shares = [each.share for each in costly if each not in weak and not math.isnan(each.share)]
    within = [each.within for each in outcomes if each.within is not None]
    return Score(
        len(planted),
        sum(each.right for each in planted) / len(planted) if planted else math.nan,
        median(shares) if shares else math.nan,
        mean(shares) if shares else math.nan,
        mean(within) if within else math.nan,
        len(within),
        len(healthy),
        sum(not each.holds for each in healthy),
        tuple(f"{each.fault} {each.model} {each.quantizer}" for each in weak),
    )


COLUMNS = [field.name for field in fields(Outcome)]


def append(path: Path, outcome: Outcome) -> None:
    """Adds a line to a CSV file."""
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(asdict(outcome))


def read(path: Path) -> list[Outcome]:
    """The outcomes in a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_outcome_of(row) for row in csv.DictReader(file)]


def _outcome_of(row: dict[str, str]) -> Outcome:
    kinds: dict[str, Callable[[str], Any]] = {
        "str": str,
        "float": float,
        "int": int,
        "bool": lambda text: text == "True",
    }
    return Outcome(**{field.name: kinds[str(field.type)](row[field.name]) for field in fields(Outcome)})
