"""``pt2qa.sensitivity``: what the quantization of each site alone does to the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from tqdm import tqdm

from pt2qa.errors import BatchError, SelectionError
from pt2qa.pairing import QuantizedPair
from pt2qa.report import SensitivityBatch, SensitivityPart, SensitivityReport
from pt2qa.report.sensitivities.rows import ALL_SITES
from pt2qa.sensitivities.exact import walk_places
from pt2qa.sensitivities.flops import count_flops
from pt2qa.sensitivities.ledger import Ledger, covered, make_rows, resumed
from pt2qa.sensitivities.metrics import Loss, OutputMetric, detached, find_metric, paired_leaves, signal_of
from pt2qa.sensitivities.outputs import PostProcess, finished, float_names
from pt2qa.sensitivities.places import Group, Place, find_places
from pt2qa.sensitivities.projection import Projection
from pt2qa.simulator.batches import Batch, count_samples, read_batches
from pt2qa.simulator.verification import digest_of

Method = Literal["projection", "exact"]
METHODS = ("projection", "exact")


def sensitivity(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    method: Method = "projection",
    metric: str | Loss = "sqnr",
    larger_is_worse: bool | None = None,
    post_process: PostProcess | None = None,
    group: Group | None = None,
    projections: int = 4,
    resume: SensitivityReport | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    progress: bool | None = None,
) -> SensitivityReport:
    """Ranks all activations and weights by the error that each one's quantization alone makes in the output.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, read once.  Memory of ``projection`` is that of one training step of a batch,
            without gradients of parameters; smaller batches take less.
        method: ``projection`` estimates the output noise of all sites at once, to first order in their errors, from
            random projections of the output (see :mod:`pt2qa.sensitivities.projection`); ``exact`` runs the model with
            each site alone quantized, from that site on.
        metric: ``sqnr`` (dB); for ``exact`` also ``cosine``, ``l1``, ``atol``, ``kl`` (of the softmax over the last
            axis, in nats), or a function of the reference's and the quantized outputs that returns a number.
        larger_is_worse: of a function's numbers; None is True.
        post_process: from what the model returns to the outputs that count; for ``projection`` it must have a gradient.
        group: ``region`` or ``module``: one row for all their sites together; ``projection`` adds up their noise.
        projections: random projections for each batch; the sampling error falls with their square root, the time
            rises with them.
        resume: the report of an interrupted call with the same arguments; what it holds is not measured again.
        inputs_of: from an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        progress: whether to show a progress bar; None: where stderr is a terminal.

    Returns:
        The report.  Interrupted with Ctrl-C it covers the finished batches, or the finished rows of the first batch,
        and says so.

    Raises:
        BatchError: there is no batch, or one does not fit the captured inputs.
        SelectionError: a method, metric or group is unknown, or goes with another method; ``post_process`` has no
            gradient; ``resume`` is about something else.
        SimulationError: the simulator does not compute what the converted graph computes, or an op has no gradient.
    """
    if method not in METHODS:
        raise SelectionError(f"there is no method {method!r}; expected one of {', '.join(METHODS)}.")
    chosen = find_metric(metric, larger_is_worse)
    if method == "projection" and metric != "sqnr":
        raise SelectionError(f'method="projection" estimates sqnr alone; for {chosen.name} pass method="exact".')
    if projections < 1:
        raise SelectionError(f"projections is {projections}; expected 1 or more.")
    places = find_places(pair.program, group)
    analysis = _Analysis(
        pair=pair,
        places=places,
        metric=chosen,
        post_process=post_process,
        projection=Projection(pair, projections, post_process) if method == "projection" else None,
        ledger=resumed(
            resume,
            {
                "quantizer": pair.quantizer,
                "fingerprint": pair.environment.fingerprint,
                "method": method,
                "metric": chosen.name,
                "group": group or "site",
                "projections": projections if method == "projection" else 0,
                "planned": len(places),
            },
        ),
        bar=tqdm(desc="sensitivity", unit="run", disable=None if progress is None else not progress, leave=False),
    )
    try:
        for number, batch in enumerate(read_batches(batches, inputs_of)):
            analysis.add(number, batch)
    except KeyboardInterrupt:
        if not analysis.ledger.parts:
            raise
        analysis.notes.append(_interrupted(analysis))
    finally:
        analysis.bar.close()
    if not analysis.ledger.data:
        raise BatchError("no batch to measure on. Pass at least one; an iterator that was read before is empty.")
    return analysis.report(group or "site")


@dataclass(slots=True)
class _Analysis:
    """One analysis under way; ``projection`` is None for the exact method."""

    pair: QuantizedPair
    places: tuple[Place, ...]
    metric: OutputMetric
    post_process: PostProcess | None
    projection: Projection | None
    ledger: Ledger
    bar: Any
    notes: list[str] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    flops: dict[int, float] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def add(self, number: int, batch: Batch) -> None:
        """Measures what the ledger lacks of a batch."""
        values = self.pair.values(batch)
        samples = count_samples(values)
        if number == 0:
            self.notes += [*self.pair.notes, *self.pair.program.notes, *self.pair.verify(batch)]
            if self.projection is None:
                flops, _ = count_flops(self.pair.simulator, values)
                self.flops = {step: count / samples for step, count in flops.items()}
        fingerprint = digest_of(values)
        if number < len(self.ledger.data):
            self.ledger.expect(number, SensitivityBatch(fingerprint, samples, 0.0))
        missing = [place for place in range(len(self.places)) if not self.ledger.has(place, number)]
        if number == 0 or missing or not self.ledger.has(ALL_SITES, number):
            measure = self._exact if self.projection is None else self._projected
            measure(number, values, samples, fingerprint, missing)

    def _exact(self, number: int, values: list[Any], samples: int, fingerprint: str, missing: list[int]) -> None:
        reference = detached(self._finished(self.pair.simulator.run(values, on=False)))
        self._whole(number, values, samples, fingerprint, reference)

        def finish(place: int, outputs: Any) -> None:
            self.ledger.add(self.metric.part(place, number, reference, self._finished(outputs), samples))
            self.bar.update()

        walk_places(self.pair.simulator, values, self.places, missing, finish)

    def _projected(self, number: int, values: list[Any], samples: int, fingerprint: str, missing: list[int]) -> None:
        assert self.projection is not None
        found = self.projection.measure(values, number)
        self.flops = self.projection.flops or {}
        self._whole(number, values, samples, fingerprint, found.reference)
        self.reached |= found.noise.keys()
        for place in missing:
            sites = self.places[place].sites
            noise, variance = (
                sum(of_site.get(site, 0.0) for site in sites) for of_site in (found.noise, found.variance)
            )
            self.ledger.add(SensitivityPart(place, number, noise, variance))
        self.bar.update()

    def _whole(self, number: int, values: list[Any], samples: int, fingerprint: str, reference: Any) -> None:
        """Measures the fully quantized model, and holds it against the report to resume."""
        quantized = self._finished(self.pair.simulator.run(values, on=True))
        paired_leaves(reference, quantized)
        self.outputs = float_names(reference)
        part = self.metric.part(ALL_SITES, number, reference, quantized, samples)
        if number < len(self.ledger.data):
            self._check_resumed(number, part)
        else:
            self.ledger.data.append(SensitivityBatch(fingerprint, samples, signal_of(reference)))
        self.ledger.add(part)

    def _check_resumed(self, number: int, part: SensitivityPart) -> None:
        known = self.ledger.parts.get((ALL_SITES, number))
        if known is not None and abs(known.noise - part.noise) > 1e-3 * known.noise:
            raise SelectionError(
                f"cannot resume: on batch {number} the quantized model's squared output error is {part.noise:.6g}, "
                f"in the report {known.noise:.6g}. Pass the same pair and post_process, or start anew without resume."
            )

    def _finished(self, outputs: Any) -> Any:
        return finished(self.pair, outputs, self.post_process)

    def report(self, group: str) -> SensitivityReport:
        """The report of what the ledger holds."""
        ledger = self.ledger
        batches = covered(ledger, len(self.places))
        data = ledger.data[:batches]
        whole = [ledger.parts[ALL_SITES, batch] for batch in range(batches)]
        return SensitivityReport(
            rows=make_rows(self.places, ledger, self.metric, self.flops),
            outputs=self.outputs,
            method="exact" if self.projection is None else "projection",
            metric=self.metric.name,
            worst_is="smallest" if self.metric.smallest_is_worst else "largest",
            group=group,
            projections=0 if self.projection is None else self.projection.projections,
            planned=len(self.places),
            signal=sum(batch.signal for batch in data),
            noise=sum(part.noise for part in whole),
            value=self.metric.value(whole, data),
            batches=batches,
            samples=sum(batch.samples for batch in data),
            notes=tuple(dict.fromkeys([*self.notes, *self._projection_notes()])),
            quantizer=self.pair.quantizer,
            model=self.pair.model,
            environment=self.pair.environment,
            data=tuple(ledger.data),
            parts=tuple(ledger.parts[key] for key in sorted(ledger.parts, key=lambda key: (key[1], key[0]))),
        )

    def _projection_notes(self) -> list[str]:
        if self.projection is None:
            if not self.pair.program.may_share:
                return ["in-place ops write to values that others share, so every row was a run of the whole model"]
            return []
        notes = []
        if self.projection.mixed:
            names = _shortened(list(self.projection.mixed))
            notes.append(f"no axis of independent samples at {names}: projected for the whole batch at once")
        if self.projection.cleaned:
            names = _shortened(list(self.projection.cleaned))
            notes.append(f"errors that are not finite count as zero at {names}")
        if self.reached:
            silent = [place.name for place in self.places if not self.reached.intersection(place.sites)]
            if silent:
                notes.append(
                    f"no gradient leads from {_shortened(silent)} to a floating-point output: counted without noise"
                )
        return notes


def _interrupted(analysis: _Analysis) -> str:
    done = analysis.ledger.finished(len(analysis.places))
    if done:
        return f"interrupted: covers the {done} batches that were finished; go on with resume=report"
    return "interrupted in the first batch: covers the rows that were finished; go on with resume=report"


def _shortened(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
