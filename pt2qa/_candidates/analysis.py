"""Several quantizer configurations of one model in one pass: the float model runs once for all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pt2qa._ambient import torch_defaults
from pt2qa._candidates.report import Candidate, CandidateReport, CandidateRow
from pt2qa._capture.program import Capture
from pt2qa._exclusion import computes
from pt2qa._grouping import grouped
from pt2qa._metrics import NoiseSums, sums_of_row
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import quantize
from pt2qa._ranks import over_ranks
from pt2qa._report.merging import merged_data
from pt2qa._report.prose import counted
from pt2qa._report.set_apart import SetApart, added
from pt2qa._report.sums import EACH, FIRST, Mergeable, pack, settings_of, unpack
from pt2qa._simulator.accumulate import (
    Tally,
    accumulate,
    empty_batch,
    first_fault,
    input_ranges,
    is_empty,
    refuse_empty,
)
from pt2qa._simulator.batches import Batch, count_samples, flat_outputs, has_no_element, output_names
from pt2qa._simulator.data import Counted, Data, Mask, Positions
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Program, Slot, Step
from pt2qa._simulator.verification import Outputs, Verification
from pt2qa.errors import BatchError, Pt2qaError, QuantizeError, ReportError, SelectionError, SimulationError
from pt2qa.plugins import describe, resolve


@torch_defaults
@over_ranks
def compare_quantizers(
    capture: Capture,
    quantizers: Mapping[str, Any] | Sequence[Any],
    calibration: Iterable[Any],
    batches: Iterable[Any] | None = None,
    *,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    as_deployed: bool = False,
    progress: bool | None = None,
) -> CandidateReport:
    """Quantizes a model in several ways and compares them, as a whole and layer by layer.

    All quantized models advance together with one run of the float model, so each holds only its live values in memory,
    whatever the number of layers or batches.  Values are compared as the next op reads them: rounded, if the candidate
    rounds them.

    Args:
        capture: what :func:`pt2qa.capture` returned; it is not changed.
        quantizers: a dict from names for the report to what :func:`pt2qa.quantize` takes, or a list of the latter.
            Existing pairs are allowed too, such as that of a reconfiguration.
        calibration: batches, read once for each candidate: a list, or a loader that starts over.
        batches: what to measure on; None for the calibration batches.
        inputs_of: maps an item of either to a batch.
        mask: which positions count, as in :func:`pt2qa.compare_layers`; calibration sees all of them.
        as_deployed: whether to compare what the backends' kernels compute, as :meth:`QuantizedPair.as_deployed` does.
        progress: whether to show progress bars; None: if stderr is a terminal.

    Returns:
        The report.  A candidate that fails is listed with its error; the others still run.  After Ctrl-C, if at least
        one batch is finished, the report covers the finished batches and says so.

    Raises:
        SelectionError: there is no candidate, two have the same name, a pair is of another model, or
            ``mask`` names no input.
        QuantizeError: every candidate failed to be quantized.
        SimulationError: the simulator computes none of the candidates exactly as its converted graph does.
        BatchError: ``calibration`` can be read only once, or there is no batch.

    >>> report = pt2qa.compare_quantizers(capture, ["xnnpack", "xnnpack:mode=dynamic"], [x], progress=False)
    >>> [candidate.name for candidate in report.candidates]
    ['xnnpack', 'xnnpack:mode=dynamic']
    """
    named = _named(quantizers)
    if isinstance(calibration, Iterator):
        raise BatchError(
            f"calibration is of type {type(calibration).__name__}, which can be read only once, but each candidate "
            "needs the batches again. Pass a list, or a loader that starts over."
        )
    data = Data("batches", calibration, inputs_of, mask, progress)
    pairs: dict[str, QuantizedPair] = {}
    failed: dict[str, str] = {}
    for name, quantizer in named.items():
        try:
            pair = _pair(capture, name, quantizer, data)
            pairs[name] = pair.as_deployed() if as_deployed else pair
        except (SelectionError, BatchError):
            raise
        except Pt2qaError as error:
            failed[name] = str(error)
    if not pairs:
        raise QuantizeError("; ".join(f"{name}: {text}" for name, text in failed.items()))
    run = _Comparison(pairs, failed, mask)
    data = data if batches is None else replace(data, batches=batches)
    notes = accumulate(run, data, title="compare quantizers", purpose="compare on")
    refuse_empty(run.batches, run.health.set_apart)
    notes += [f"{n}: {note}" for n, pair in pairs.items() for note in (*pair.notes, *run.checks[n].notes)]
    notes += run.notes()
    candidates = [_candidate(name, named[name], pairs.get(name), failed) for name in named]
    settings = {f"quantization of {name}": pair.quantization for name, pair in pairs.items()}
    settings |= run.positions.settings
    return CandidateReport(
        **compared(run.sums(), candidates, run.health.set_apart, run.batches, settings),
        notes=tuple(dict.fromkeys(notes)),
        samples=run.health.samples,
        input_ranges=run.health.input_ranges,
        model=capture.model,
        environment=next(iter(pairs.values())).environment,
    )


def _named(quantizers: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    if isinstance(quantizers, str):
        quantizers = [quantizers]
    if not isinstance(quantizers, Mapping):
        names = [quantizer if isinstance(quantizer, str) else _described(quantizer) for quantizer in quantizers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SelectionError(f"two candidates are called {twice[0]!r}. Pass a dict with a name for each.")
        quantizers = dict(zip(names, quantizers, strict=True))
    if not quantizers:
        raise SelectionError("there is no candidate. Pass a list of quantizers, or a dict with names for them.")
    return {str(name): quantizer for name, quantizer in quantizers.items()}


def _described(quantizer: Any) -> str:
    return quantizer.quantizer if isinstance(quantizer, QuantizedPair) else describe(resolve(quantizer))


def _pair(capture: Capture, name: str, quantizer: Any, data: Data) -> QuantizedPair:
    if not isinstance(quantizer, QuantizedPair):
        return quantize(capture, quantizer, data.batches, inputs_of=data.inputs_of, progress=data.progress)
    if quantizer.capture is not capture or (quantizer.recipe is not None and quantizer.recipe.qat):
        raise SelectionError(
            f"{name}: the pair was made from another capture, or trained, so it has another float model. Pass a pair "
            "that pt2qa.quantize(capture, ...) returned, without QAT."
        )
    return quantizer


class _Outputs(NamedTuple):
    """One run of all models on a batch: their flat outputs, and the noise of each value by candidate."""

    reference: list[Any]
    quantized: dict[str, list[Any]]
    noises: list[tuple[ValueSums, dict[str, NoiseSums]]]
    has_nan: bool
    """Whether the reference returns NaN at a position that counts."""


class _Comparison(Tally):
    """One float model and several quantized models that advance together, op by op; ``failed``: why others do not."""

    def __init__(self, pairs: dict[str, QuantizedPair], failed: dict[str, str], mask: Mask | None) -> None:
        self.pairs, self.failed = pairs, failed
        self.checks = {name: Verification(pair.graphs) for name, pair in pairs.items()}
        # The float graphs differ only in what prepare folded and rewrote; calibration has checked that.
        self.first = first = next(iter(pairs.values()))
        self.reference = first.simulator
        self.positions = Positions(first.quantized, first.program, mask)
        self.places = {name: _places(pair.program) for name, pair in pairs.items()}
        self.known = {name: frozenset(places.values()) for name, places in self.places.items()}
        ops = [step for step in first.program.steps if step.site is None]
        self.values = {step.name: ValueSums(step.handle, step.name, step.module, step.op) for step in ops}
        self.slots = {step.name: step.out for step in ops}
        self.outputs: list[ValueSums] = []

    def add(self, batch: Batch) -> None:
        """Runs all models on a batch and adds the results; an interrupted batch leaves no trace."""
        values = self.first.values(batch)
        if has_no_element(values):
            self.took(0, empty_batch(self.batches))
            return
        counted = self.positions.of(batch, values)
        self._take(values, self._verified(values, counted), counted)

    def _verified(self, values: list[Any], counted: Counted) -> _Outputs:
        """One run; drops candidates that the simulator does not compute exactly."""
        run = self._measure(values, counted)
        for name in list(self.pairs):
            try:
                while not self.checks[name].accepts(Outputs(run.reference, run.quantized[name]), values):
                    run = self._measure(values, counted)
            except SimulationError as error:
                self.failed[name] = str(error)
                del self.pairs[name]
        if not self.pairs:
            raise SimulationError("; ".join(f"{name}: {text}" for name, text in self.failed.items()))
        return run

    @computes
    def _measure(self, values: list[Any], counted: Counted) -> _Outputs:
        """Runs all models on a batch; adds nothing yet, so that the run can be checked or repeated."""
        found: list[tuple[ValueSums, dict[str, NoiseSums]]] = []
        runners = {
            name: _Runner(pair.simulator.walk(values, True), self.places[name]) for name, pair in self.pairs.items()
        }

        def visit(step: Step, value: Any) -> None:
            if step.site is None:
                others = {name: r.value(step.name) for name, r in runners.items() if step.name in self.known[name]}
                kept = functools.partial(counted.of, step.out)
                found.append((self.values[step.name], _noise(value, others, kept)))

        reference = flat_outputs(self.reference.run(values, False, visit))
        with torch.no_grad():
            results = {name: flat_outputs(runner.finish()) for name, runner in runners.items()}
        if not self.outputs:
            names = output_names(self.first.quantized, len(reference))
            self.outputs = [ValueSums(-1, name, "", "output") for name in names]
        slots = [leaf.number if isinstance(leaf, Slot) else -1 for leaf in flat_outputs(self.first.program.outputs)]
        has_nan = False
        for number, (output, leaf) in enumerate(zip(self.outputs, reference, strict=True)):
            others = {name: result[number] for name, result in results.items()}
            kept = functools.partial(counted.of, slots[number])
            found.append((output, _noise(leaf, others, kept)))
            has_nan = has_nan or (isinstance(leaf, Tensor) and bool(kept(leaf).isnan().any()))
        return _Outputs(reference, results, found, has_nan)

    def _take(self, values: list[Any], run: _Outputs, counted: Counted) -> None:
        samples = count_samples(values)
        apart = self._why_apart(values, samples, run)
        left_out = self.pairs if any(not each.candidate for each in apart) else {each.candidate for each in apart}
        for value, noises in run.noises:
            value.add(noises, left_out)
        able = [pair.program for name, pair in self.pairs.items() if name not in left_out]
        self.took(samples, *apart, ranges=added(input_ranges(each, values, counted) for each in able))

    def _why_apart(self, values: list[Any], samples: int, run: _Outputs) -> list[SetApart]:
        """Why a batch is excluded for all candidates, or for those that fail on it; empty if it counts.

        The rules are those of ``compare_layers``.
        """
        if is_empty(samples, run.reference):
            return [empty_batch(self.batches)]
        broken = {name for _, noises in run.noises for name, noise in noises.items() if math.isnan(noise.noise)}
        apart = []
        for name in (name for name in self.pairs if run.has_nan or name in broken):
            own = first_fault(self.pairs[name].simulator, values, self.batches, samples)
            if own is None:
                continue
            if not own.is_failure:
                return [own]
            apart.append(replace(own, candidate=name))
        return apart

    def sums(self) -> list[ValueSums]:
        """Those of the outputs, then of the ops in graph order; what is no tensor is left out, ops are noted."""
        return [value.of(self.pairs) for value in (*self.outputs, *self.values.values()) if value.seen]

    def notes(self) -> list[str]:
        slots = [self.slots[name] for name, value in self.values.items() if value.counted]
        notes = self.positions.note([*slots, *slots_in(self.first.program.outputs)])
        if missing := [name for name, value in self.values.items() if not value.seen]:
            notes.append(f"not compared, no single tensor as output: {len(missing)} ops, such as {missing[0]}")
        for name in self.pairs:
            if extra := [op for op in self.known[name] if op not in self.values]:
                notes.append(f"not compared, only in {name}: {len(extra)} ops, such as {min(extra)}")
        return notes


class _Runner:
    """A model that runs up to a requested op; ``places``: by step number, the op whose value is observed there."""

    def __init__(self, walk: Generator[tuple[Step, Any], None, Any], places: Mapping[int, str]) -> None:
        self.walk, self.places = self._stored(walk), places
        self.passed: dict[str, Any] = {}
        self.outputs: Any = None

    def _stored(self, walk: Generator[tuple[Step, Any], None, Any]) -> Iterator[tuple[Step, Any]]:
        self.outputs = yield from walk

    def value(self, name: str) -> Any:
        """The value of an op; models may run independent ops in different orders."""
        if name in self.passed:
            return self.passed.pop(name)
        for step, value in self.walk:
            here = self.places.get(step.index)
            if here == name:
                return value
            if here is not None:
                self.passed[here] = value.clone() if isinstance(value, Tensor) else value
        raise AssertionError(f"{name} is among the places, so the run gives it")

    def finish(self) -> Any:
        for _ in self.walk:
            pass
        return self.outputs


def _places(program: Program) -> dict[int, str]:
    """By step number, the op whose value is observed there: at its first site, or at the op itself."""
    sites: dict[int, int] = {}
    for step in program.steps:
        if step.site is not None and step.duplicate_of is None:
            sites.setdefault(step.reads[0], step.index)
    return {sites.get(step.out, step.index): step.name for step in program.steps if step.site is None}


def _noise(reference: Any, others: Mapping[str, Any], kept: Callable[[Any], Any]) -> dict[str, NoiseSums]:
    """Sums for each candidate whose value is a tensor of the reference's shape, over the elements that are ``kept``."""
    if not isinstance(reference, Tensor):
        return {}
    alike = {n: other for n, other in others.items() if isinstance(other, Tensor) and other.shape == reference.shape}
    if not alike:
        return {}
    first, *rest = map(kept, alike.values())
    whole, noises = sums_of_row(kept(reference), first, tuple(rest))
    # The sums exclude values that are not finite in one of the two; there is then no SQNR.
    noise = math.nan if whole.nonfinite else whole.noise
    return dict(zip(alike, (NoiseSums(whole.signal, noise, whole.count), *noises), strict=True))


def _candidate(name: str, quantizer: Any, pair: QuantizedPair | None, failed: Mapping[str, str]) -> Candidate:
    if pair is None:
        spec = quantizer if isinstance(quantizer, str) else type(quantizer).__name__
        return Candidate(name, spec, math.nan, 0, 0, 0, 0, 0, failed[name])
    carrying = [entry for entry in pair.coverage if entry.carries_arithmetic]
    kinds = [site.kind for site in pair.sites]
    return Candidate(
        name=name,
        quantizer=pair.quantizer,
        sqnr=math.nan,
        quantized_ops=sum(entry.quantized for entry in carrying),
        ops=sum(entry.total for entry in carrying),
        activations=kinds.count("activation"),
        weights=kinds.count("weight"),
        bytes=_stored_bytes(pair),
    )


def _stored_bytes(pair: QuantizedPair) -> int:
    """Bytes of the parameters: quantized elements at their integer width, all others at their float width.

    A weight with several readers, such as the steps of an LSTM, counts once for each distinct rounding.
    """
    sizes: dict[tuple[int, str | None], int] = {}
    for constant in pair.program.constants:
        value = constant.reference
        if isinstance(value, Tensor) and (constant.is_parameter or constant.site is not None):
            dtype = None if constant.site is None else pair.sites[constant.site].params.dtype
            width = value.element_size() if dtype is None else getattr(torch, dtype).itemsize
            sizes[value.data_ptr(), dtype] = value.numel() * width
    return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class ValueSums(Mergeable):
    """The sums of one value by candidate, over the batches that count and those set apart; see ``CandidateRow``."""

    handle: int = field(default=-1, metadata=FIRST)
    name: str = field(default="", metadata=FIRST)
    module: str = field(default="", metadata=FIRST)
    op: str = field(default="", metadata=FIRST)
    counted: dict[str, NoiseSums] = field(default_factory=dict, metadata=EACH)
    apart: dict[str, NoiseSums] = field(default_factory=dict, metadata=EACH)

    @property
    def seen(self) -> bool:
        return bool(self.counted or self.apart)

    def add(self, sums: Mapping[str, NoiseSums], left_out: Collection[str]) -> None:
        """Adds those of a batch; ``left_out`` are the candidates for which it is set apart."""
        for name, new in sums.items():
            into = self.apart if name in left_out else self.counted
            into[name] = into.get(name, NoiseSums()).merge(new)

    def of(self, names: Collection[str]) -> ValueSums:
        """Those of some candidates, empty ones included."""
        counted, apart = ({name: own.get(name, NoiseSums()) for name in names} for own in (self.counted, self.apart))
        return replace(self, counted=counted, apart=apart)

    def row(self) -> CandidateRow:
        """The row; if no batch counts for a candidate, it has the SQNR of those set apart rather than nothing."""
        nothing = NoiseSums()
        shown = {name: self.apart[name] if sums == nothing else sums for name, sums in self.counted.items()}
        sqnr = {name: sums.sqnr for name, sums in shown.items()}
        return CandidateRow(self.handle, self.name, self.module, self.op, sqnr)


def compared(
    values: Sequence[ValueSums],
    candidates: Sequence[Candidate],
    set_apart: Sequence[SetApart],
    batches: int,
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """The fields of a report that follow from the sums of the outputs and, after them, the ops.

    ``candidates`` are all of them; those that did not run have a note.
    """
    rows = tuple(value.row() for value in values)
    ran = values[0].counted.keys()
    failed = _failures(set_apart, batches)
    return {
        "rows": rows,
        "candidates": tuple(
            replace(each, sqnr=_sqnr(each.name, rows, failed), note=failed.get(each.name, ""))
            if each.name in ran
            else each
            for each in candidates
        ),
        "set_apart": tuple(set_apart),
        "batches": batches,
        "sums": pack(settings, values=values),
    }


def _sqnr(name: str, rows: Sequence[CandidateRow], failed: Mapping[str, str]) -> float:
    """The smallest of the outputs; an output or a batch without a number must not hide behind the others."""
    outputs = [row.custom[name] for row in rows if row.op == "output"]
    return math.nan if name in failed or any(map(math.isnan, outputs)) else min(outputs, default=math.nan)


def _failures(set_apart: Sequence[SetApart], batches: int) -> dict[str, str]:
    """For each candidate whose quantization causes NaN or infinities: on how many batches, and where first."""
    found = grouped((apart.candidate, apart) for apart in set_apart if apart.candidate)
    total = counted(batches, "batch", "batches")
    return {name: f"on {len(own)} of {total}: {own[0].fault} ({own[0].place})" for name, own in found.items()}


def merged(reports: Sequence[Any], metrics: Mapping[str, Any]) -> Any:
    """One report of candidates of several; see :func:`pt2qa.merge`."""
    first = reports[0]
    values = _values(first)
    for number, report in enumerate(reports[1:], 2):
        others = _values(report)
        if [(each.handle, each.name) for each in others] != [(each.handle, each.name) for each in values]:
            raise ReportError(
                f"cannot merge: report {number} compares other values than the first one. Shards of one run are made "
                "with the same candidates and the same arguments."
            )
        values = list(map(ValueSums.merge, values, others))
    data = merged_data(reports)
    found = compared(values, first.candidates, data["set_apart"], data["batches"], settings_of(first.sums))
    return replace(first, **{**data, **found})


def _values(report: Any) -> list[ValueSums]:
    names = report.rows[0].custom if report.rows else ()
    none = {name: NoiseSums() for name in names}
    return unpack(report.sums, "values", ValueSums(counted=none, apart=none))
