"""The search for remedies: which hypotheses are made, what each must gain, and in which order they are taken."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from pt2qa._decibels import decibels
from pt2qa._deployed.report import DeployedReport
from pt2qa._diagnosis.budget_report import Mechanism
from pt2qa._diagnosis.case import Case, Hypothesis, is_alike
from pt2qa._diagnosis.causes import ORDER
from pt2qa._diagnosis.hypotheses import calibration, configuration, precision, repairs, sites, stages, weights
from pt2qa._diagnosis.hypotheses.stages import Kernels
from pt2qa._diagnosis.report import ADVICE, CauseRow, FigureRow, TriedRow, between
from pt2qa._diagnosis.worth import HALF, Worth, error
from pt2qa._graph.handles import handle_of, source_line
from pt2qa._layers.rows import LayerRow
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import Method
from pt2qa._report.prose import few, share
from pt2qa._trials.evidence import Gain
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Ranges, Substitute, Treatment
from pt2qa.errors import DeploymentError, Pt2qaError
from pt2qa.overrides.plan import Edit

ALIKE: Final = 0.9
"""The share of the best gain from which on another one is as good, if it is not certain to be worse."""

_BOUNDS: Final[dict[Ranges, str]] = {"fitted": "ranges fitted to the data", "by channel": "ranges fitted by channel"}
"""Their names in the table of figures."""

BIT: Final = 20 * math.log10(2)
"""dB that one more bit gives."""

ROUNDING: Final = 1e-9
"""By how much shares that are a whole together may differ from 1."""

HIDDEN: Final = 3e-4
"""Share of the noise of all sites below which a remedy cannot gain 2 dB, even after the others have gained 30 dB."""


@dataclass
class Search:
    """The remedies so far; ``state`` has all of them, ``quality`` is the outcome with them."""

    case: Case
    needed: float | None
    repairs: Sequence[type[Method]] = ()
    worth: Worth = field(default_factory=Worth)

    def __post_init__(self) -> None:
        self.rows: list[CauseRow] = []
        self.taken: list[Hypothesis] = []
        """Those of the rows, in order."""
        self.steps = [self.case.now]
        """The outcomes before the rows and with each."""
        self.tried: list[TriedRow] = []
        self.untried: dict[str, dict[str, None]] = {}
        """By error, the remedies that fail with it."""
        self.state = Treatment()
        self.quality: Outcome = self.case.now
        self.later: list[Hypothesis] = []
        """Other calibration data where nothing says that the data are at fault."""
        self.bounds: dict[Ranges, Outcome] = {}
        self.deployed: dict[str, FigureRow] = {}
        self.free: Outcome | None = None
        """That of the free remedies and what :func:`pt2qa.repair` fits; None where it was not tried."""
        self.beyond: list[LayerRow] = []
        """The sites that clamp many values, though the target is met; no remedy is measured then."""
        self.outdone: list[tuple[Hypothesis, Gain]] = []
        """What would help in float, but little more than that."""
        self._left: list[tuple[Hypothesis, Gain]] = []

    def run(self) -> None:
        """Tries what is wrong and what is free, then what repairs give, then what takes ops out of int8."""
        case = self.case
        always = [*stages.changed(case), *stages.constants(case), *stages.nonfinite(case)]
        if math.isnan(case.now.worst[1]) or math.isinf(case.now.worst[1]):
            self._take(always)  # the instruments below need numbers
            return
        if self._enough(case.now):
            self._take(always)
            case.notes += [
                f"{each.sentence}, though the target is met: {each.evidence}" for each in calibration.inputs(case)
            ]
            self.beyond = case.clamped_most
            return
        self._bound()
        own = (configuration.unfused, configuration.rounded_before, configuration.dynamic_by_row)
        found = [*always, *(each for find in own for each in find(case)), *self._ranges()]
        observers = list(configuration.observers(case)) if "fitted" in case.instead else []
        if self._ranges_at_fault():
            found, observers = [*found, *observers], []
        costly = [each for each in found if _takes_out(each)]
        self._take([each for each in found if each not in costly])
        self._repair()
        # That clamping makes most of the noise is certain, however few of the samples show it.
        clamps = self.clamped is not None
        later = [replace(each, audited=clamps and each.cause == "narrow-calibration") for each in self.later]
        self._take([*later, *calibration.bad_sample(case, self.state, self.quality)])
        ranges = Treatment()
        if self._can_be_better():
            self.free, ranges = repairs.bound(case, self.state, self.quality)
            self._take(costly)
            self._take_free(ranges)
        if self._can_be_better():
            self._take(list(precision.needed(self._treated())))
            self._take_free(ranges)
        if self._can_be_better() and (self.free is None or self.repair_helps):  # an observer only makes other ranges
            self._take(observers)
        if self._can_be_better():
            self._take(list(precision.needed(self._treated(), clamped=True)))
        if not self.rows and self.repair_helps:
            self._take([repairs.ranged(case, ranges)])
        for each in self.taken[:-1]:
            self._drop_if_needless(each)

    def _take_free(self, ranges: Treatment) -> None:
        """The ranges that repairs give, where only they keep an op from leaving int8."""
        if self.outdone and self.repair_helps:
            best = self._best(self.outdone)[0]
            self.outdone.clear()
            self._take([repairs.ranged(self.case, ranges, best)])

    def _ranges_at_fault(self) -> bool:
        """Whether ranges that fit the data halve the noise; if not, another observer helps little, and comes last."""
        fits, now = self.bounds.get("fitted"), self.case.now.worst[1]
        return fits is not None and error(fits.worst[1]) <= error(now) * error(HALF)

    @property
    def from_repair(self) -> Gain | None:
        """What repairs gain over all rows; None where they were not tried."""
        return None if self.free is None else self.free.gain_over(self.quality)

    @property
    def repair_helps(self) -> bool:
        gain = self.from_repair
        if gain is None or not gain.holds:
            return False
        value = gain.middle if self.quality.of_metric else gain.value
        return self.worth.pays(self.quality.worst[1], value, 0.0, is_fault=True)

    def _can_be_better(self) -> bool:
        """Whether an output has an error that would be worth a row if it were gone."""
        if self.needed is not None:
            return not self._enough(self.quality)
        return error(self.quality.worst[1]) >= self.worth.least

    def _repair(self) -> None:
        """Fits what costs nothing at run time to the model with the free remedies, one method after the other."""
        for method in self.repairs:
            cause = repairs.CAUSE_OF[method.name]
            data, reason = repairs.calibration_of(self.case, self.state)
            if data is not None and not self._enough(self.quality):
                found = repairs.fitted(self.case, self.state, data, method)
                if isinstance(found, Hypothesis):
                    self._take([found])
                    continue
                reason = found
            remedy = f"{method.name}, as pt2qa.repair does"
            self.tried.append(TriedRow(cause, "", remedy, math.nan, reason or "the target is met without it"))

    def final(self) -> tuple[QuantizedPair | None, Outcome | None]:
        """The pair with all remedies that can be applied by quantizing again, and its outcome; None without any."""
        state, judge = self.state.without_advice, self.case.judge
        if not (state.requantizes or state.floats):
            return None, None
        try:
            pair = judge.applied(state)
            return pair, judge.converted(pair) if state.floats else judge.outcome(state)
        except Pt2qaError as error:
            self.case.notes.append(f"all remedies together could not be applied: {error}")
            return None, None

    def notes(self) -> list[str]:
        return [f"not measured: {few(list(each))}: {error}" for error, each in self.untried.items()]

    def so_far(self) -> tuple[QuantizedPair | None, Outcome | None]:
        """The same after Ctrl-C, with the best of the remedies that were measured and not yet taken; runs no model."""
        if self._left and not self.rows:
            best = self._best(self._left)
            self._left.remove(best)
            self.add(best[0])
        for each, gain in self._left:
            self._reject(each, gain.value, "interrupted before it was measured after the remedies above")
        state = self.state
        requantized = state.requantizes and state.made_of_edits and not state.floats
        return (self.case.judge.pair_with(state), self.quality) if requantized else (None, None)

    def figures(self, after: Outcome | None) -> Iterator[Any]:
        judge = self.case.judge
        yield _figure_row("now", self.case.now)
        if judge.metric is not None:
            yield FigureRow("float", judge.float_value, "", math.inf, -1, math.nan)
        if after is not None:
            yield _figure_row("after", after)
        if not self.state.made_of_edits:
            yield _figure_row(ADVICE, self.quality)
        for name, found in self.bounds.items():
            yield _figure_row(_BOUNDS[name], found)
        if self.free is not None:
            yield _figure_row("with ranges of pt2qa.repair", self.free)
        yield from self.deployed.values()

    def look_at_kernels(self, kernels: Kernels) -> DeployedReport:
        report = kernels.of(self.case.pair)
        self._take(kernels.hypotheses())
        self._deployed("deployed", report)
        return report

    def look_again(self, kernels: Kernels, final: QuantizedPair) -> None:
        """At the kernels of the pair with all remedies."""
        try:
            report = kernels.of(final)
        except DeploymentError as error:
            self.case.notes.append(f"the pair with all remedies was not run on its kernels: {error}")
            return
        if report is not kernels.backend:
            self._deployed("deployed, after", report)

    def _deployed(self, name: str, report: DeployedReport) -> None:
        value = report.sqnr if self.case.judge.metric is None else report.value
        self.deployed[name] = FigureRow(name, value, "", report.sqnr, -1, math.nan)

    def _enough(self, found: Outcome) -> bool:
        return self.needed is not None and found.value >= self.needed

    def _bound(self) -> None:
        """What the model would have with ranges that fit the data, per tensor and by channel, and if that is much."""
        case = self.case
        own = case.pair.sites
        weights = {index: each for index, each in case.fitted_weights.items() if not is_alike(own[index], each)}
        tried: tuple[tuple[Ranges, dict[int, Substitute]], ...] = (
            ("fitted", case.fitted),
            ("by channel", case.by_channel),
        )
        for name, params in tried:
            instead = {**params, **weights}
            if instead:
                found = case.judge.outcome(case.played(instead))
                if self._promises(found):
                    case.instead |= {"fitted", name}  # a channel may hide a range that does not fit
                self.bounds[name] = found if found.rank >= case.now.rank else case.now

    def _promises(self, found: Outcome) -> bool:
        """Whether the interval of a bound leaves room for a row."""
        for output in self.quality.by_quality:
            gain = found.gain_over(self.quality, output)
            most = gain.value if math.isnan(gain.high) else gain.high
            if self.needed is not None and most > 0:
                return True
            if self.worth.pays(_sqnr(self.quality, output), most, 0.0, is_fault=True):
                return True
        return False

    @property
    def out_of_reach(self) -> float | None:
        """dB of the best bound on these samples, if it is a bit better or more; else None."""
        sqnr = self.quality.worst[1]
        gains = [each.gain_over(self.quality) for each in self.bounds.values()]
        of_metric = self.quality.of_metric
        known = (each.middle if of_metric else each.value for each in gains)
        much = (each for each in known if each >= BIT and self.worth.pays(sqnr, each, 0.0, is_fault=False))
        return max((sqnr + each for each in much), default=None)

    @property
    def clamped(self) -> tuple[str, float, bool] | None:
        """Where values are clamped most, what share of the noise that makes, and whether it counts; None unless most.

        Ranges fitted to a part of these samples need not cover the others, so no bound shows it.
        """
        parts = {} if (noises := self.case.known_noises) is None else noises.noise
        clamped = {site: noise for (site, part), noise in parts.items() if part == "activation clamping"}
        beyond, every = sum(clamped.values()), sum(parts[each] for each in parts if each[1] in get_args(Mechanism))
        if not every < 2 * beyond < 2 * every:  # or NaN
            return None
        counts = self.worth.pays(self.quality.worst[1], decibels(every, every - beyond), 0.0, is_fault=False)
        return self.case.pair.sites[max(clamped, key=lambda site: clamped[site])].name, beyond / every, counts

    def _ranges(self) -> Iterator[Hypothesis]:
        """Hypotheses about ranges and weights: from audits in any case, others if the bounds leave room for them."""
        case = self.case
        if not self.bounds:
            return
        own = (sites.floored, sites.unused_levels, sites.one_sided)
        audits = [*calibration.inputs(case), *(each for find in own for each in find(case))]
        if audits or any(sites.has_unused_levels(case, site) for site in case.pair.sites):
            case.instead |= {"fitted"}
        yield from audits
        yield from weights.biases(case)
        yield from weights.unread(case)
        yield from sites.masked(case)
        if "fitted" in case.instead:
            yield from weights.coarse(case)
            freaks = calibration.freaks(case)
            yield from (each for own in freaks.values() for each in own)
            data = list(calibration.ranges_of_calibration(case, freaks))
            at_fault = bool(data) and not freaks and calibration.is_of_another_kind(case, case.seen)
            if at_fault:
                yield from data
            else:
                self.later += data
            yield from sites.twice(case)
            yield from sites.unfit(case, data_at_fault=at_fault)
        if "by channel" in case.instead:
            yield from repairs.equalized(case)
            yield from sites.outliers(case)

    def _treated(self) -> Case:
        pair = self.case.judge.pair_with(self.state)
        if pair is self.case.pair:
            return self.case
        treated = Case(pair, self.case.judge, self.case.data, self.quality, self.state)
        fitted = any(edit.kind in FITTED for edit in self.state.edits)
        if not (fitted or self.state.data or self.state.options):
            # Edits leave the parameters of all other sites as they were, so what these make was measured before.
            at = {place: index for index, place in self.case.places.items()}
            before = self.case.noises
            known = {
                (index, "quantized"): before.noise[at[place], "quantized"]
                for index, place in treated.places.items()
                if place in at and (at[place], "quantized") in before.noise
            }
            treated.known_noises = replace(before, noise=known)
            treated.costs = self.case.costs  # by op, of which edits change none
        return treated

    def _take(self, hypotheses: Sequence[Hypothesis], *, again: bool = False) -> None:
        """Measures each remedy after those taken before, then adds them, the best first, as long as they help.

        Beside a large fault, the remedy of a smaller one gains little: what gained too little, or was too small to be
        tried, is tried ``again``.
        """
        start, before, rows = self.state, self.quality, len(self.rows)
        left = self._left = []
        little = []
        for each in {(each.cause, each.name, each.remedy): each for each in hypotheses}.values():
            noise = (
                f"its sites cause only {share(each.share)} % of the noise of all sites"
                if each.share < 1
                else f"not worth its cost at an error of {share(error(before.worst[1]))} %"
            )
            if each.share < HIDDEN:
                self._reject(each, math.nan, noise)
                continue
            if self._is_float_model(start.then(each.treatment)):
                self._reject(each, math.nan, _FLOAT)
                continue
            if not again and self._is_small(each):
                little.append((each, math.nan, noise))
                continue
            gain = self._gain(each, start, before)
            if self._is_worth(each, gain, before):
                left.append((each, gain))
                continue
            if outdone := self._is_outdone(each, gain, before):
                self.outdone.append((each, gain))
            self.case.judge.forget(start, *(start.then(worth.treatment) for worth, _ in left))
            if math.isnan(gain.value):
                self._reject(each, gain.value, "could not be measured")
            else:
                little.append((each, gain.value, _OUTDONE if outdone else _too_little(each, gain)))
        while left:
            each, gain = self._best(left)
            left.remove((each, gain))
            if self._enough(self.quality):
                self._reject(each, gain.value, "the target is met without it")
            else:
                self.add(each)
        # Ranges tell nothing about other causes, such as a bias in eight bits.
        can_gain = any(map(self._promises, self.bounds.values()))
        more = [each for each, _, _ in little if can_gain or each.cause not in NATURAL]
        more = more if len(self.rows) > rows else []
        for each, value, reason in little:
            if each not in more:
                self._reject(each, value, reason)
        if more:
            self._take(more, again=True)

    def _is_small(self, each: Hypothesis) -> bool:
        """Whether a remedy would be no row even if all the noise of its sites were gone, twice over."""
        if each.cause not in NATURAL or self.needed is not None or self.case.judge.metric is not None:
            return False
        most = Gain(2 * decibels(1.0, max(1 - each.share, 1e-9)))
        return not self._pays(each, most, self.quality)

    def _is_float_model(self, treatment: Treatment) -> bool:
        """Whether nothing that multiplies, or nothing at all, would be left in int8."""
        ops = tuple(dict.fromkeys(op for edit in treatment.floats if edit.kind == "float" for op in edit.ops))
        annotations = self.case.judge.annotations(Treatment(options=treatment.options)) if ops else None
        if annotations is None:
            return False
        costs, after = self.case.costs, annotations.after(Edit("float", ops))
        macs = costs.macs_of(ops)
        return (after is not None and not after.edges) or (macs > 0 and macs + costs.float_macs > 1 - ROUNDING)

    def add(self, each: Hypothesis) -> None:
        """Takes a remedy as the next row, if it still helps."""
        if self._is_float_model(self.state.then(each.treatment)):
            self._reject(each, math.nan, _FLOAT)
            return
        alone = self._gain(each, Treatment(), self.case.now)
        gain = self._gain(each, self.state, self.quality)
        if not self._is_worth(each, gain, self.quality):
            self._reject(each, alone.value, "no further gain after the remedies above")
            return
        self.taken.append(each)
        self.state = self.state.then(each.treatment)
        self.quality = self.case.judge.outcome(self.state)
        self.steps.append(self.quality)
        self.rows.append(
            CauseRow(
                rank=len(self.rows) + 1,
                cause=each.cause,
                name=each.name,
                module=each.name.rpartition("/")[0],
                evidence=each.evidence,
                remedy=each.remedy,
                gain=alone.value,
                gain_in_sequence=gain.value,
                cost=each.cost,
                sentence=each.in_words,
                others=tuple(name for name in dict.fromkeys(each.others) if name != each.name),
                source=_source(self.case.pair, each.name),
                quality=self.quality.value,
                how=_how(each),
                low=gain.low,
                high=gain.high,
                output=gain.output if len(self.quality.outputs) > 1 else "",
            )
        )

    def _gain(self, each: Hypothesis, state: Treatment, quality: Outcome) -> Gain:
        """The gain of a remedy after others, at the worst output where it is worth a row; nan if it has none."""
        if each.gain is not None:
            return Gain(each.gain)
        if each.preview is not None and state.data is None:  # which plays ranges of the pair's own data
            gain = self._of(each, self.case.judge.outcome(state.then(each.preview)), quality)
            if not self._is_worth(each, gain, quality):
                return gain
        try:
            return self._of(each, self.case.judge.outcome(state.then(each.treatment)), quality)
        except Pt2qaError as error:
            self.untried.setdefault(str(error), {})[f"{each.cause} ({each.remedy})"] = None
            return Gain()

    def _of(self, each: Hypothesis, found: Outcome, quality: Outcome) -> Gain:
        outputs = quality.by_quality if found.rank >= quality.rank else quality.by_quality[:1]
        gains = [found.gain_over(quality, output, each.unseen) for output in outputs or [""]]
        return next((gain for gain in gains if self._is_worth(each, gain, quality)), gains[0])

    def _is_worth(self, each: Hypothesis, gain: Gain, quality: Outcome) -> bool:
        """Whether a gain is a row: certain on other data, and worth its cost; a target needs whatever is certain.

        Of what was audited, the data or the specs are certain, and a gain confirms them.
        """
        if each.gain is not None:  # measured in another way, by what suggests it
            return not each.gain <= 0
        if not (gain.holds or (each.audited and gain.value > 0)):
            return False
        if _takes_out(each) and not self._beats_free(each, gain):
            return False
        return self._pays(each, gain, quality)

    def _pays(self, each: Hypothesis, gain: Gain, quality: Outcome) -> bool:
        """Whether a gain that is certain is worth its cost; where errors matter, a bit for free is.

        Of other calibration data half of the noise is enough: what is fitted to the data gives a little to any model.
        """
        aim = self.case.judge.target
        if aim is not None and math.isfinite(aim.at_least):
            return True
        before = _sqnr(quality, gain.output)
        value = gain.value
        if quality.of_metric and quality.outputs:  # a few labels may be chance
            value = gain.middle
        is_free = not each.cost and not _takes_out(each) and error(before) >= self.worth.least
        enough = HALF if each.cause in OF_DATA else BIT
        is_fault = each.cause not in NATURAL or (is_free and value >= enough)
        return self.worth.pays(before, value, each.cost, is_fault=is_fault)

    def _is_outdone(self, each: Hypothesis, gain: Gain, quality: Outcome) -> bool:
        """Whether only what repairs give for free keeps a remedy from being a row."""
        known = _takes_out(each) and gain.holds and self._pays(each, gain, quality)
        return known and not self._beats_free(each, gain)

    def _drop_if_needless(self, each: Hypothesis) -> None:
        """Takes back what gains too little beside the remedies after it, which remove more, or are of the same cause.

        The remedy of a fault stays.
        """
        at = next((number for number, other in enumerate(self.taken) if other is each), None)
        if at is None or each.cause not in NATURAL or each.audited or each.gain is not None:
            return
        first, then, last = (error(found.worst[1]) for found in (*self.steps[at : at + 2], self.quality))
        same = any((other.cause, other.name) == (each.cause, each.name) for other in self.taken[at + 1 :])
        if not same and first - then >= then - last:
            return
        others = [other for other in self.taken if other is not each]
        without = self.case.judge.outcome(functools.reduce(Treatment.then, (other.treatment for other in others)))
        gain = self._of(each, self.quality, without)
        if gain.value > 0 and self._pays(each, gain, without):
            return
        kept = Search(self.case, self.needed, worth=self.worth)
        for other in others:
            kept.add(other)
        self._reject(each, gain.value, "no further gain after the remedies above")
        self.rows, self.taken, self.steps, self.state = kept.rows, kept.taken, kept.steps, kept.state
        self.quality = kept.quality
        self.tried += kept.tried

    def _beats_free(self, each: Hypothesis, gain: Gain) -> bool:
        """Whether what takes ops out of int8 gives more than what repairs give for free, at its cost."""
        if self.free is None:
            return True
        if not self.free.gain_over(self.quality, gain.output).holds:
            return True
        found = self.case.judge.outcome(self.state.then(each.treatment)).gain_over(self.free, gain.output)
        return self.worth.pays(_sqnr(self.free, gain.output), found.value, each.cost, is_fault=False)

    def _best(self, left: Sequence[tuple[Hypothesis, Gain]]) -> tuple[Hypothesis, Gain]:
        """The remedy to take next: at the worst output, the one that leaves the least error, at its cost.

        Among alike, one that quantizing again applies comes before one that needs a change of model or quantizer, then
        the one whose cause explains more, then the one with fewer edits.
        """
        order = {output: number for number, output in enumerate(self.quality.by_quality)}
        unmeasured = [found for found in left if math.isnan(found[1].value)]
        if unmeasured:
            return unmeasured[0]
        first = min(order.get(gain.output, 0) for _, gain in left)
        there = [found for found in left if order.get(found[1].output, 0) == first]

        def left_over(found: tuple[Hypothesis, Gain]) -> float:
            each, gain = found
            if self.case.judge.metric is not None and each.gain is None:
                return self.worth.macs * each.cost - gain.value
            before = _sqnr(self.quality, gain.output)
            return self.worth.after(gain.value if math.isnan(before) else before + gain.value, each.cost)

        best = min(there, key=left_over)
        alike = [found for found in there if found is best or _is_alike(found[1], best[1])]
        return min(
            alike,
            key=lambda found: (
                bool(found[0].cost),
                not found[0].treatment.made_of_edits,
                ORDER[found[0].cause],
                len(found[0].treatment.edits),
                -found[1].value,
            ),
        )

    def _reject(self, each: Hypothesis, gain: float, reason: str) -> None:
        self.tried.append(TriedRow(each.cause, each.name, each.remedy, gain, reason))


FITTED: Final = ("int8", "int8_weight", "range", "bias", "round", "shift", "scale", "smooth")
"""Edits that change how much noise their ops make in int8."""

COSTLY: Final = frozenset({"precision", "outlier-channel", "shared-scale"})
"""Causes whose remedy may take ops out of int8, which comes after all that is free."""

_FLOAT: Final = "it is the float model: nothing that multiplies would be left in int8"

OF_DATA: Final = frozenset({"bad-sample", "narrow-calibration", "wide-calibration", "calibration-outlier"})
"""Causes whose remedy is other calibration data."""

NATURAL: Final = COSTLY | OF_DATA | {"observer"}
"""Causes that are a matter of degree: a sound model has them, too, only smaller."""


_OUTDONE: Final = "not worth its cost beside what pt2qa.repair gives for free"


def _too_little(each: Hypothesis, gain: Gain) -> str:
    if gain.holds:
        return "gain too small for its cost" if each.cost else "gain too small"
    if gain.value > 0:
        return f"samples like these may show no gain ({between(gain.low, gain.high)} dB)"
    return "no gain"


def _takes_out(each: Hypothesis) -> bool:
    return each.cause in COSTLY and bool(each.treatment.floats or each.treatment.exact)


def _figure_row(name: str, found: Outcome) -> FigureRow:
    output, sqnr = found.worst
    return FigureRow(
        name, found.value, output, sqnr, found.worst_sample, found.worst_sample_sqnr, found.labels, found.samples
    )


def _how(each: Hypothesis) -> str:
    if each.gain is not None:
        return "deployed" if each.treatment != Treatment() else "compared"
    return "quantized again" if each.treatment.requantizes else "simulated"


def _is_alike(gain: Gain, best: Gain) -> bool:
    return gain.value >= ALIKE * best.value if math.isfinite(best.value) else gain.value == best.value


def _sqnr(found: Outcome, output: str) -> float:
    return dict(found.outputs).get(output, found.worst[1])


def _source(pair: QuantizedPair, name: str) -> str:
    graph = pair.reference if pair.float_graph is None else pair.float_graph
    handles = {str(found.name): handle for handle, found in pair.names.items()}
    node = next((node for node in graph.graph.nodes if handle_of(node) == handles.get(name, -1)), None)
    return "" if node is None else source_line(node)
