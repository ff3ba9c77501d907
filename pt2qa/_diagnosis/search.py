"""The search for remedies: which hypotheses are made, what each must gain, and in which order they are taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pt2qa._diagnosis.case import Case, Hypothesis, is_alike
from pt2qa._diagnosis.causes import ORDER
from pt2qa._diagnosis.hypotheses import calibration, configuration, precision, repairs, sites, stages, weights
from pt2qa._diagnosis.hypotheses import deployed as deployed_kernels
from pt2qa._diagnosis.rows import CauseRow, FigureRow, TriedRow, listed
from pt2qa._graph.handles import handle_of, source_line
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.guard import Method
from pt2qa._report.base import Report
from pt2qa._report.formats import decibel, share
from pt2qa._report.prose import few
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.treatment import Ranges, Substitute, Treatment
from pt2qa.errors import Pt2qaError

FREE_GAIN: Final = 2.0
"""Least gain in dB of a free remedy to become a row; other data differ by less."""

PAID_GAIN: Final = 3.0
"""The same for a remedy that takes ops out of int8, or changes model or quantizer: half of the noise."""

GAIN_FOR_ALL: Final = 8.0
"""Further gain in dB required for taking all multiply-accumulates out of int8; in proportion for less."""

GOOD, GAIN_OF_GOOD = 40.0, 6.0
"""From this SQNR in dB on, the least gain that anybody would notice."""

GUARDED_GAIN: Final = 0.5
"""The same for a repair, which is kept only if it helps data that it was not fitted to."""

WITH_TARGET: Final = 0.5
"""The same for all where there is a target to reach."""

POOR: Final = 25.0
"""dB below which half of the noise is worth ops in float without a target."""

GAIN_OF_FAIR: Final = 9.0
"""Least gain of ops in float above that: in a small net, one op may well cause three quarters of the noise."""

ADVICE_OF_FAIR: Final = 4.0
"""Least gain of changing model or quantizer above that: what backends share or fix costs about as much."""

SLOPE: Final = 0.6
"""Further gain required per dB above that for causes in ``NATURAL``."""

PAID: Final = 0.75
"""Weight of the gain in the ranking if a remedy takes ops out of int8."""

ALIKE: Final = 0.5
"""Difference in dB below which two gains are equal, and the cause that explains more is preferred."""

_BOUNDS: Final[dict[Ranges, str]] = {"fitted": "ranges fitted to the data", "by channel": "ranges fitted by channel"}
"""Their names in the table of figures."""

FITS: Final = 1.0
"""If ranges fitted to the data gain less than this, in dB, no range or weight is at fault."""

HIDDEN: Final = 3e-4
"""Share of the noise of all sites below which a remedy cannot gain 2 dB, even after the others have gained 30 dB."""

SPREAD: Final = 4.0
"""If ranges by channel gain less than this, in dB, no channel is an outlier."""


@dataclass
class Search:
    """The remedies so far; ``state`` has all of them, ``quality`` is the outcome with them."""

    case: Case
    needed: float | None
    repairs: Sequence[type[Method]] = ()

    def __post_init__(self) -> None:
        self.rows: list[CauseRow] = []
        self.tried: list[TriedRow] = []
        self.untried: dict[str, dict[str, None]] = {}
        """By error, the remedies that fail with it."""
        self.state = Treatment()
        self.quality: Outcome = self.case.now
        self.bounds: dict[Ranges, Outcome] = {}
        self.deployed: list[FigureRow] = []
        self._left: list[tuple[Hypothesis, float]] = []

    def run(self) -> None:
        """Tries what always matters, then, where the numbers call for it, ranges and weights, then fallbacks."""
        case = self.case
        always = [*stages.changed(case), *stages.constants(case), *stages.nonfinite(case)]
        if math.isnan(case.now.worst[1]) or math.isinf(case.now.worst[1]):
            self._take(always)  # the instruments below need numbers
            return
        if not self._enough(case.now):
            self._bound()
            own = (configuration.unfused, configuration.rounded_before, configuration.dynamic_by_row)
            found = [*always, *(each for find in own for each in find(case)), *self._ranges()]
            costly = [each for each in found if not _is_free(each)] if self.repairs else []
            self._take([each for each in found if each not in costly])
            self._repair()
            self._take(costly)
            self._take(list(calibration.bad_sample(self.quality, calibration.MOST)))
            if self.quality.worst[1] < GOOD if self.needed is None else not self._enough(self.quality):
                self._take(list(precision.needed(self._treated())))
            if all(row.cause != "bad-sample" for row in self.rows):
                # Last, because what hurts all samples may hurt one most.
                self._take(list(calibration.bad_sample(self.quality)))
        else:
            self._take(always)

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

    def final(self) -> tuple[QuantizedPair | None, Outcome]:
        """The pair with all remedies that can be applied by quantizing again, and the figures with all of them."""
        state = self.state
        if not (state.requantizes or state.floats):
            return None, self.quality
        try:
            pair = self.case.judge.applied(state)
        except Pt2qaError as error:
            self.case.notes.append(f"all remedies together could not be applied: {error}")
            return None, self.quality
        if not state.made_of_edits:
            return pair, self.quality
        judge = self.case.judge
        return pair, judge.converted(pair) if state.floats else self.quality

    def notes(self) -> list[str]:
        return [f"not measured: {few(list(each))}: {error}" for error, each in self.untried.items()]

    def so_far(self) -> tuple[QuantizedPair | None, Outcome]:
        """The same after Ctrl-C, with the best of the remedies that were measured and not yet taken; runs no model."""
        if self._left and not self.rows:
            best = _best(self._left)
            self._left.remove(best)
            self._add(best[0])
        for each, gain in self._left:
            self._reject(each, gain, "interrupted before it was measured after the remedies above")
        state = self.state
        requantized = state.requantizes and state.made_of_edits and not state.floats
        return self.case.judge.pair_with(state) if requantized else None, self.quality

    def figures(self, after: Outcome) -> Iterator[Any]:
        yield _figure_row("now", self.case.now)
        if self.rows:
            yield _figure_row("after", after)
        for name, found in self.bounds.items():
            yield _figure_row(_BOUNDS[name], found)
        yield from self.deployed

    def look_at_kernels(self, backend: Any) -> Report:
        report, hypotheses = deployed_kernels.kernels(self.case, backend)
        rows = len(self.rows)
        self._take(hypotheses)
        found = [("deployed", report.sqnr)]
        found += [("deployed, after", report.sqnr + row.gain) for row in self.rows[rows:]]
        of_metric = self.case.judge.metric is not None
        self.deployed = [
            FigureRow(name, math.nan if of_metric else sqnr, "", sqnr, -1, math.nan) for name, sqnr in found
        ]
        return report

    def _enough(self, found: Outcome) -> bool:
        return self.needed is not None and found.value >= self.needed

    def _bound(self) -> None:
        """What the model would have with ranges that fit the data, per tensor and by channel, and if that is much."""
        case = self.case
        own = case.pair.sites
        weights = {index: each for index, each in case.fitted_weights.items() if not is_alike(own[index], each)}
        tried: tuple[tuple[Ranges, float, dict[int, Substitute]], ...] = (
            ("fitted", FITS, case.fitted),
            ("by channel", SPREAD, case.by_channel),
        )
        for name, least, params in tried:
            instead = {**params, **weights}
            if instead:
                self.bounds[name] = case.judge.outcome(case.played(instead))
                if self._gain_of(name) >= least:
                    case.instead |= {"fitted", name}  # a channel may hide a range that does not fit

    def _gain_of(self, name: Ranges) -> float:
        return self.bounds[name].worst[1] - self.case.now.worst[1] if name in self.bounds else math.nan

    def _ranges(self) -> Iterator[Hypothesis]:
        """Hypotheses about ranges and weights, if these explain something."""
        case = self.case
        if not self.bounds:
            return
        yield from weights.biases(case)
        yield from weights.unread(case)
        yield from sites.masked(case)
        if "fitted" in case.instead:
            yield from sites.floored(case)
            yield from weights.coarse(case)
            yield from sites.too_few_steps(case)
            data = list(calibration.ranges_of_calibration(case))
            yield from data
            yield from sites.twice(case)
            yield from sites.unfit(case, data_at_fault=bool(data))
        if "by channel" in case.instead:
            yield from sites.outliers(case)
            yield from sites.outliers_in_series(case)
        if self._gain_of("fitted") >= FITS or self.needed is not None:
            yield from configuration.observers(case)

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
        for each in _distinct(hypotheses):
            noise = f"its sites cause only {share(each.share)} % of the noise of all sites"
            if each.share < HIDDEN:
                self._reject(each, math.nan, noise)
                continue
            if not again and self._is_small(each):
                little.append((each, math.nan, noise))
                continue
            gain = self._gain(each, start, before)
            if gain >= self._least(each) and not self._by_chance(each, start, before):
                left.append((each, gain))
            elif math.isnan(gain):
                self._reject(each, gain, "could not be measured")
            else:
                little.append((each, gain, self._too_little(gain)))
        while left:
            each, gain = _best(left)
            left.remove((each, gain))
            if self._enough(self.quality):
                self._reject(each, gain, "the target is met without it")
            else:
                self._add(each)
        # Ranges tell nothing about other causes, such as a bias in eight bits.
        more = [each for each, _, _ in little if self._can_gain() or each.cause not in NATURAL]
        more = more if len(self.rows) > rows else []
        for each, gain, reason in little:
            if each not in more:
                self._reject(each, gain, reason)
        if more:
            self._take(more, again=True)

    def _too_little(self, gain: float) -> str:
        if gain < FREE_GAIN or self.needed is not None:
            return "gain too small"
        return f"gain too small for a model with {decibel(self.quality.worst[1])} dB and no target"

    def _is_small(self, each: Hypothesis) -> bool:
        """Whether the sites of a remedy make too little of the noise for half of the least gain."""
        return each.cause in NATURAL and -10 * math.log10(max(1 - each.share, 1e-9)) < self._least(each) / 2

    def _can_gain(self) -> bool:
        """Whether ranges and weights that fit would be better than the remedies so far."""
        had = self.quality.worst[1]
        gains = [found.worst[1] - had for found in self.bounds.values()]
        return bool(gains) and (gains[0] >= FITS or gains[1] >= SPREAD)

    def _add(self, each: Hypothesis) -> None:
        alone = self._gain(each, Treatment(), self.case.now)
        in_sequence = self._gain(each, self.state, self.quality)
        if not in_sequence >= self._least(each) or self._by_chance(each, self.state, self.quality):
            self._reject(each, alone, "no further gain after the remedies above")
            return
        self.state = self.state.then(each.treatment)
        self.quality = self.case.judge.outcome(self.state)
        self.rows.append(
            CauseRow(
                rank=len(self.rows) + 1,
                cause=each.cause,
                name=each.name,
                module=each.name.rpartition("/")[0],
                evidence=each.evidence,
                remedy=each.remedy,
                gain=alone,
                gain_in_sequence=in_sequence,
                cost=each.cost,
                sentence=each.in_words,
                others=listed(name for name in dict.fromkeys(each.others) if name != each.name),
                source=_source(self.case.pair, each.name),
                quality=self.quality.value,
                how=_how(each),
            )
        )

    def _gain(self, each: Hypothesis, state: Treatment, quality: Outcome) -> float:
        """The gain of a remedy after others; nan if it cannot be applied there."""
        if each.gain is not None:
            return each.gain
        try:
            return self.case.judge.outcome(state.then(each.treatment)).gain_over(quality)
        except Pt2qaError as error:
            self.untried.setdefault(str(error), {})[f"{each.cause} ({each.remedy})"] = None
            return math.nan

    def _least(self, each: Hypothesis) -> float:
        """The smallest gain over the model with the remedies so far for which another one is a row."""
        if self.case.judge.metric is not None:
            return 1e-9
        if self.needed is not None:
            return WITH_TARGET
        return self._least_without_target(each)

    def _least_without_target(self, each: Hypothesis) -> float:
        now, natural = self.quality.worst[1], each.cause in NATURAL
        if each.cause in repairs.CAUSE_OF.values():
            return GUARDED_GAIN  # on data that it was not fitted to
        if now >= GOOD:
            return math.inf if natural else GAIN_OF_GOOD
        paid = bool(each.treatment.floats) or each.cause in PAID_CAUSES
        free = each.treatment.made_of_edits and not paid
        costly = GAIN_FOR_ALL * each.cost
        if now < POOR or not natural:
            return FREE_GAIN if free else PAID_GAIN + costly
        least = FREE_GAIN if free else (GAIN_OF_FAIR if paid else ADVICE_OF_FAIR) + costly
        return least + SLOPE * (now - POOR)

    def _by_chance(self, each: Hypothesis, state: Treatment, quality: Outcome) -> bool:
        """Whether a metric without a target gains what the outputs do not: a few labels may be chance."""
        aim = self.case.judge.target
        if aim is None or aim.metric is None or not math.isinf(aim.at_least) or each.gain is not None:
            return False
        before, after = quality.worst[1], self.case.judge.outcome(state.then(each.treatment)).worst[1]
        # Where the outputs had no number only the metric can tell; one that is nan now is no gain.
        return not (math.isnan(before) or after - before >= self._least_without_target(each))

    def _reject(self, each: Hypothesis, gain: float, reason: str) -> None:
        self.tried.append(TriedRow(each.cause, each.name, each.remedy, gain, reason))


FITTED: Final = ("range", "bias", "round", "shift", "scale", "smooth")
"""Edits that change how much noise their ops make in int8."""

PAID_CAUSES: Final = frozenset({"precision", "outlier-channel", "bad-sample"})
"""Causes whose remedy is always costly, whatever it takes out of int8."""

NATURAL: Final = PAID_CAUSES | {
    "narrow-calibration",
    "wide-calibration",
    "calibration-outlier",
    "shared-scale",
    "observer",
}
"""Causes that are a matter of degree: a sound model has them, too, only smaller."""


def _is_free(each: Hypothesis) -> bool:
    return each.treatment.made_of_edits and not each.treatment.floats


def _figure_row(name: str, found: Outcome) -> FigureRow:
    output, sqnr = found.worst
    return FigureRow(
        name, found.value, output, sqnr, found.worst_sample, found.worst_sample_sqnr, found.labels, found.samples
    )


def _how(each: Hypothesis) -> str:
    if each.gain is not None:
        return "deployed" if each.treatment != Treatment() else "compared"
    return "quantized again" if each.treatment.requantizes else "simulated"


def _distinct(hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
    return list({(each.cause, each.name, each.remedy): each for each in hypotheses}.values())


def _best(left: Sequence[tuple[Hypothesis, float]]) -> tuple[Hypothesis, float]:
    """The remedy to take next: the largest gain, of which those that cost something count less.

    Among alike, one that quantizing again applies comes before one that needs a change of model or quantizer, then the
    one whose cause explains more.
    """
    weight = {id(each): PAID * (1 - each.cost) if each.cost else 1.0 for each, _ in left}
    # Not even an infinite gain counts with a weight of 0: the product would be nan, which no order has a place for.
    score = {id(each): weight[id(each)] and weight[id(each)] * gain for each, gain in left}
    best = max(score.values())
    alike = [(each, gain) for each, gain in left if score[id(each)] >= min(best - ALIKE, 0.9 * best)]
    return min(alike, key=lambda found: (not found[0].treatment.made_of_edits, ORDER[found[0].cause], -found[1]))


def _source(pair: QuantizedPair, name: str) -> str:
    graph = pair.reference if pair.float_graph is None else pair.float_graph
    handles = {str(found.name): handle for handle, found in pair.names.items()}
    node = next((node for node in graph.graph.nodes if handle_of(node) == handles.get(name, -1)), None)
    return "" if node is None else source_line(node)
