"""The output noise of any changes of any sites, each alone: all in one forward and one set of backward passes.

This is the projection of :mod:`pt2qa._sensitivity.projection`, which has one change for each site, with as many as are
wanted.  Where an op has no gradient, the reference runs with each change alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain, groupby
from math import nan
from operator import itemgetter
from typing import Any, Literal

from pt2qa._capture.inputs import detached
from pt2qa._metrics import error_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import NoNumberError, of_all_ranks
from pt2qa._report.merging import numbered_on
from pt2qa._report.prose import few
from pt2qa._report.set_apart import InputRange, SetApart, about_faults, added, as_fields
from pt2qa._report.sums import FIRST, LARGEST, QUANTIZATION, Mergeable
from pt2qa._sensitivity.costs import Survey, survey
from pt2qa._sensitivity.gradients import WithoutGradient
from pt2qa._sensitivity.ledger import PROJECTIONS
from pt2qa._sensitivity.metrics import fault_of, finished, float_leaves, float_names, paired_leaves, signal_of
from pt2qa._sensitivity.paths import Path, plan_paths
from pt2qa._sensitivity.precision import FEWEST
from pt2qa._sensitivity.projection import Key, Projection
from pt2qa._sensitivity.roundings import Rounding, Variant, with_roundings
from pt2qa._simulator.accumulate import Tally, accumulate, empty_batch, input_ranges
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Counted, Data, Positions
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Site
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import Outputs, Verification, digest_of
from pt2qa.errors import SelectionError

Method = Literal["auto", "projection", "exact"]

RUNS = 16
"""Runs up to which the exact method costs no more than the projection."""

SURE = 0.1
"""Sampling error of all noise together, as a share of it, above which a batch gets more projections."""

MOST = 8
"""Projections of a batch that are not asked for."""

ENOUGH = 8
"""Samples that show whether another rounding of a site would be better."""

BY_KEY = {"merge": lambda one, other: {key: one.get(key, 0.0) + value for key, value in other.items()}}
"""Numbers by key add up."""


@dataclass(frozen=True, slots=True)
class SiteNoises(Mergeable):
    """The squared output error of each variant of each site alone, summed over the data.

    ``noise`` is by site index and name of the variant; a value that is quantized twice alike is one site, the first.
    ``variance`` is due to the random projections; ``measured`` is the error of the fully quantized model.
    ``method`` is ``exact`` as soon as a batch has an op without a gradient; ``projections`` are the most of a batch.
    Reports must agree in ``settings`` to be merged; ``flops`` are of the first batch, by step.
    """

    noise: Mapping[Key, float] = field(metadata=BY_KEY)
    variance: Mapping[Key, float] = field(metadata=BY_KEY)
    signal: float
    measured: float
    outputs: tuple[str, ...] = field(metadata=FIRST)
    method: Literal["projection", "exact"] = field(metadata={"merge": min})
    projections: int = field(metadata=LARGEST)
    batches: int
    samples: int
    notes: tuple[str, ...] = field(metadata={"merge": lambda *both: tuple(dict.fromkeys(chain(*both)))})
    set_apart: tuple[SetApart, ...]
    input_ranges: tuple[InputRange, ...] = field(metadata={"merge": lambda *both: added(both)})
    settings: Mapping[str, str] = field(metadata=FIRST)
    flops: Mapping[int, int] = field(metadata=FIRST)


def site_noises(
    pair: QuantizedPair,
    data: Data,
    variants: Callable[[Site], Mapping[str, Variant]],
    *,
    method: Method = "auto",
    projections: int | None = FEWEST,
    sampled: Collection[str] = (),
    quantized: Callable[[Sequence[Any]], Any] | None = None,
    relative: bool = False,
) -> SiteNoises:
    """Estimates the output noise of every variant of every site, each alone on the reference's values.

    Let F be the model's outputs as a function of one site's value x, all else as in the reference::

        noise = sum((F(end(x)) - F(start(x)))**2)

    Args:
        pair: it is not changed.
        data: read once; only the outputs at positions that count have errors.
        variants: the variants of a site by name, perhaps none.  They get a whole tensor: a batch's value of an
            activation, or the float value of a constant.
        method: ``projection`` estimates all at once, to first order behind the nonlinear ops that a change is followed
            through; ``exact`` runs the model for each rounding of each site; ``auto`` projects, but for few runs and
            where an op has no gradient.
        projections: random projections per batch; None: 4, and 8 if the sampling error is above a tenth of all noise.
            There is none with a power of two that is at least the number of elements in a sample's outputs.
        sampled: names of variants that are measured on the first batches with 8 samples or more together, and whose
            noise is multiplied by the share of all samples that these are.
        quantized: returns what the quantized model returns for flat inputs; None: it is run.
        relative: whether the squared errors of several outputs are taken as shares of each output's sum of squares, of
            all samples of a batch, so that outputs in other units count alike.
    """
    if projections is not None and projections < 1:
        raise SelectionError(f"projections is {projections}; expected 1 or more.")
    paths = plan_paths(pair.program)
    sites = {path.site for path in paths}
    wanted = {site.index: dict(variants(site)) for site in pair.sites if site.nested or site.index in sites}
    if (
        method == "auto"
        and sum(len({run for own in each.values() for run in own.both}) for each in wanted.values()) <= RUNS
    ):
        method = "exact"
    noises = _Noises(
        pair=pair,
        variants=wanted,
        paths=tuple(path for path in paths if wanted[path.site]),
        method=method,
        projections=projections,
        sampled=frozenset(sampled),
        quantized=pair.simulator.run if quantized is None else quantized,
        verification=Verification(pair.graphs),
        notes=[*pair.notes, *pair.program.notes],
        positions=data.positions(pair.quantized, pair.program),
        relative=relative,
    )

    def measured() -> SiteNoises:
        noises.notes += accumulate(noises, data, title="site noises", purpose="measure on")
        return noises.result()

    return of_all_ranks(measured, together)


def together(parts: Sequence[SiteNoises]) -> SiteNoises:
    if len(parts) == 1:
        return parts[0]
    apart = numbered_on([each.set_apart for each in parts], [each.batches + len(each.set_apart) for each in parts])
    return replace(reduce(SiteNoises.merge, parts), set_apart=apart)


@dataclass
class _Noises(Tally):
    """Sums over the batches so far, and the ``most`` projections of one.

    ``projection`` is None before the first batch and for the exact method.  The variants that are ``sampled`` were
    measured on ``sampled_on`` samples.  ``values``, ``samples`` and ``counted`` are of the batch that is measured.
    """

    pair: QuantizedPair
    variants: Mapping[int, Mapping[str, Variant]]
    paths: tuple[Path, ...]
    method: Method
    projections: int | None
    sampled: frozenset[str]
    quantized: Callable[[Sequence[Any]], Any]
    verification: Verification
    notes: list[str]
    positions: Positions
    relative: bool = False
    values: Sequence[Any] = ()
    samples: int = 0
    counted: Counted = field(init=False)
    seen: Survey | None = None
    projection: Projection | None = None
    noise: dict[Key, float] = field(default_factory=dict)
    variance: dict[Key, float] = field(default_factory=dict)
    signal: float = 0.0
    measured: float = 0.0
    sampled_on: int = 0
    most: int = 0
    outputs: tuple[str, ...] = ()
    reached: set[int] = field(default_factory=set)
    content: Counter[int] = field(default_factory=Counter)

    def add(self, batch: Batch) -> None:
        self.values = values = self.pair.values(batch)
        self.samples = count_samples(values)
        if not self.samples:
            self.took(0, empty_batch(self.batches))
            return
        self.counted = self.positions.of(batch, values)
        if self.seen is None:
            self.seen = survey(self.pair.simulator, values)
            if self.method != "exact":
                self.projection = Projection(self.pair, None, self.paths, self.variants)
        if self.projection is not None:
            try:
                self._projected(self.projection)
                return
            except WithoutGradient as error:
                if self.method == "projection":
                    raise
                self.projection = None
                self.notes.append(f"each site took model runs of its own: {error.reason}")
        self._exact()

    def _projected(self, projection: Projection) -> None:
        # By content, so that a batch has the same vectors in whichever run it is: n equal ones have n² its variance.
        content = int(digest_of(self.counted.inputs(self.values))[:12], 16)
        started = projection.start(self.values, content, self.counted)
        more = 2 * self.content[content] + 1
        self.content[content] += 1
        # Gradients are computed on the reference, in its own memory layouts.
        returned = self.verification.run(lambda: Outputs(started.returned, self.quantized(self.values)), self.values)
        reference = self.counted.selected(started.reference, processed=False)
        quantized = self._finished(returned.quantized)
        if self._counts(reference, quantized):
            weights = self._weights(reference)
            scales = None if weights is None else [weight**0.5 for weight in weights]
            started.project(FEWEST if self.projections is None else self.projections, scales)
            noise, variance = started.together()
            if self.projections is None and variance > (SURE * noise) ** 2:
                started.project(MOST - started.projections, scales)
            own = {key: started.noise([key]) for key in self._keys()}
            found = {key: (noise, more * variance) for key, (noise, variance) in own.items()}
            self.most = max(self.most, started.projections)
            self.reached |= started.reached
            # More than all sites make together: the error is too large for a gradient, or others cancel it.
            measured = _noise(reference, quantized, weights)
            found |= self._alone([key for key in found if found[key][0] > measured], reference, weights)
            self._add(reference, quantized, weights, found)

    def _exact(self) -> None:
        run, values = self.pair.simulator.run, self.values
        returned = self.verification.run(
            lambda: Outputs(detached(run(values, on=False)), detached(self.quantized(values))), values
        )
        reference, quantized = (self._finished(each) for each in (returned.reference, returned.quantized))
        if self._counts(reference, quantized):
            weights = self._weights(reference)
            self._add(reference, quantized, weights, self._alone(self._keys(), reference, weights))

    def _keys(self) -> list[Key]:
        return [(site, name) for site, variants in self.variants.items() for name in variants]

    def _alone(
        self, keys: Sequence[Key], reference: Any, weights: Sequence[float] | None
    ) -> dict[Key, tuple[float, float]]:
        """The noise of variants in runs of their own, and its variance; keys of one site follow each other."""
        found: dict[Key, tuple[float, float]] = {}
        for site, own in groupby(keys, key=itemgetter(0)):
            outputs: dict[Rounding | None, Any] = {None: reference}
            for key in own:
                variant = self.variants[site][key[1]]
                outputs |= {each: self._with(site, each) for each in variant.both if each not in outputs}
                found[key] = _noise(outputs[variant.start], outputs[variant.end], weights), 0.0
        return found

    def _weights(self, reference: Any) -> list[float] | None:
        """What the squared error of each output counts; None where all count alike."""
        leaves = float_leaves(reference)
        if not self.relative or len(leaves) == 1:
            return None
        sizes = [signal_of(leaf) for leaf in leaves]
        return [self.samples / size if size > 0 else 0.0 for size in sizes]

    def _with(self, site: int, rounding: Rounding) -> Any:
        program = with_roundings(self.pair.program, {site: lambda value, **_: rounding(value)})
        return detached(self._finished(Simulator(program).run(self.values, on={site})))

    def _finished(self, outputs: Any) -> Any:
        return self.counted.selected(finished(self.pair, outputs, None), processed=False)

    def _counts(self, reference: Any, quantized: Any) -> bool:
        """Whether the outputs of both models give numbers; if not, the batch is set apart."""
        fault = fault_of(self.pair.simulator, self.values, self.batches, self.samples, reference, quantized)
        if fault is not None:
            self.took(0, fault)
        return fault is None

    def _add(
        self, reference: Any, quantized: Any, weights: Sequence[float] | None, found: Mapping[Key, tuple[float, float]]
    ) -> None:
        for key, (noise, variance) in found.items():
            self.noise[key] = self.noise.get(key, 0.0) + noise
            self.variance[key] = self.variance.get(key, 0.0) + variance
        self.outputs = float_names(reference)
        self.signal += signal_of(reference) if weights is None else self.samples * sum(map(bool, weights))
        self.measured += _noise(reference, quantized, weights)
        self.took(self.samples, ranges=input_ranges(self.pair.program, self.values, self.counted))
        if self.sampled_on < ENOUGH:
            self.sampled_on = self.health.samples
            if self.sampled_on >= ENOUGH:
                self.variants = {
                    site: {name: each for name, each in own.items() if name not in self.sampled}
                    for site, own in self.variants.items()
                }
                if self.projection is not None:
                    self.projection.variants = self.variants

    def result(self) -> SiteNoises:
        counted = self.batches - len(self.health.set_apart)
        if not counted:
            faults = " ".join(about_faults(self.health.set_apart, self.batches))
            raise NoNumberError(f"no batch can be measured. {faults} Pass batches on which both models are finite.")
        notes = [*self.notes, *self.verification.notes]
        if self.projection is not None:
            notes += self.projection.notes
            silent = [self.pair.sites[site].name for site in self.variants if site not in self.reached]
            if silent:
                notes.append(f"no gradient from a floating-point output reaches {few(silent, 3)}: the noise there is 0")
        own = {QUANTIZATION: self.pair.quantization, PROJECTIONS: str(self.projections)}
        settings = {**own, **self.positions.settings}
        if self.relative and len(self.outputs) > 1:
            settings["errors"] = "relative to each output"
        notes += self.positions.note(slots_in(self.pair.program.outputs), "outputs")
        factors = dict.fromkeys(self.sampled, self.health.samples / self.sampled_on)
        return SiteNoises(
            noise={key: noise * factors.get(key[1], 1.0) for key, noise in self.noise.items()},
            variance={key: variance * factors.get(key[1], 1.0) ** 2 for key, variance in self.variance.items()},
            signal=self.signal,
            measured=self.measured,
            outputs=self.outputs,
            method="exact" if self.projection is None else "projection",
            projections=0 if self.projection is None else self.most,
            **{**as_fields(self.health), "batches": counted},
            notes=tuple(dict.fromkeys(notes)),
            settings=settings,
            flops={} if self.seen is None else self.seen.flops,
        )


def _noise(start: Any, end: Any, weights: Sequence[float] | None) -> float:
    """The squared difference of outputs, with the weight of each; nan if it is not finite."""
    sums = [error_sums(left, right) for left, right in paired_leaves(start, end)]
    if any(each.nonfinite for each in sums):
        return nan
    return sum(each.noise * weight for each, weight in zip(sums, weights or [1.0] * len(sums), strict=True))
