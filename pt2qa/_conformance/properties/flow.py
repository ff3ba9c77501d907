"""prepare, calibration and convert succeed, and nothing is lost on the way."""

from __future__ import annotations

from pt2qa._conformance.layout import some
from pt2qa._conformance.properties.property import Outcome, Property, annotated_or_skip, failed, passed, skipped
from pt2qa._conformance.trial import Failure, Stage, Trial
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa.errors import SimulationError

_STAGES: tuple[Stage, ...] = ("prepare", "calibrated", "convert", "lower")
_UNEXPLAINED = ("removed by the quantizer", "put in by the quantizer")
"""Start of pairing's reason for an op that no rule of prepare or convert explains."""


def _prepare(trial: Trial) -> Outcome:
    if isinstance(trial.annotated, Failure):
        return failed(trial.annotated.why)
    return _reached(trial, "prepare", "a prepared graph")


def _calibrated(trial: Trial) -> Outcome:
    return _reached(trial, "calibrated", "equals the float graph, and every observer saw a value")


def _convert(trial: Trial) -> Outcome:
    return _reached(trial, "convert", "a converted graph")


def _simulator(trial: Trial) -> Outcome:
    reached = _reached(trial, "lower", "")
    pair = trial.pair
    if reached.verdict != "passed" or isinstance(pair, Failure):
        return reached
    try:
        notes = [note for batch in trial.batches for note in pair.verify(batch)]
    except SimulationError as error:
        return failed(str(error))
    return passed("; ".join([f"{len(pair.sites)} sites, bit for bit on {len(trial.batches)} batches", *notes]))


def _pairing(trial: Trial) -> Outcome:
    pair = pair_or_skip(trial)
    if not isinstance(pair, QuantizedPair):
        return pair
    unexplained = [f"{op.name}: {op.reason}" for op in pair.pairing.unpaired if op.reason.startswith(_UNEXPLAINED)]
    if unexplained:
        return failed(some(unexplained))
    return passed(f"{len(pair.pairing.pairs)} ops paired, {len(pair.pairing.unpaired)} unpaired for a known reason")


def _reached(trial: Trial, stage: Stage, what: str) -> Outcome:
    """Passed if this stage succeeded, failed if the error came from it."""
    annotated = annotated_or_skip(trial)
    if isinstance(annotated, Outcome):
        return annotated
    pair = trial.pair
    if not isinstance(pair, Failure) or _STAGES.index(pair.stage) > _STAGES.index(stage):
        return passed(what)
    return failed(pair.why) if pair.stage == stage else skipped(_elsewhere(pair))


def pair_or_skip(trial: Trial) -> QuantizedPair | Outcome:
    """The converted pair, or the outcome of a property that needs one."""
    annotated = annotated_or_skip(trial)
    if isinstance(annotated, Outcome):
        return annotated
    pair = trial.pair
    if isinstance(pair, Failure):
        return skipped(_elsewhere(pair))
    return pair


def _elsewhere(failure: Failure) -> str:
    return f"not reached: see {'simulator' if failure.stage == 'lower' else failure.stage}"


PREPARE = Property("prepare", "annotate and prepare succeed", _prepare)
CALIBRATED = Property(
    "calibrated", "the prepared graph computes what the float graph does, and every observer sees a value", _calibrated
)
CONVERT = Property("convert", "convert succeeds", _convert)
SIMULATOR = Property("simulator", "the converted graph is understood: its simulation gives equal bits", _simulator)
PAIRING = Property("pairing", "every op of the model has a partner in the converted graph, or a reason", _pairing)
