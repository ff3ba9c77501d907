"""Hypotheses, and what they are made from: the measurements of a pair, each taken when it is first needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._diagnosis.budget import budget_of, mechanisms_in
from pt2qa._diagnosis.budget_report import ErrorBudget
from pt2qa._diagnosis.causes import CAUSES
from pt2qa._diagnosis.projected import SiteNoises, site_noises
from pt2qa._layers.analysis import compare_rounding
from pt2qa._layers.rows import LayerRow
from pt2qa._profile.report import CLAMPED
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import NoBatchError, everywhere, first_anywhere
from pt2qa._reconfigure.candidates import Costs, costs_from, costs_of
from pt2qa._report.notes import stop_if_interrupted
from pt2qa._report.set_apart import SetApart
from pt2qa._sensitivity.ranges import Observed, observe
from pt2qa._sensitivity.roundings import INTEGERS, Variant, fitted, fitted_by_channel, fitted_weight, own_rounding
from pt2qa._simulator.accumulate import first_fault
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.data import Counted, Data, Positions
from pt2qa._simulator.program import Constant, QuantParams, Site
from pt2qa._simulator.verification import digest_of
from pt2qa._trials.judge import Judge
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Place, Ranges, Substitute, Treatment, places_of, with_params
from pt2qa.overrides.annotations import Annotations, fusions_in
from pt2qa.overrides.plan import Edit
from pt2qa.plugins.options import options_of

OUTLIER = 0.1
"""Most noise that a site with outlier channels has left with a range per channel, as a share."""

ALIKE = 0.01
"""Relative difference of scales that changes nothing."""

PRODUCTS = ("conv", "linear")
CLAMPING = frozenset({"relu", "relu6", "hardtanh", "clamp", "clamp_min"})
"""Activations that clip their input, whose whole range is therefore not needed."""


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause, and the treatment that would show it.

    Attributes:
        cause: its id in :data:`pt2qa._diagnosis.causes.CAUSES`.
        name: where to look.
        evidence: the numbers that suggest it, and from which analysis.
        remedy: what to do, in words or as a call.
        others: further places; ``name`` and repetitions are left out later.
        cost: share of the multiply-accumulates that it takes out of int8.
        sentence: the cause in words, where those of its id do not fit.
        share: of its sites in the noise of all, if that bounds the gain.
        gain: in dB, where it was measured in another way; nan if nothing can be applied; None: measure the treatment.
        unseen: a sample that the remedy is about, so that its gain is that of all others; -1: none.
        preview: what is simulated first, so that the model is quantized again only where that helps; None: nothing.
        audited: whether it was found without the model's outputs, so that a gain that may be chance confirms it.
    """

    cause: str
    name: str
    evidence: str
    remedy: str
    treatment: Treatment
    others: tuple[str, ...] = ()
    cost: float = 0.0
    sentence: str = ""
    share: float = 1.0
    gain: float | None = None
    unseen: int = -1
    preview: Treatment | None = None
    audited: bool = False

    @property
    def in_words(self) -> str:
        return self.sentence or CAUSES[self.cause]


@dataclass
class Case:
    """A pair under diagnosis.

    Attributes:
        judge: measures treatments on the evaluation data.
        data: the batches that the analyses read, and that remedies may calibrate on.
        now: the outcome of the pair.
        state: the remedies that the pair has already.
        instead: parameters for all sites that were measured to help.
        known_noises: the noise of sites; None before a hypothesis asks for it.
    """

    pair: QuantizedPair
    judge: Judge
    data: Data
    now: Outcome
    state: Treatment = field(default_factory=Treatment)
    notes: list[str] = field(default_factory=list)
    instead: frozenset[Ranges] = frozenset()
    known_noises: SiteNoises | None = None

    def flat(self, data: Data) -> Iterable[tuple[list[Any], Counted]]:
        """Batches with samples as the simulator takes them, and which of their positions count; each is a run."""
        for batch in data:
            values = self.pair.values(batch)
            if count_samples(values):
                self.judge.forwards += 1
                yield values, self.counted(data, batch, values)

    def counted(self, data: Data, batch: Batch, values: list[Any]) -> Counted:
        return Counted(None, {}, self.pair.program) if data.mask is None else self._positions.of(batch, values)

    @functools.cached_property
    def _positions(self) -> Positions:
        return self.data.positions(self.pair.quantized, self.pair.program)

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The options of the quantizer with their defaults."""
        recipe = self.judge.recipe
        return {} if recipe is None else {option.name: option.default for option in options_of(recipe.plugin)}

    @property
    def calibration(self) -> Data | None:
        """The pair's own; None if it is not known."""
        return None if self.judge.recipe is None else self.judge.recipe.data

    @functools.cached_property
    def first(self) -> Batch:
        own: Batch | None = next((batch for batch in self.data if count_samples(self.pair.values(batch))), None)
        found = first_anywhere(own)
        if found is None:
            raise NoBatchError("no batch with samples to diagnose. Pass at least one.")
        return found

    @functools.cached_property
    def fault(self) -> SetApart | None:
        """Where a value first is not finite, if the outputs have no number; in the quantized model, if it is there."""
        if not math.isnan(self.now.worst[1]):
            return None
        found = [
            first_fault(self.pair.simulator, values, number, 0)
            for number, (values, _) in enumerate(self.flat(self.data))
        ]
        known = [fault for each in everywhere(found) for fault in each if fault is not None]
        return next((fault for fault in known if fault.side == "quantized"), next(iter(known), None))

    @functools.cached_property
    def _folds(self) -> tuple[dict[int, Observed], ...]:
        """The ranges of the evaluation data by fold; empty if that is one batch."""
        if len(self.judge.reference.fold_of) < 2:
            return ()
        return tuple(observe(self.pair, self._of_fold(fold)) for fold in (0, 1))

    def _of_fold(self, fold: int) -> Iterator[tuple[list[Any], Counted]]:
        for item in self.judge.reference:
            if self.judge.reference.fold_of[item.key] == fold:
                self.judge.forwards += 1
                yield item.values, self.counted(self.judge.data, item.batch, item.values)

    @property
    def is_judged_apart(self) -> bool:
        """Whether evaluation data were given beside the data that analyses read."""
        return self.judge.data.batches is not self.data.batches

    @functools.cached_property
    def ranges(self) -> dict[int, Observed]:
        if self.is_judged_apart or not self._folds:
            found = observe(self.pair, self.flat(self.data))
        else:
            one, other = self._folds
            found = {site: observed_together([one[site], other[site]]) for site in one}
        sites = [step.out for step in self.pair.program.steps if step.site in found]
        self.notes += self._positions.note(sites, "rounded activations")
        return found

    def seen_for(self, site: int) -> list[Observed]:
        """The ranges to fit to: of all data that analyses read; then, for each fold of the evaluation data, without it.

        The latter are for judging, and of all other data.
        """
        known = [self.ranges[site]] if self.is_judged_apart else []
        return [self.ranges[site], *(observed_together([*known, other[site]]) for other in reversed(self._folds))]

    @functools.cached_property
    def seen(self) -> dict[int, Observed]:
        """The ranges that calibration showed each activation site; empty if its data is the same, or not known."""
        if self.calibration is None or self.state.data is not None or not self.is_calibrated_on_others:
            return {}
        return observe(self.pair, self.flat(self.calibration))

    @functools.cached_property
    def is_calibrated_on_others(self) -> bool:
        """Whether the pair's calibration data are known to be others than those that analyses read."""
        return bool(self._calibrating) and self._calibrating != self._in_use

    @functools.cached_property
    def is_judged_on_calibration(self) -> bool:
        """Whether all that quality is measured on is known to calibrate the pair."""
        if not self._calibrating:
            return False
        return (self._digests(self.judge.data) if self.is_judged_apart else self._in_use) <= self._calibrating

    @functools.cached_property
    def _in_use(self) -> set[str]:
        return self._digests(self.data)

    @functools.cached_property
    def _calibrating(self) -> set[str]:
        """The digests of the pair's calibration data; none if they are not known."""
        return set() if self.calibration is None else self._digests(self.calibration)

    def _digests(self, data: Data) -> set[str]:
        """Of batches with samples; padding is left out."""
        own = set()
        for batch in data:
            values = self.pair.values(batch)
            if count_samples(values):
                own.add(digest_of(self._positions.of(batch, values).inputs(values)))
        return set().union(*everywhere(own))

    @property
    def clamped_most(self) -> list[LayerRow]:
        """The sites that clamp more than 1 % of their values on the evaluation data, most first."""
        found = compare_rounding(self.pair, replace(self.judge.data, progress=False))
        stop_if_interrupted(found.notes)
        self.judge.forwards += 2 * found.batches
        rows = (row for row in found.rows if row.observed_at == "dq" and row.saturation > CLAMPED)
        return sorted(rows, key=lambda row: -row.saturation)

    @functools.cached_property
    def costs(self) -> Costs:
        if self.known_noises is not None and self.known_noises.flops:
            return costs_from(self.pair, self.known_noises.flops)
        self.judge.forwards += 1
        return costs_of(self.pair, self.pair.values(self.first))

    @functools.cached_property
    def places(self) -> dict[int, Place]:
        return places_of(self.pair)

    @functools.cached_property
    def annotations(self) -> Annotations | None:
        return self.judge.annotations(self.state)

    @functools.cached_property
    def fusions(self) -> tuple[Edit, ...]:
        return () if self.annotations is None else fusions_in(self.annotations)

    @property
    def noises(self) -> SiteNoises:
        """The output noise of each site as it is (``quantized``), and with the parameters in :attr:`instead`."""
        if self.known_noises is None:
            found = site_noises(
                self.pair,
                self.data,
                self._variants,
                sampled=("fitted", "by channel"),
                quantized=self.judge.outputs if self.pair is self.judge.pair else None,
                relative=True,
            )
            stop_if_interrupted(found.notes)
            self.known_noises = found
        return self.known_noises

    def _variants(self, site: Site) -> dict[str, Variant]:
        own = {"quantized": Variant(own_rounding(self.pair.simulator, site))}
        if self.state != Treatment():  # ranges were looked at before
            return own
        fitted = self.fitted.get(site.index, self.fitted_weights.get(site.index))
        played = {}
        if "fitted" in self.instead and fitted is not None and not is_alike(site, fitted):
            played["fitted"] = Variant(fitted.value)
        if "by channel" in self.instead and self._may_have_outliers(site):
            played["by channel"] = Variant(self.by_channel[site.index].value)
        return {**own, **played, **self._mechanisms(site)}

    @functools.cached_property
    def _mechanisms(self) -> Callable[[Site], Mapping[str, Variant]]:
        return mechanisms_in(self.pair)

    @property
    def budget(self) -> ErrorBudget | None:
        return None if self.known_noises is None else budget_of(self.pair, self.known_noises)

    def noise(self, site: int, variant: str = "quantized") -> float:
        """The output noise of a site, as a share of the signal; as it is where it has no such variant."""
        noises = self.noises
        value = noises.noise.get((site, variant), noises.noise.get((site, "quantized"), 0.0))
        return value / noises.signal if noises.signal > 0 else value

    @functools.cached_property
    def total_noise(self) -> float:
        return sum(self.noise(site.index) for site in self.pair.sites)

    def excess(self, site: int) -> float:
        """The noise of a site that fitted parameters would remove."""
        return max(self.noise(site) - self.noise(site, "fitted"), 0.0)

    def share(self, of: Callable[[int], float], sites: Iterable[int]) -> float:
        """The share of some sites in the noise of all."""
        return sum(map(of, sites)) / max(self.total_noise, 1e-300)

    @functools.cached_property
    def fitted(self) -> dict[int, Substitute]:
        """For each static activation site, the range of the data in its place."""
        found = {}
        for site in self.static_sites:
            every = self.seen_for(site.index)
            if all(math.isfinite(end) for each in every for end in each.whole):
                params, *apart = (fitted(*each.whole, *INTEGERS[site.params.dtype]) for each in every)
                found[site.index] = with_params(params, apart)
        return found

    @functools.cached_property
    def by_channel(self) -> dict[int, Substitute]:
        """The same with a range for each channel."""
        found = dict(self.fitted)
        for site in self.static_sites:
            every = self.seen_for(site.index)
            params = [_by_channel(site, each) for each in every]
            if site.index in found and None not in params:
                first, *apart = (each for each in params if each is not None)
                found[site.index] = with_params(first, apart)
        return found

    @functools.cached_property
    def fitted_weights(self) -> dict[int, Substitute]:
        """For each weight, its float value rounded as kernels take it: int8, symmetric, per output channel."""
        found = {}
        for site in self.pair.sites:
            constant = self.constant(site)
            if site.kind == "weight" and constant is not None and site.params.dtype in ("int8", "uint8"):
                found[site.index] = with_params(fitted_weight(constant.reference, weight_axis(constant)))
        return found

    @functools.cached_property
    def static_sites(self) -> tuple[Site, ...]:
        """The 8-bit activation sites whose parameters are fixed."""
        return tuple(
            site
            for site in self.pair.sites
            if site.kind == "activation"
            and not site.params.dynamic
            and site.params.scale is not None
            and site.params.dtype in ("int8", "uint8")
        )

    def _may_have_outliers(self, site: Site) -> bool:
        """Whether half of a site's channels, or more, are far smaller than its range; not where it is needless."""
        observed = self.ranges.get(site.index)
        if observed is None or site.index in self.needless or site.index not in self.by_channel:
            return False
        if observed.channels is None:
            return False
        widths = observed.channels[1].clamp(min=0.0) - observed.channels[0].clamp(max=0.0)
        low, high = observed.whole
        own = site.params.largest_scale * (site.params.quant_max - site.params.quant_min)
        # The noise of rounding goes with the square of the scale.
        most: float = OUTLIER**0.5 * max(own, max(high, 0.0) - min(low, 0.0))
        return float(widths.median()) <= most

    @functools.cached_property
    def needless(self) -> tuple[int, ...]:
        """Sites of products that only an activation reads, which drops a part of the range and is rounded too."""
        producers, steps = self.pair.program.producers, self.pair.program.steps
        readers_of = self.pair.program.readers()
        found = []
        for site in self.static_sites:
            made = producers.get(site.source)
            readers = readers_of[site.result]
            if made is None or not steps[made].op.startswith(PRODUCTS) or len(readers) != 1:
                continue
            (reader,) = readers
            again = readers_of[reader.out]
            if reader.op in CLAMPING and again and all(step.site is not None for step in again):
                found.append(site.index)
        return tuple(found)

    @functools.cached_property
    def constants(self) -> dict[int, Constant]:
        return {each.site: each for each in self.pair.program.constants if each.site is not None}

    def constant(self, site: Site) -> Constant | None:
        found = self.constants.get(site.index)
        usable = found is not None and isinstance(found.reference, Tensor) and found.reference.is_floating_point()
        return found if usable else None

    def played(self, instead: dict[int, Substitute], sites: Iterable[int] | None = None) -> Treatment:
        """A treatment that plays other roundings at some sites, or at all that have one."""
        chosen = instead if sites is None else {site: instead[site] for site in sites if site in instead}
        return Treatment(played=tuple((self.places[site], each) for site, each in chosen.items()))

    def ranked(self, sites: Iterable[int], of: Callable[[int], float]) -> list[int]:
        """Sites by a share of noise, the largest first, up to 90 % of the sum."""
        found = sorted(((of(site), -site) for site in sites), reverse=True)
        total, kept, held = sum(each for each, _ in found), list[int](), 0.0
        for each, site in found:
            if each <= 0 or held >= 0.9 * total:
                break
            kept.append(-site)
            held += each
        return kept

    def names(self, sites: Sequence[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.pair.sites[site].name for site in sites))


def observed_together(parts: Iterable[Observed]) -> Observed:
    found = Observed()
    for each in parts:
        found.extend(each)
    return found


def _by_channel(site: Site, observed: Observed) -> QuantParams | None:
    if observed.channels is None:
        return None
    return fitted_by_channel(*observed.channels, observed.axis, *INTEGERS[site.params.dtype])


def is_alike(site: Site, played: Substitute) -> bool:
    """Whether a site's parameters are those that would be simulated, but for a step at the ends."""
    own, other = site.params, played.params
    if other is None or own.scale is None or own.zero_point is None or own.axis != other.axis:
        return False
    before, after = (
        torch.stack([torch.as_tensor(each).cpu().double() for each in (params.scale, params.zero_point)])
        for params in (own, other)
    )
    steps = max(abs(own.quant_min - other.quant_min), abs(own.quant_max - other.quant_max))
    return before.shape == after.shape and steps <= 1 and torch.allclose(before, after, rtol=ALIKE, atol=0.0)


def weight_axis(constant: Constant) -> int | None:
    if not isinstance(constant.reference, Tensor) or constant.reference.dim() < 2:
        return None
    return 1 if constant.op.startswith("conv_transpose") else 0
