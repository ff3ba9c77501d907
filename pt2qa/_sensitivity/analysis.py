from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from pt2qa._ambient import torch_defaults
from pt2qa._quantize.pairing import QuantizedPair, check_pair, identity_of
from pt2qa._ranks import NoBatchError, NoNumberError, active, everywhere, first_anywhere, over_ranks
from pt2qa._report.notes import Note
from pt2qa._report.prose import counted, few
from pt2qa._report.set_apart import InputRange, SetApart, about_faults, added
from pt2qa._report.sums import QUANTIZATION
from pt2qa._sensitivity.costs import CLEARLY, Costs, Survey, estimate, survey
from pt2qa._sensitivity.gradients import WithoutGradient
from pt2qa._sensitivity.ledger import PROJECTIONS, Ledger, covered, packed, precision_notes, results, resumed
from pt2qa._sensitivity.metrics import Loss, OutputMetric, PostProcess, fault_of, finished, float_names, signal_of
from pt2qa._sensitivity.paths import plan_paths
from pt2qa._sensitivity.precision import FEWEST, MOST, needed
from pt2qa._sensitivity.projection import PostProcessWithoutGradient, ProjectedBatch, Projection
from pt2qa._sensitivity.report import ALL_SITES, SensitivityBatch, SensitivityPart, SensitivityReport
from pt2qa._sensitivity.roundings import Variant, own_rounding
from pt2qa._sensitivity.site_groups import Group, SiteGroup, find_site_groups, walk_places, whole_model
from pt2qa._simulator.accumulate import accumulate, empty_batch, input_ranges
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Counted, Data, Mask, Positions
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.verification import Outputs, Verification, digest_of
from pt2qa.errors import SelectionError

Method = Literal["auto", "projection", "exact"]
QUANTIZED = "quantized"
"""The one variant of each site: quantized as the pair quantizes it."""


@torch_defaults
@over_ranks
def sensitivity(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    method: Method = "auto",
    metric: str | Loss = "sqnr",
    larger_is_worse: bool | None = None,
    post_process: PostProcess | None = None,
    group: Group | None = None,
    projections: int | None = None,
    resume: SensitivityReport | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    progress: bool | None = None,
) -> SensitivityReport:
    """Ranks all activations and weights by the output error that quantizing each one alone causes.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.
        batches: iterable of batches, consumed once.  Batches without a number (empty, or with non-finite outputs) are
            set apart and counted in the report.  ``projection`` needs the memory of one training step on a batch,
            without parameter gradients; smaller batches take less.
        method: ``projection`` estimates the output noise of all sites at once, to first order in their errors, from
            random projections of the output (see :mod:`pt2qa._sensitivity.projection`); ``exact`` runs the model with
            each site alone quantized, from that site on; ``auto`` takes the cheaper by estimate (see
            :mod:`pt2qa._sensitivity.costs`), and ``exact`` if projection is not possible: the notes say which and why.
        metric: ``sqnr`` (dB); for ``exact`` also ``cosine``, ``l1``, ``atol``, ``kl`` (of the softmax over the last
            axis, in nats), or a function of the reference's and the quantized outputs that returns a number.
        larger_is_worse: for a function's numbers; None is True.
        post_process: maps the model's outputs to those that count; for ``projection`` it must be differentiable.
        group: ``region`` or ``module``: one row for all their sites together; ``projection`` sums their noise.
        projections: random projections per batch; the sampling error falls with their square root, the time rises with
            their number.  None: 4, and up to 64 if the ranking is not certain enough (see
            :mod:`pt2qa._sensitivity.precision`); each site alone if that costs less, or if 64 are too few.
        resume: the report of an interrupted call with the same arguments; its results are not measured again.  Within
            :func:`pt2qa.distributed`, a rank knows its batches in it by their content, so the data may be divided
            otherwise now; one rank that has the report will do.
        inputs_of: maps an item of ``batches`` to a batch, for loaders that yield ``(input, target)``.
        mask: which positions count, as in :func:`pt2qa.compare_layers`: only the outputs there have errors.  A function
            as ``metric`` receives them, of shape (positions, ...).
        progress: whether to show a progress bar; None: if stderr is a terminal.

    Returns:
        The report.  After Ctrl-C it covers the finished batches, or the finished rows of the first batch, and says so.

    Raises:
        BatchError: there is no batch, none gives a number, or one does not match the captured inputs.
        SelectionError: a method, metric or group is unknown or does not fit the method; ``post_process`` is not
            differentiable; ``resume`` is of another analysis.
        SimulationError: the simulator does not reproduce the converted graph, or an op has no gradient.

    >>> [row.kind for row in pt2qa.sensitivity(pair, [x], progress=False).rows]
    ['activation', 'weight', 'activation']
    """
    check_pair(pair)
    if method not in get_args(Method):
        raise SelectionError(f"unknown method {method!r}; expected one of {', '.join(get_args(Method))}.")
    if isinstance(metric, str):
        metric = metric.lower()
    chosen = OutputMetric.of(metric, larger_is_worse)
    if method == "projection" and metric != "sqnr":
        raise SelectionError(f'method="projection" supports sqnr only; for {chosen.name} pass method="exact".')
    if projections is not None and projections < 1:
        raise SelectionError(f"projections is {projections}; expected 1 or more.")
    resume = first_anywhere(resume)
    if method == "auto" and resume is not None and resume.method in get_args(Method):
        method = resume.method  # type: ignore[assignment]
    if method == "exact" and projections is not None:
        raise SelectionError('projections applies only to method="projection"; leave it out for method="exact".')
    places = find_site_groups(pair.program, group)
    expected: dict[str, object] = {
        "quantizer": pair.quantizer,
        "fingerprint": pair.environment.fingerprint,
        "method": method,
        "metric": chosen.name,
        "group": group or "site",
        "planned": len(places),
    }
    if method == "projection" and projections is not None:
        expected["projections"] = projections
    earlier = resumed(resume, expected)
    alone = active() is None
    data = Data("batches", batches, inputs_of, mask, progress)
    with data.bar("sensitivity", "run") as bar:
        check, positions = Verification(pair.graphs), data.positions(pair.quantized, pair.program)
        analysis = _Analysis(pair, places, chosen, post_process, method, projections, bar, check, positions)
        if alone:
            analysis.ledger = earlier
        else:
            analysis.earlier = earlier
        items = iter(data)
        try:
            if method == "auto" and not alone:
                items = analysis.agree(items)
            # A batch may take long, so the bar counts runs.
            read = Data("batches", items)
            interrupted = accumulate(analysis, read, title="", purpose="measure on")
        except (NoBatchError, KeyboardInterrupt):
            everywhere(0)
            raise
    ledger = analysis.ledger
    taken = sum(everywhere(analysis.taken))
    if taken < len(analysis.earlier.data):
        what = counted(len(analysis.earlier.data), "batch", "batches")
        analysis.notes.append(
            f"of the {what} in the report to resume, {taken} are in the data; the others do not count"
        )
    if interrupted:
        if not ledger.parts:
            raise KeyboardInterrupt
        analysis.notes.append(_interrupted(analysis))
    if not ledger.counted:
        faults = " ".join(about_faults(list(ledger.set_apart.values()), len(ledger.data)))
        raise NoNumberError(f"no batch can be measured. {faults} Pass batches on which both models are finite.")
    return analysis.report(group or "site")


@dataclass(slots=True)
class _Analysis:
    """One analysis in progress; ``method`` and ``projections`` are as requested.

    ``seen`` and ``projection`` are None before the first batch with samples, and ``projection`` for the exact method.
    ``number``, ``known`` and ``counted`` are of the batch that is measured; ``costs`` come with ``projection``.
    ``taken``: how many batches were taken over from ``earlier``, an interrupted call of all ranks.
    """

    pair: QuantizedPair
    places: tuple[SiteGroup, ...]
    metric: OutputMetric
    post_process: PostProcess | None
    method: Method
    projections: int | None
    bar: Any
    verification: Verification
    positions: Positions
    ledger: Ledger = field(default_factory=Ledger)
    earlier: Ledger = field(default_factory=Ledger)
    taken: int = 0
    counted: Counted = field(init=False)
    seen: Survey | None = None
    costs: Costs = field(init=False)
    projection: Projection | None = None
    notes: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    reached: set[int] = field(default_factory=set)
    number: int = -1
    known: SensitivityBatch = field(init=False)
    input_ranges: dict[int, tuple[InputRange, ...]] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Batches begun, in an earlier call or in this one."""
        return len(self.ledger.data)

    def agree(self, items: Iterator[Batch]) -> Iterator[Batch]:
        """Measures the first batch with samples, and goes on as the first rank that has one; returns what is left."""
        begun = []
        try:
            for batch in items:
                begun.append(batch)
                self.add(batch)
                if self.seen is not None:
                    break
        except KeyboardInterrupt:
            first_anywhere(None)
            raise
        agreed = first_anywhere(None if self.seen is None else (self.projection is None, self.choices))
        if agreed is None:
            return items
        exact, self.choices = agreed
        self.method = "exact" if exact else "projection"
        if self.seen is None or exact == (self.projection is None):
            return items
        self.ledger, self.number, self.seen, self.projection, self.notes = Ledger(), -1, None, None, []
        return itertools.chain(begun, items)

    def add(self, batch: Batch) -> None:
        """Measures what the ledger lacks for a batch."""
        self.number = number = self.number + 1
        values = self.pair.values(batch)
        self.known = known = SensitivityBatch(digest_of(values), count_samples(values), 0.0)
        if number == len(self.ledger.data):
            self._take(known.fingerprint)
        if number < len(self.ledger.data):
            if self.ledger.data[number].fingerprint != known.fingerprint:
                raise SelectionError(
                    f"batch {number} is not that of the report to resume. "
                    "Pass the same batches in the same order, or start again without resume."
                )
            if number in self.ledger.set_apart:
                return
        if not known.samples:
            self._set_apart(empty_batch(number))
            return
        self.counted = self.positions.of(batch, values)
        self.input_ranges[number] = input_ranges(self.pair.program, values, self.counted)
        missing = [place for place in range(len(self.places)) if not self.ledger.has(place, number)]
        if self.seen is None:
            self.notes += [*self.pair.notes, *self.pair.program.notes]
            self.seen = self._look(values)
        elif not missing and self.ledger.has(ALL_SITES, number):
            return
        if self.projection is None:
            self._exact(values, missing)
            return
        # By content, so that a batch has the same vectors in whichever run it is.
        content = known.fingerprint if self.counted.keep is None else digest_of(self.counted.inputs(values))
        try:
            started = self.projection.start(values, int(content[:12], 16), self.counted)
            self._projected(values, missing, started)
        except (PostProcessWithoutGradient, WithoutGradient) as error:
            if self.method != "auto" or self.ledger.parts:
                raise
            self._take_exact(error.reason)
            self._exact(values, missing)

    def _take(self, fingerprint: str) -> None:
        """Takes over what other ranks measured of the next batch; equal ones in their order."""
        same, repeats = self.earlier.by_content[fingerprint], len(self.ledger.by_content[fingerprint])
        if repeats < len(same):
            self.ledger.append(self.earlier, same[repeats])
            self.taken += 1

    def _look(self, values: list[Any]) -> Survey:
        """Surveys the first batch and chooses the method."""
        program = self.pair.program
        paths = plan_paths(program)
        seen = survey(self.pair.simulator, values)
        if self.method != "exact":
            simulator = self.pair.simulator
            variants = {site.index: {QUANTIZED: Variant(own_rounding(simulator, site))} for site in program.sites}
            self.projection = Projection(self.pair, self.post_process, paths, variants)
            self.costs = estimate(program, self.places, paths, seen)
        if self.method == "auto" and self.metric.name != "sqnr":
            self._take_exact(f"the projection supports sqnr only, not {self.metric.name}")
        elif self.method == "auto":
            count = self.projections or FEWEST
            if self.costs.exact <= CLEARLY * self.costs.projection(count):
                self._take_exact(self._compared("exact", count))
            else:
                self.choices.append(f'method="auto" took the projection: {self._compared("projection", count)}')
        return seen

    def _compared(self, first: str, count: int) -> str:
        costs = self.costs.exact, self.costs.projection(count)
        exact, projection = (f"{cost / self.costs.forward:.3g}" for cost in costs)
        vectors = f"with {counted(count, 'random vector')} about"
        if first == "exact":
            return f"for each batch it takes about {exact} float forwards, the projection {vectors} {projection}"
        return f"for each batch it takes about {projection} float forwards, the exact method about {exact}"

    def _take_exact(self, why: str) -> None:
        self.projection = None
        self.choices.append(f'method="auto" took the exact method: {why}')

    def _exact(self, values: list[Any], missing: list[int]) -> None:
        simulator = self.pair.simulator
        returned = self.verification.run(lambda: Outputs(*whole_model(simulator, values)), values)
        reference, quantized = (self._finished(each) for each in (returned.reference, returned.quantized))
        if not self._counts(values, reference, quantized):
            return
        self._whole(self.known, reference, quantized)
        self._alone(values, missing, reference)

    def _alone(self, values: list[Any], places: list[int], reference: Any) -> None:
        """Adds places that are quantized one by one."""

        def finish(place: int, outputs: Any) -> None:
            samples = self.known.samples
            self.ledger.add(self.metric.part(place, self.number, reference, self._finished(outputs), samples))
            self.bar.update()

        walk_places(self.pair.simulator, values, self.places, places, finish)

    def _projected(self, values: list[Any], missing: list[int], started: ProjectedBatch) -> None:
        # Gradients are computed on the reference, in its own memory layouts.
        returned = self.verification.run(
            lambda: Outputs(started.returned, self.pair.simulator.run(values, on=True)), values
        )
        quantized, reference = self._finished(returned.quantized), self._selected(started.reference)
        if not self._counts(values, reference, quantized):
            return
        found = self._rounds(started, missing)
        if found is None:
            self._exact(values, missing)
            return
        self.reached |= started.reached
        self._whole(replace(self.known, projections=started.projections), reference, quantized)
        # More than all sites make together: the error is too large for a gradient, or others cancel it.
        whole = self.ledger.parts[self.number][ALL_SITES].noise
        large = [place for place, (noise, _) in found.items() if noise > whole and self.places[place].site >= 0]
        if large and self.projections is None:
            self._alone(values, large, reference)
        for place, (noise, variance) in found.items():
            if not self.ledger.has(place, self.number):
                self.ledger.add(SensitivityPart(place, self.number, noise, variance))
        self.bar.update()

    def _rounds(self, started: ProjectedBatch, missing: list[int]) -> dict[int, tuple[float, float]] | None:
        """Noise and its variance by place, from as many vectors as needed; None if exact runs cost less."""
        started.project(FEWEST if self.projections is None else self.projections)
        while True:
            found = {place: started.noise((site, QUANTIZED) for site in self.places[place].sites) for place in missing}
            if self.projections is not None:
                return found
            wanted = needed(
                [self.ledger.noise[place] + noise for place, (noise, _) in found.items()],
                [variance for _, variance in found.values()],
                [self.ledger.variance[place] for place in found],
                started.projections,
            )
            if wanted == started.projections:
                return found
            more = (MOST if wanted is None else wanted) - started.projections
            # Alone, the sites of a group are quantized together; here, their noise is added up.
            alone = all(place.site >= 0 for place in self.places)
            if alone and (wanted is None or self.costs.exact < self.costs.projection(more)):
                if self.method == "auto" and not self.ledger.parts:
                    what = f"{more} more vectors" if wanted else f"more than {MOST} vectors"
                    self._take_exact(f"the ranking needs {what}; {self._compared('exact', more)}")
                return None
            if not more:
                return found
            started.project(more)

    def _counts(self, values: list[Any], reference: Any, quantized: Any) -> bool:
        """Whether the outputs of both models give numbers; if not, the batch is set apart."""
        fault = fault_of(self.pair.simulator, values, self.number, self.known.samples, reference, quantized)
        if fault is not None:
            self._set_apart(fault)
        return fault is None

    def _set_apart(self, apart: SetApart) -> None:
        self.ledger.begin(self.known)
        self.ledger.set_apart[self.number] = apart

    def _whole(self, known: SensitivityBatch, reference: Any, quantized: Any) -> None:
        """Adds the fully quantized model, or checks it against the report to resume."""
        number = self.number
        self.outputs = float_names(reference)
        part = self.metric.part(ALL_SITES, number, reference, quantized, known.samples)
        if number == len(self.ledger.data):
            self.ledger.begin(replace(known, signal=signal_of(reference)))
        if not self.ledger.has(ALL_SITES, number):
            self.ledger.add(part)
            return
        earlier = self.ledger.parts[number][ALL_SITES].noise
        if abs(earlier - part.noise) > 1e-3 * earlier:
            raise SelectionError(
                f"cannot resume: on batch {number} the quantized model's squared output error is {part.noise:.6g}, "
                f"in the report {earlier:.6g}. Pass the same pair and post_process, or start again without resume."
            )

    def _finished(self, outputs: Any) -> Any:
        return self._selected(finished(self.pair, outputs, self.post_process))

    def _selected(self, result: Any) -> Any:
        return self.counted.selected(result, processed=self.post_process is not None)

    def report(self, group: str) -> SensitivityReport:
        seen = self.seen
        flops = {} if seen is None else {step: count / seen.samples for step, count in seen.flops.items()}
        places = [place.place(flops) for place in self.places]
        own = {QUANTIZATION: self.pair.quantization, PROJECTIONS: str(self.projections)}
        settings = {**own, **self.positions.settings}
        if self.post_process is None:
            self.notes += self.positions.note(slots_in(self.pair.program.outputs), "outputs")
        return SensitivityReport(
            **results(places, self.ledger, self.metric),
            outputs=self.outputs,
            method="exact" if self.projection is None else "projection",
            metric=self.metric.name,
            worst_is="smallest" if self.metric.smallest_is_worst else "largest",
            group=group,
            notes=tuple(dict.fromkeys([*self.notes, *self.choices, *self.verification.notes, *self._method_notes()])),
            **identity_of(self.pair),
            sums=packed(places, self.metric, settings),
            input_ranges=added(self.input_ranges.get(number, ()) for number in covered(self.ledger, len(places))),
        )

    def _method_notes(self) -> list[str]:
        if self.projection is None:
            if not self.pair.program.may_share:
                return ["in-place ops write to values that others share, so each row took a run of the whole model"]
            return []
        given = self.projections is not None
        notes = [*precision_notes(self.ledger, len(self.places), given=given), *self.projection.notes]
        if self.reached:
            silent = [place.name for place in self.places if not self.reached.intersection(place.sites)]
            if silent:
                names = few(silent, 3)
                notes.append(f"no gradient leads from {names} to a floating-point output: its noise is 0")
        return notes


def _interrupted(analysis: _Analysis) -> Note:
    done = len(analysis.ledger.finished(len(analysis.places)))
    batches = f": covers the {counted(done, 'batch that was', 'batches that were')} finished"
    covers = batches if done else " in the first batch: covers the rows that were finished"
    return Note(f"interrupted{covers}; go on with resume=report", "interrupted")
