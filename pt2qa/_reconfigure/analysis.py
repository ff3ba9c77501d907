"""From each site's noise in each output to a converted and measured configuration."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._decibels import power
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair, Recipe, check_pair
from pt2qa._ranks import in_step, same_everywhere
from pt2qa._reconfigure.candidates import Fallback, Noise, applied, candidates_of, costs_of, edges_by_site, unintended
from pt2qa._reconfigure.outcome import Result, curve, edit_rows, free_rows, reported, stages, target_text, verdict
from pt2qa._reconfigure.report import CurvePoint, Reconfiguration, Stage
from pt2qa._reconfigure.search import Baseline, Converted, Search, Selection, aimed_until_met, repaired, with_free_edits
from pt2qa._repair.guard import LEAST_GAIN
from pt2qa._repair.methods import UNTIL_MET, methods_named
from pt2qa._sensitivity.analysis import sensitivity as noise_of_sites
from pt2qa._sensitivity.report import SensitivityReport
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data, Mask
from pt2qa._trials.judge import Judge, SimulatedModel
from pt2qa._trials.outcome import Folds, Outcome, outcome_of
from pt2qa._trials.treatment import Budget, Target, Treatment, read_target
from pt2qa.errors import BatchError, SelectionError
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.plan import OBSERVERS, Edit
from pt2qa.plugins.registry import levels_of


@torch_defaults
@in_step
def reconfigure(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    target: Target | float | str | None = None,
    budget: Budget | Mapping[str, float] | None = None,
    fallback: Fallback = "float",
    fuse: bool = True,
    observers: Sequence[str] = (),
    repairs: Sequence[str] | None = None,
    sensitivity: SensitivityReport | None = None,
    calibration: Iterable[Any] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    verify_code: bool = True,
    progress: bool | None = None,
) -> Reconfiguration:
    """Finds the cheapest quantizer configuration that meets a target, applies it, and measures it.

    Free edits come first: fusions that the backend supports but the quantizer does not annotate, other observers if
    requested, and the repairs of :func:`pt2qa.repair`; the model is converted with them.  Then ops leave int8, in order
    of output noise removed per cost (:func:`pt2qa.sensitivity`); candidates are scored on the simulator by switching
    sites.  The resulting plan is prepared, calibrated, converted, and measured.

    Of three distinct batches or more, the search does not see every third one: the target is met only if it is met
    there, too, and the verdict says what other data may have.  A metric sees the data that it has: keep some apart.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batches: data on which quality is measured; a list, or a loader that starts over.
        target: dB of the worst output (``30``, ``"sqnr>=30"``), or a :class:`pt2qa.Target` with your own function.
            None: the best quality within the budget.
        budget: what may be left out of int8: ``{"macs": 0.2}`` for a fifth of the multiply-accumulates, ``"bytes"`` for
            the weights' bytes.  Ops that the quantizer itself leaves in float count.
        fallback: what ops fall back to: ``float``, or ``int16`` or ``dynamic`` if the quantizer supports it.
        fuse: whether to fuse what the backend can fuse.
        observers: other observers to try for all activations: ``minmax``, ``histogram``, ``moving_average``; the one
            that measures best is kept.
        repairs: the methods of :func:`pt2qa.repair` to try if the target is not met without; None: its default, and
            none where training (QAT) chose ranges and weights.
        sensitivity: an ungrouped report of :func:`pt2qa.sensitivity` for this pair; used if there is no free edit.
        calibration: batches for recalibration; None: the pair's calibration batches.
        inputs_of: maps an item of ``batches`` to a batch.
        mask: which positions count for the SQNR, as in :func:`pt2qa.compare_layers`; a function as the target's metric
            leaves out its own.
        verify_code: whether to execute the code of the result, ``report.code``, in an export flow of its own and to
            compare its outputs: an export, prepare, calibration and convert, a few times where capture rewrote what
            the quantizer needs.
        progress: whether to show progress bars; None: if stderr is a terminal.

    Returns:
        The report; ``report.pair`` is the new pair and ``report.plan`` is passed to :func:`pt2qa.quantize` as
        ``overrides``.  If the target cannot be met it holds the best result found, and says so.

    Raises:
        SelectionError: neither target nor budget, an invalid target, a level that the quantizer does not support, or a
            pair that pt2qa did not quantize.
        BatchError: there is no batch.

    >>> fixed = pt2qa.reconfigure(pair, [x], target=20, progress=False)
    >>> fixed.met, len(fixed.rows)
    (1, 0)
    """
    check_pair(pair)
    recipe = recipe_of(pair, fallback)
    limits = budget if isinstance(budget, Budget) else Budget(**dict(budget or {}))
    if target is None and limits == Budget():
        raise SelectionError("got neither target nor budget. Pass target=30 (dB), or budget={'macs': 0.2}.")
    aim = Target(-math.inf) if target is None else read_target(target)
    if isinstance(observers, str) or not set(observers) <= set(OBSERVERS):
        raise SelectionError(f"observers: got {observers!r}, expected a list of {', '.join(OBSERVERS)}.")
    methods = [] if recipe.qat and repairs is None else methods_named(repairs, "repairs", UNTIL_MET)
    if sensitivity is not None:
        check_given(pair, sensitivity)
    data = Data("batches", batches, inputs_of, mask, progress)
    again = calibration_for(recipe, calibration, data)
    judge = Judge(
        pair,
        data,
        aim,
        "reconfigure",
        unit="evaluation",
        calibration=None if calibration is None else again,
        sqnr=aim.metric is None,
        keeps_unseen=target is not None,
    )
    reference, first = judge.reference, judge.reference.first
    notes = [*judge.notes, *pair.verify(first.batch)]
    needed = None if target is None else aim.at_least * (judge.of_float() if aim.of_float else 1.0)
    before = judge.outcome(Treatment())
    base = Baseline(judge)
    if needed is None or not before.value >= needed:
        base = with_free_edits(base, fuse, observers, methods, Folds(pair, again), needed)
    notes += [*base.notes, *base.pair.verify(first.batch)]
    if base.state.edits and sensitivity is not None:
        notes.append("sensitivity= is not used: the free edits change the noise of sites, so it was measured again")
    noise, noise_notes = noises_of(base, None if base.state.edits else sensitivity, progress)
    costs = costs_of(base.pair, first.values)
    candidates = tuple(candidates_of(base.pair, base.annotations, costs, fallback))
    edges_of = edges_by_site(base.pair, base.annotations)

    @functools.cache
    def edits_of(chosen: Selection) -> tuple[tuple[Edit, ...], Annotations]:
        return applied(base.annotations, (candidates[number].edit for number in chosen))

    def searched(aimed: float | None) -> Search:
        # Ops at levels other than float keep their sites; the simulator runs without them.
        exact = edits_of if fallback == "float" else None
        return Search(base, candidates, edges_of, noise, costs, aimed, limits, exact)

    def converted(chosen: Selection) -> Converted:
        treatment = base.edited(edits_of(chosen)[0])
        new = judge.applied(treatment)
        return Converted(chosen, judge.plan(treatment), new, judge.converted(new))

    search = searched(needed)
    found = search.run()
    final = converted(found.chosen)
    if found.met and needed is not None:
        final, done = aimed_until_met(final, found.quality, needed, searched, converted)
        notes += done
    notes += [*noise_notes, *final.pair.verify(first.batch)]
    notes += unintended(base.pair, final.pair, search.on(final.chosen), fallback)
    apart = len(reference.health.faults) if aim.metric is None else 0
    result = Result(
        before=before,
        after=final.quality,
        met=search.fits(final.chosen)
        and not apart
        and all(each.value >= (-math.inf if needed is None else needed) for each in final.quality.parts),
        float_macs=search.float_macs(final.chosen),
        float_bytes=search.float_bytes(final.chosen),
        edits=len(final.plan.edits),
        scored=judge.measured,
        proof=found.proof,
        apart=apart,
        fallback=fallback,
    )
    if fallback != "float":
        notes.append(
            f"predicted and simulated values have the ops of the edits in float; converted, they are {fallback}"
        )
    judge.bar.close()
    stay = search.on(final.chosen)
    simulated = search.quality(final.chosen)
    return reported(
        judge,
        final.pair,
        final.plan,
        verdict(aim, needed, limits, result, pair.quantizer),
        notes,
        verify_code,
        rows=(*free_rows(pair, base, edits_of(final.chosen)[0]), *edit_rows(final.chosen, search)),
        curve=tuple(curve(base, found, search)),
        stages=(
            *stages("before", before, costs.float_macs, len(pair.sites)),
            Stage("simulated", simulated.value, result.float_macs, len(stay)),
            *stages("converted", final.quality, result.float_macs, len(final.pair.sites)),
        ),
        target=target_text(aim, needed, limits),
        met=int(result.met),
    )


def calibration_for(recipe: Recipe, given: Iterable[Any] | None, data: Data) -> Data:
    """What the model is quantized again on: the batches that are given, read as ``data`` are, or the pair's own."""
    if given is not None:
        return replace(data, name="calibration", batches=given)
    if recipe.data is None:
        raise SelectionError(
            "the pair was calibrated on an iterator, which is exhausted. Pass calibration=, a list or a loader that "
            "starts over."
        )
    return replace(data, name="calibration", batches=recipe.data.batches, inputs_of=recipe.data.inputs_of)


def recipe_of(pair: QuantizedPair, fallback: Fallback) -> Recipe:
    """How the pair was made, if that can be repeated and its quantizer has the fallback."""
    recipe = pair.recipe
    if recipe is None or pair.capture is None:
        raise SelectionError(
            "this pair was not made by pt2qa.quantize, so it cannot be quantized again. Pass one that was: "
            "pt2qa.quantize(capture, quantizer, calibration)."
        )
    levels = levels_of(recipe.plugin)
    if fallback not in levels:
        has = ", ".join(level for level in levels if level in ("float", "int16", "dynamic"))
        raise SelectionError(f"fallback: got {fallback!r}, expected one that {recipe.plugin.name} supports: {has}.")
    return recipe


Noises = tuple[dict[int, Noise], tuple[str, ...]]
"""The noise of each site in each output, and notes."""


def noises_of(base: Baseline, given: SensitivityReport | None, progress: bool | None) -> Noises:
    """Measured per output, unless there is one, and ``given`` is a finished report of the pair by site."""
    pair, reference = base.pair, base.judge.reference
    single = len(reference.names) == 1
    if single and given is not None and len(given.rows) == given.planned:
        return _together([given])
    positions = [None] if single or not reference.names else reference.positions
    try:
        reports = [
            noise_of_sites(
                pair,
                reference,
                inputs_of=operator.attrgetter("batch"),
                mask=reference.data.mask,
                post_process=None if position is None else functools.partial(_leaf, position),
                progress=progress,
            )
            for position in positions
        ]
    except BatchError:  # quantized, the model is finite on no batch, which is what the search is to repair
        return _alone(base)
    return _together(reports)


def _alone(base: Baseline) -> Noises:
    """Measured on the whole model with one site quantized at a time."""
    of_site = {}
    for site in range(len(base.pair.sites)):
        run = SimulatedModel(base.pair, frozenset({site})).of_item
        found = outcome_of(base.judge.reference.of(base.pair), run)
        of_site[site] = tuple(_share(power(-sqnr), 1.0) for _, sqnr in found.outputs)
    return of_site, ("the quantized model returns NaN on every batch, so each site was quantized and measured alone",)


def check_given(pair: QuantizedPair, given: SensitivityReport) -> None:
    if given.group != "site":
        raise SelectionError(f"sensitivity: got rows by {given.group}, expected one per site. Leave out group=.")
    about = given.quantizer, given.environment.fingerprint
    if about != (pair.quantizer, pair.environment.fingerprint) or {row.site for row in given.rows} - {
        site.index for site in pair.sites
    }:
        raise SelectionError(
            f"sensitivity: got the report of another pair, {given.model}, quantized by {given.quantizer}; expected "
            f"{pair.model}, quantized by {pair.quantizer}. Without sensitivity=, it is measured."
        )


def _together(reports: Sequence[SensitivityReport]) -> Noises:
    sites: dict[int, list[float]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            sites.setdefault(row.site, [0.0] * len(reports))[number] = _share(row.noise, report.signal)
    # With several outputs most sites do not reach all of them; keep only notes that all reports share.
    said = [note for note in reports[0].notes if all(note in report.notes for report in reports)]
    return {site: tuple(noise) for site, noise in sites.items()}, tuple(said)


def _share(noise: float, signal: float) -> float:
    """Noise as a share of the signal; infinite if it is nan, so that such a site is the first to go."""
    if math.isnan(noise):
        return math.inf
    return noise / signal if signal > 0 else noise


def _leaf(position: int, outputs: Any) -> Any:
    return pytree.tree_leaves(outputs)[position]


@torch_defaults
@in_step
def repair(
    pair: QuantizedPair,
    batches: Iterable[Any],
    *,
    methods: Sequence[str] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    calibration: Iterable[Any] | None = None,
    inputs_of: Callable[[Any], Batch] | None = None,
    mask: Mask | None = None,
    verify_code: bool = True,
    progress: bool | None = None,
) -> Reconfiguration:
    """Improves a quantized model without making it slower: the same ops and kernels, with better numbers in them.

    Methods:
        ``shifting``: moves the channel offsets of norms into the biases around them.
        ``equalization``: scales channels of unequal size, in the weights that write and read them.
        ``ranges``: chooses the range of each activation, or group that shares one, for the least error of the output.
        ``rounding``: rounds weights with error feedback between their columns; by default only where
            that takes neither long nor a large plan.
        ``biases``: corrects the mean error of each convolution and linear, as far as that helps the output.

    Each method is fitted to one half of the calibration batches and measured on the other, and vice versa; if it gains
    there and also on ``batches``, it is applied, fitted to all of them.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batches: data on which the result is measured, preferably not the calibration batches; a list, or a loader that
            starts over.
        methods: names of methods; None: all.
        metric: a function of a model, such as accuracy on your own data, to report in addition to the SQNR: of the
            float model, and before and after the repair.  The model is called like the captured one.
        calibration: batches to fit to and to recalibrate with, two or more; None: the pair's calibration batches.
        inputs_of: maps an item of ``batches`` to a batch.
        mask: which positions count where a repair is measured, in ``batches`` and in the calibration batches, as in
            :func:`pt2qa.compare_layers`.  Methods are fitted to all positions, which the kernels compute.
        verify_code: whether to execute ``report.code`` in an export flow of its own and to compare its outputs.
        progress: whether to show progress bars; None: if stderr is a terminal.

    Returns:
        The report; ``report.pair`` is the new pair, the given one if nothing helps, and ``report.plan`` is passed to
        :func:`pt2qa.quantize` as ``overrides``.  The notes say for each method what it gained, or why it was not
        applied.

    Raises:
        SelectionError: there is no such method, no output is floating-point, or the pair was trained (QAT) or not made
            by pt2qa.
        BatchError: there is no batch.

    >>> repaired = pt2qa.repair(pair, [x], progress=False)
    >>> [stage.name for stage in repaired.stages][:2]
    ['before', 'converted']
    """
    check_pair(pair)
    recipe = recipe_of(pair, "float")
    chosen = methods_named(methods, "methods")
    if recipe.qat:
        raise SelectionError(
            "this pair was trained (QAT), so its ranges and weights are learned. Pass one that was quantized without "
            "qat=True."
        )
    data = Data("batches", batches, inputs_of, mask, progress)
    fit_to = calibration_for(recipe, calibration, data)
    judge = Judge(pair, data, None, "repair", unit="evaluation", calibration=None if calibration is None else fit_to)
    reference = judge.reference
    notes = [*judge.notes, *pair.verify(reference.first.batch)]
    folds = Folds(pair, fit_to)
    fitted_before = folds.quality(pair)
    steps = [Baseline(judge)]
    for method in chosen:
        steps.append(repaired(steps[-1], method, folds))
    final = steps[-1]
    judge.bar.close()
    if final.pair is not pair:
        notes += final.pair.verify(reference.first.batch)
    before, after = steps[0].outcome, final.outcome
    sites, on = len(pair.sites), len(final.pair.sites)
    return reported(
        judge,
        final.pair,
        judge.plan(final.state),
        _verdict(before, after, final.state.edits),
        [*notes, *final.notes],
        verify_code,
        rows=tuple(free_rows(pair, final)),
        curve=tuple(
            CurvePoint(name, len(step.state.edits), 0.0, 0.0, math.nan, step.outcome.value)
            for name, step in zip(["none", *(method.name for method in chosen)], steps, strict=True)
        ),
        stages=(
            *stages("before", before, 0.0, sites),
            *stages("converted", after, 0.0, on),
            Stage("before, calibration", fitted_before.value, 0.0, sites),
            Stage("converted, calibration", folds.quality(final.pair).value, 0.0, on),
            *_metric_stages(metric, pair, final.pair),
        ),
        target="accuracy at no cost at run time",
        met=int(bool(final.state.edits) and after.gain_over(before).value >= LEAST_GAIN),
    )


def _metric_stages(
    metric: Callable[[Callable[..., Any]], float] | None, before: QuantizedPair, after: QuantizedPair
) -> Iterator[Stage]:
    if metric is None:
        return
    name = Target(-math.inf, metric).name
    sites = len(before.sites)
    models = (
        ("float", SimulatedModel(before, frozenset()), 1.0, 0),
        ("before", before.quantized, 0.0, sites),
        ("converted", after.quantized, 0.0, len(after.sites)),
    )
    for stage, model, macs, on in models:
        yield Stage(f"{stage}, {name}", same_everywhere(float(metric(model)), name), macs, on)


def _verdict(before: Outcome, after: Outcome, edits: Sequence[Edit]) -> str:
    if not edits:
        return f"Nothing to repair: no method gains on held-out data; SQNR {before.value:.4g} dB."
    gain = f"SQNR {before.value:.4g} dB before, {after.value:.4g} dB converted and measured"
    if not after.gain_over(before).value >= LEAST_GAIN:
        return f"Hardly any gain: {gain}. The gain on calibration data does not carry over to these batches."
    text = f"Repaired at no cost at run time: {gain}"
    if not math.isnan(before.labels):
        text += f"; labels kept {100 * before.labels:.3g} % before, {100 * after.labels:.3g} % after"
    return f"{text}."
