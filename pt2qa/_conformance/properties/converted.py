"""prepare, calibration and convert succeed, no op is lost, and the accuracy is what the integers allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pt2qa._conformance.ideal import ALLOWANCE, IdealSimulator, output_sqnr
from pt2qa._conformance.layout import some
from pt2qa._conformance.properties.property import Outcome, SkippedError, annotated_in, failed, holds, passed
from pt2qa._conformance.trial import Failure, Stage, Trial
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.program import Site
from pt2qa.errors import QuantizeError, SimulationError
from pt2qa.overrides import Annotations, Edit

_STAGES: tuple[Stage, ...] = ("prepare", "calibrated", "convert", "lower")


@holds("annotate and prepare succeed")
def prepare(trial: Trial) -> Outcome:
    if isinstance(trial.annotated, Failure):
        return failed(trial.annotated.why)
    return _reached(trial, "prepare", "a prepared graph")


@holds("the prepared graph computes what the float graph does, and every observer sees a value")
def calibrated(trial: Trial) -> Outcome:
    return _reached(trial, "calibrated", "equals the float graph, and every observer saw a value")


@holds("convert succeeds")
def convert(trial: Trial) -> Outcome:
    return _reached(trial, "convert", "a converted graph")


@holds("the converted graph is understood: its simulation gives equal bits")
def simulator(trial: Trial) -> Outcome:
    reached = _reached(trial, "lower", "")
    pair = trial.pair
    if isinstance(pair, Failure):
        return reached
    try:
        notes = [note for batch in trial.batches for note in pair.verify(batch)]
    except SimulationError as error:
        return failed(str(error))
    return passed("; ".join([f"{len(pair.sites)} sites, bit for bit on {len(trial.batches)} batches", *notes]))


@holds("every op of the model has a partner in the converted graph, or a reason")
def pairing(trial: Trial) -> Outcome:
    pair = _pair(trial)
    if pair.pairing.unexplained:
        return failed(some([f"{op.name}: {op.reason}" for op in pair.pairing.unexplained]))
    return passed(f"{len(pair.pairing.pairs)} ops paired, {len(pair.pairing.unpaired)} unpaired for a known reason")


def _reached(trial: Trial, stage: Stage, what: str) -> Outcome:
    """Passed if this stage succeeded, failed if the error came from it."""
    annotated_in(trial)
    if isinstance(trial.pair, Failure) and trial.pair.stage == stage:
        return failed(trial.pair.why)
    if isinstance(trial.pair, Failure) and _STAGES.index(trial.pair.stage) < _STAGES.index(stage):
        _pair(trial)
    return passed(what)


def _pair(trial: Trial) -> QuantizedPair:
    """The converted pair.

    Raises:
        SkippedError: there is none.
    """
    annotated_in(trial)
    if isinstance(trial.pair, Failure):
        raise SkippedError(f"not reached: see {'simulator' if trial.pair.stage == 'lower' else trial.pair.stage}")
    return trial.pair


MOST = 4
"""Number of ops per model to leave in float, one at a time: each costs one more quantization of the model."""

Places = Counter[tuple[str, str]]


@holds("leaving one op in float changes the sites around that op, and no others")
def edits(trial: Trial) -> Outcome:
    pair, annotations = _pair(trial), annotated_in(trial).annotations
    ops = [op.name for op in annotations.ops.values() if "float" in op.levels]
    tried = ops[:: -(-len(ops) // MOST)] if ops else []
    faults = [fault for op in tried if (fault := _leave_in_float(trial, pair, annotations, op))]
    if faults:
        return failed(some(faults))
    return passed(f"{len(tried)} of {len(ops)} ops, each left in float by itself: its own sites went, and no others")


def _leave_in_float(trial: Trial, pair: QuantizedPair, annotations: Annotations, op: str) -> str:
    """What is wrong after an op was left in float; empty if nothing is."""
    edit = Edit("float", (op,))
    try:
        edited = annotations.with_edits([edit])
    except QuantizeError as error:
        return str(error)
    expected = _places(pair.sites[index] for index in edited.sites_on(pair.sites))
    if not expected:
        return ""
    after = trial.quantize(edit)
    if isinstance(after, Failure):
        return f"{edit}: {after.why}"
    found = _places(after.sites)
    wrong = {"quantized": found - expected, "in float": expected - found}
    parts = [
        f"{', '.join(f'{kind} of {name}' for kind, name in sites)} {what}" for what, sites in wrong.items() if sites
    ]
    return f"{edit}: unexpectedly {' and '.join(parts)}" if parts else ""


def _places(sites: Iterable[Site]) -> Places:
    return Counter((site.kind, site.name) for site in sites)


@holds("the output is at most two bits worse than ideal scales at the same places make it")
def sqnr(trial: Trial) -> Outcome:
    """The floor depends on the model, the sites and their number of levels, and on no tuned number."""
    pair = _pair(trial)
    values = pair.values(trial.batches[0])
    reference = pair.simulator.run(values, on=False)
    measured = output_sqnr(reference, pair.simulator.run(values, on=True))
    ideal = output_sqnr(reference, IdealSimulator(pair.program, values).run(values, on=True))
    floor = ideal - ALLOWANCE
    numbers = f"{measured:.1f} dB; ideal scales at the same {len(pair.sites)} sites give {ideal:.1f} dB"
    if measured >= floor:
        return passed(numbers)
    alone = {site.index: output_sqnr(reference, pair.simulator.run(values, on={site.index})) for site in pair.sites}
    worst = pair.sites[min(alone, key=lambda index: alone[index])]
    return failed(
        f"{numbers}, and at least {floor:.1f} dB was expected; the worst site is the {worst.kind} of {worst.name}: "
        f"{alone[worst.index]:.1f} dB when only it is quantized"
    )
