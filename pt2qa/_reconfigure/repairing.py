"""``pt2qa.repair``: accuracy at no cost at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pt2qa._ambient import torch_defaults
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._ranks import in_step, same_everywhere
from pt2qa._reconfigure.analysis import calibration_for, recipe_of
from pt2qa._reconfigure.baseline import Baseline, repaired
from pt2qa._reconfigure.outcome import free_rows, reported, stages
from pt2qa._reconfigure.report import CurvePoint, Reconfiguration, Stage
from pt2qa._repair.guard import LEAST_GAIN
from pt2qa._repair.methods import methods_named
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.positions import Mask
from pt2qa._trials.folds import Folds
from pt2qa._trials.judge import Judge, SimulatedModel
from pt2qa._trials.outcome import Outcome
from pt2qa._trials.target import Target
from pt2qa.errors import SelectionError
from pt2qa.overrides.plan import Edit


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
        ``rounding``: rounds weights with error feedback between their columns; only if it is named.
        ``biases``: corrects the mean error of each convolution and linear, as far as that helps the output.

    Each method is fitted to one half of the calibration batches and measured on the other, and vice versa; if it gains
    there and also on ``batches``, it is applied, fitted to all of them.

    Args:
        pair: what :func:`pt2qa.quantize` returned; it is not changed.
        batches: data on which the result is measured, preferably not the calibration batches; a list, or a loader that
            starts over.
        methods: names of methods; None: all but ``rounding``.
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

    >>> x = torch.linspace(-1, 1, 32).reshape(8, 4)
    >>> pair = pt2qa.quantize(pt2qa.capture(torch.nn.Linear(4, 2).eval(), x), "xnnpack", [x], progress=False)
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
        curve=tuple(_curve(["none", *(method.name for method in chosen)], steps)),
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


def _curve(names: Sequence[str], steps: Sequence[Baseline]) -> Iterator[CurvePoint]:
    for name, step in zip(names, steps, strict=True):
        yield CurvePoint(name, len(step.state.edits), 0.0, 0.0, math.nan, step.outcome.value)


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
