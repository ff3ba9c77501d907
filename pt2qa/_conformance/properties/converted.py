"""prepare, calibration and convert succeed, no op is lost, and the accuracy is what the integers allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf
from typing import Any, Final, get_args

import torch
from torch import Tensor

from pt2qa._conformance.properties.property import Outcome, SkippedError, annotated_in, failed, holds, passed
from pt2qa._conformance.trial import Failure, Stage, Trial, some
from pt2qa._graph.internals.torch import pytree
from pt2qa._grouping import grouped
from pt2qa._metrics import error_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.program import Program, QuantParams, Site, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa.errors import QuantizeError, SimulationError
from pt2qa.overrides import Annotations, Edit

_STAGES: tuple[Stage, ...] = get_args(Stage)


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
    """The converted pair; a SkippedError if there is none."""
    annotated_in(trial)
    if isinstance(trial.pair, Failure):
        raise SkippedError(f"not reached: see {'simulator' if trial.pair.stage == 'lower' else trial.pair.stage}")
    return trial.pair


MOST = 4
"""Number of ops per model to leave in float, one at a time: each costs one more quantization of the model."""


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


def _places(sites: Iterable[Site]) -> Counter[tuple[str, str]]:
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


BIT: Final = 6.02
"""dB of one bit: ``20 · log10(2)``."""

ALLOWANCE: Final = 2 * BIT
"""dB by which a sound quantizer may fall short of the ideal: one bit for a symmetric scheme on one-sided data, such as
a ReLU's output, and one bit for an observer that clips or widens the calibrated range."""

Range = tuple[Tensor, Tensor]


class IdealSimulator(Simulator):
    """Textbook rounding, the best that a quantizer's bits and sites allow: each range is that of this batch's values.

    A uniform quantizer with the smallest range that covers the data has an error variance of ``step² / 12``; each bit
    halves the step: 6.02 dB.  Source: Widrow and Kollár, Quantization Noise (2008), chapter 5; Jacob et al.,
    Quantization and Training of Neural Networks (2018), section 2, for the affine scheme, whose range includes 0.

    Number of levels, channel axis and sites are the quantizer's own. Activations that share a scale in the quantized
    model share one here, with a range that covers them all.
    """

    def __init__(self, program: Program, values: Sequence[Any]) -> None:
        super().__init__(program)
        for constant in program.constants:
            if constant.site is not None and isinstance(constant.reference, Tensor):
                params = program.sites[constant.site].params
                self.on[constant.slot] = ideal_rounding(constant.reference, params)
        self._ranges: dict[int, Range] = {}
        self._shared: dict[int, Range] = {}
        self.run(values, on=True)
        groups = grouped((_scale_of(index, program), found) for index, found in self._ranges.items())
        for index, found in self._ranges.items():
            self._shared[index] = found
            if program.sites[index].params.axis is None:
                lows, highs = map(torch.stack, zip(*groups[_scale_of(index, program)], strict=True))
                self._shared[index] = lows.amin(), highs.amax()

    def site_function(self, step: Step) -> Callable[..., Any]:
        """Ideal rounding for the site of a step; the first run records the ranges."""
        assert step.site is not None
        index, params = step.site, self.program.sites[step.site].params

        def rounded(value: Tensor, out: Tensor | None = None) -> Tensor:
            self._ranges.setdefault(index, range_of(value, params.axis))
            return ideal_rounding(value, params, self._shared.get(index))

        return rounded


def ideal_rounding(value: Tensor, params: QuantParams, limits: Range | None = None) -> Tensor:
    """A value rounded to a site's number of levels in the range ``limits``; None for the value's own range.

    With ``low ≤ 0 ≤ high``: ``step = (high - low) / (quant_max - quant_min)``, ``z = round(-low / step)``,
    ``(clamp(round(x / step) + z, 0, quant_max - quant_min) - z) · step``.
    """
    stored = getattr(torch, params.dtype)
    if stored.is_floating_point:
        return value.to(stored).to(value.dtype)
    low, high = range_of(value, params.axis) if limits is None else limits
    levels = params.quant_max - params.quant_min
    step = torch.where(high > low, (high - low) / levels, 1.0)
    zero = torch.round(-low / step)
    return ((torch.round(value.double() / step) + zero).clamp(0, levels) - zero).mul(step).to(value.dtype)


def range_of(value: Tensor, axis: int | None) -> Range:
    """The smallest range that covers 0 and the finite values, per tensor or per channel; float64."""
    finite = torch.where(value.isfinite(), value, 0.0).double()
    dims = [dim for dim in range(value.dim()) if dim != axis]
    if axis is None:
        low, high = finite.min(), finite.max()
    else:
        low, high = finite.amin(dims, keepdim=True), finite.amax(dims, keepdim=True)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def output_sqnr(reference: Any, quantized: Any) -> float:
    """The lowest SQNR of the float outputs in dB; inf if they are identical or none is float.

    An output that is wrongly infinite or NaN counts as -inf; one whose reference is zero does not count.
    """
    pairs = zip(pytree.tree_leaves(reference), pytree.tree_leaves(quantized), strict=True)
    sums = [error_sums(want, got) for want, got in pairs if isinstance(want, Tensor) and want.is_floating_point()]
    found = [-inf if each.nonfinite else each.sqnr for each in sums]
    return min((each for each in found if each == each), default=inf)


def _scale_of(site: int, program: Program) -> Hashable:
    """Equal for activations that share a scale."""
    params = program.sites[site].params
    if params.dynamic or isinstance(params.scale, Tensor) or params.scale is None:
        return site
    return params.dtype, params.quant_min, params.quant_max, params.scale, params.single_zero_point
