"""What calibration saw: nothing, zeros, infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext
from pt2qa._check.integer_products import FEW_CHANNELS, IntegerProduct
from pt2qa._check.masks import Mask, masks_in
from pt2qa._check.site_rows import given_rows
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.torchao import range_keeper
from pt2qa._quantize.calibration import find_observers
from pt2qa._simulator.input_ranges import limits
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.plugins import DoesNotApplyError, Found
from pt2qa.plugins.rules import rule


@dataclass(frozen=True, slots=True)
class Observed:
    """What one observer has seen, at one of its places.

    Attributes:
        source: the node whose value it observes.
        low, high: the smallest and largest value, one for each channel if it observes channels: float64 of shape
            (channels,); empty if it never saw a value.
        integers: how many integers cover the range.
    """

    source: Node
    low: Tensor
    high: Tensor
    integers: int

    @property
    def saw(self) -> bool:
        """Whether it saw a value."""
        return self.low.numel() > 0

    @property
    def is_constant(self) -> bool:
        """Whether it observes a weight, or another constant."""
        return self.source.op == "get_attr"


def observed(prepared: GraphModule) -> tuple[Observed, ...]:
    """The observers of a prepared graph that keep a range, in graph order; for a fake-quantize op, its observer.

    Observers with a fixed scale or one for each batch keep none.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    found = []
    for target, node in find_observers(prepared).items():
        observer, source = range_keeper(modules[target]), node.args[0]
        if observer is None or not isinstance(source, Node) or getattr(observer, "is_dynamic", False):
            continue
        ends = torch.stack([end.detach().double().flatten() for end in (observer.min_val, observer.max_val)])
        # Before the first value an observer holds +inf and -inf, or nothing at all.
        if bool(((ends[0] == torch.inf) & (ends[1] == -torch.inf)).all()):
            ends = ends[:, :0]
        integers = int(getattr(observer, "quant_max", 255)) - int(getattr(observer, "quant_min", 0)) + 1
        found.append(Observed(source, ends[0], ends[1], integers))
    return tuple(found)


def _either(
    context: CheckContext,
    in_prepared: Callable[[CheckContext], Iterator[Found]],
    in_pair: Callable[[CheckContext], Iterator[Found]],
    step: str,
) -> Iterator[Found]:
    """What is found in a graph with observers, or in a pair; neither exists before this step."""
    if context.given == "prepared":
        return in_prepared(context)
    if context.given == "pair":
        return in_pair(context)
    raise DoesNotApplyError(f"before {step}: give a graph with observers, or a pair")


@rule(
    severity="error",
    title="observers that never saw a value",
    why="Such an observer gives the scale 1.0 and the zero point 0 with no more than a warning: values below 0.5 "
    "become 0, and values beyond the integers are clamped.",
    fix="run batches through the prepared graph that reach these ops, all branches included, before convert_pt2e; "
    "pt2qa.quantize does it and raises where one is missed",
)
def never_calibrated(context: CheckContext) -> Iterator[Found]:
    """Observers of a prepared graph that saw no value; in a pair made elsewhere, scales that such observers yield."""
    return _either(context, _uncalibrated_observers, _uncalibrated_sites, "prepare")


def _uncalibrated_observers(context: CheckContext) -> Iterator[Found]:
    observers = observed(context.prepared)
    if not observers:
        raise DoesNotApplyError("to graphs whose observers keep no range")
    missed = [observer for observer in observers if not observer.saw]
    if len(missed) == len(observers):
        yield Found("", f"none of the {len(observers)} observers saw a value: no batch was run through this graph")
        return
    for observer in missed:
        yield Found(context.name_of(observer.source), "its observer saw no value, and gets the scale 1.0")


def _uncalibrated_sites(context: CheckContext) -> Iterator[Found]:
    if context.pair.recipe is not None:
        return  # pt2qa.quantize raises where an observer saw nothing
    static = [site for site in context.pair.sites if site.kind == "activation" and isinstance(site.params.scale, float)]
    if not static:
        raise DoesNotApplyError("to models whose scales are chosen from each batch")
    # What torchao's observers return if they never saw a value.
    suspects = [site for site in static if (site.params.scale, site.params.zero_point) == (1.0, 0)]
    if suspects and len(suspects) == len(static):
        yield Found(
            "", f"all {len(static)} activations have the scale 1.0 and the zero point 0: nothing was calibrated"
        )
        return
    used = {row.name for row in given_rows(context) if row.range_use > 0.5}
    for site in suspects:
        if site.name not in used:
            why = "its scale is 1.0 and its zero point 0, as of an observer that saw no value"
            unless = "; right for whole numbers alone" if site.op == "input" else ""
            yield Found(site.name, why + unless, "warning")


LARGEST_ACTIVATION = 1e9
"""No activation of a network is so large, and every mask that is given as an input is."""


@rule(
    severity="error",
    title="infinity, NaN or a mask value where values are rounded",
    why="A mask of -3.4e38 takes the whole range, so that the values beside it round to nothing; an infinite one is "
    "dropped by the observer and clamped to the smallest value it saw, so that what was masked takes part again.",
    fix="keep the op that adds the mask in float: "
    'pt2qa.quantize(..., overrides=pt2qa.OverridePlan((pt2qa.Edit("float", (name,)),))); '
    "or mask with a number a little below the smallest score, -30 say, instead",
)
def nonfinite_observed(context: CheckContext) -> Iterator[Found]:
    """Observers, or sites of a pair, that such a value reaches: from constants, ops or the data."""
    return _either(context, _nonfinite_observers, _nonfinite_sites, "calibration")


def _nonfinite_observers(context: CheckContext) -> Iterator[Found]:
    masks = masks_in(context.prepared)
    for observer in observed(context.prepared):
        mask = masks.get(observer.source)
        why = _observed(context, observer, mask) if observer.saw else ""
        if why:
            yield Found(context.name_of(observer.source), why, value=math.inf if mask is None else mask.severity)


def _observed(context: CheckContext, observer: Observed, mask: Mask | None) -> str:
    low, high = float(observer.low.min()), float(observer.high.max())
    reach = max(abs(low), abs(high))
    if mask is not None and not math.isfinite(mask.value):
        return _nonfinite(context, mask)
    if not math.isfinite(reach):
        return f"its observer saw values from {low:.3g} to {high:.3g}"
    if reach >= LARGEST_ACTIVATION or (mask is not None and reach >= abs(mask.value) / 2):
        return _immense(context, (high - low) / (observer.integers - 1), mask)
    return ""


def _nonfinite_sites(context: CheckContext) -> Iterator[Found]:
    masks = {handle_of(node): mask for node, mask in masks_in(context.pair.reference).items() if node.op != "get_attr"}
    rows = {row.name: row for row in given_rows(context)}
    constants = {constant.slot: constant for constant in context.pair.program.constants}
    for site in context.pair.sites:
        if site.kind != "activation" or not isinstance(site.params.scale, float):
            continue
        constant, row = constants.get(site.source), rows.get(site.name)
        if constant is not None and isinstance(constant.reference, torch.Tensor):
            nonfinite = not bool(constant.reference.isfinite().all())
            yield from _at_site(context, constant.attribute or site.name, site.params, None, nonfinite)
        else:
            nonfinite = row is not None and row.nonfinite
            yield from _at_site(context, site.name, site.params, masks.get(site.handle), nonfinite)


def _at_site(
    context: CheckContext, name: str, params: QuantParams, mask: Mask | None, nonfinite: bool
) -> Iterator[Found]:
    low, high = limits(params)
    reach = max(abs(low), abs(high))
    if mask is not None and not math.isfinite(mask.value):
        becomes = "" if math.isnan(mask.value) else f": it becomes {low if mask.value < 0 else high:.3g}"
        yield Found(name, _nonfinite(context, mask) + becomes, value=math.inf)
    elif nonfinite:
        why = "infinite or NaN values reach it, which no integer can hold"
        yield Found(name, why, fix="look for NaN and infinity in the weights and in the data", value=math.inf)
    elif reach >= LARGEST_ACTIVATION or (mask is not None and reach >= abs(mask.value) / 2):
        yield Found(name, _immense(context, params.largest_scale, mask), value=reach)
    elif mask is not None:
        why = f"{mask.value:.3g} from {context.name_of(mask.origin)} is clamped to {low:.3g}"
        yield Found(name, why, "warning", value=0.0)


def _nonfinite(context: CheckContext, mask: Mask) -> str:
    return f"{mask.value} from {context.name_of(mask.origin)} reaches it, which no integer can hold"


def _immense(context: CheckContext, scale: float, mask: Mask | None) -> str:
    cause = "" if mask is None else f", for {mask.value:.3g} from {context.name_of(mask.origin)}"
    return f"one step is {scale:.3g}{cause}: every other value becomes 0"


OBSERVER_EPS = (2.0**-12, float(torch.finfo(torch.float32).eps))
"""``eps`` of observers, below which no scale gets: XNNPACK's and x86's quantizers set the first, torchao's default is
the second."""

FEWEST_STEPS = 8
"""A channel whose largest weight is fewer steps has lost four of its eight bits, and is below 24 dB."""


@rule(
    severity="warning",
    title="scales that do not fit any value",
    why="An observer that saw nothing but zeros gives the smallest scale it may, its eps; every other value is then "
    "clamped. Where small values meet an eps that is large for them, they get few integers.",
    fix="calibrate on data that reaches the op; where its values are so small, give the observer a smaller eps, and "
    "where they are always zero, leave it out of the model",
)
def degenerate_scale(context: CheckContext) -> Iterator[Found]:
    """Observers that saw nothing but zeros; in a pair, scales that no data can produce."""
    return _either(context, _zero_observers, _degenerate_sites, "calibration")


def _zero_observers(context: CheckContext) -> Iterator[Found]:
    for observer in observed(context.prepared):
        zeros = int(((observer.low == 0) & (observer.high == 0)).sum())
        if observer.saw and zeros == observer.low.numel() and not observer.is_constant:
            yield Found(context.name_of(observer.source), "calibration saw nothing but zeros here")
        elif zeros and observer.is_constant:
            yield Found(context.name_of(observer.source), _empty(zeros, observer.low.numel()), "note", _EMPTY_FIX)


def _degenerate_sites(context: CheckContext) -> Iterator[Found]:
    for site in context.pair.sites:
        scales = torch.as_tensor(site.params.scale if site.params.scale is not None else 1.0).double()
        wrong = scales[~(scales.isfinite() & (scales > 0))]
        if wrong.numel():
            what = f"the scale of its {site.kind} is {float(wrong[0])}"
            yield Found(site.name, what, "error", "look for infinite or NaN values in the calibration data or weights")
        elif site.kind == "activation" and any(abs(float(scales.max()) / floor - 1) < 1e-6 for floor in OBSERVER_EPS):
            yield Found(site.name, _floored(site))
    for product in context.integer_products:
        yield from _weights(product)


def _floored(site: Site) -> str:
    low, high = limits(site.params)
    return (
        f"its scale {site.params.largest_scale:.3g} is the smallest that an observer gives: calibration saw zeros, or "
        f"values in less than the {high - low:.2g} that it spans"
    )


def _weights(product: IntegerProduct) -> Iterator[Found]:
    largest, scales, channels = product.largest, product.scales, len(product.scales)
    empty = int((largest == 0).sum())
    if empty:
        yield Found(product.name, _empty(empty, channels), "note", _EMPTY_FIX)
    if product.weight_params.axis is None:
        return  # the rule channel-range looks at weights with one scale
    span = (product.weight_params.quant_max - product.weight_params.quant_min) / 2
    held = (scales * span > 1.01 * largest) & (largest < FEWEST_STEPS * scales) & (largest > 0)
    held &= ~product.zero
    if bool(held.any()):
        held &= product.visible
    if float(held.sum()) / channels > FEW_CHANNELS:
        # By share, so that the layer that loses most comes first.
        yield Found(
            product.name,
            f"{int(held.sum())} of {channels} channels of its weight have the smallest scale that the observer gives, "
            f"{float(scales[held].max()):.3g}, and fewer than {FEWEST_STEPS} steps on each side",
            fix='give the weight observer a smaller eps, or keep the layer in float: pt2qa.Edit("float", (name,))',
            value=float(held.sum()) / channels,
        )


def _empty(empty: int, channels: int) -> str:
    return f"{empty} of {channels} channels of its weight are zero in float" if channels > 1 else "its weight is zero"


_EMPTY_FIX = "prune them, if the training did not mean to"
