"""What calibration saw: nothing, zeros, infinities; and mask values, by which softmax ignores a position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext, require
from pt2qa._check.products import FEW_CHANNELS, IntegerProduct
from pt2qa._check.rules.sites import given_rows
from pt2qa._graph.handles import attribute_of, handle_of, op_of
from pt2qa._graph.internals.torchao import range_keeper
from pt2qa._quantize.calibration import find_observers
from pt2qa._simulator.accumulate import limits
from pt2qa.plugins import Found
from pt2qa.plugins.rules import rule

SMALLEST_MASK = -1e4
"""Masks hold -1e4 (BERT), -65504 and -3.4e38 (the smallest float16 and float32), or -inf; scores stay far above."""

_FILLING = frozenset(
    {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill", "where", "mul", "pad", "constant_pad_nd"}
)
"""Ops whose scalars become values of their result; a mask of zeros and ones is multiplied with the number."""

_PASSING_ON = frozenset(
    {"add", "sub", "where", "masked_fill", "expand", "view", "reshape", "permute", "transpose", "slice", "select"}
    | {"unsqueeze", "squeeze", "to", "_to_copy", "clone", "contiguous", "cat", "triu", "tril", "repeat", "index"}
    | {"broadcast_to", "lift_fresh_copy", "detach", "alias", "copy", "slice_scatter", "minimum", "_unsafe_view"}
)
"""Ops whose result holds what they read."""


class Mask(NamedTuple):
    """A mask value and the node that puts it in."""

    value: float
    origin: Node

    @property
    def severity(self) -> float:
        """Larger is worse."""
        return -self.value if math.isfinite(self.value) else math.inf


def masks_in(graph_module: GraphModule) -> dict[Node, Mask]:
    """The nodes of a float graph whose value may hold a mask value, with the largest; masks in inputs are unknown."""
    found: dict[Node, Mask] = {}
    for node in graph_module.graph.nodes:
        # A module of a prepared graph is an observer, which returns what it sees.
        passes_on = node.op == "call_module" or (node.op == "call_function" and op_of(node.target) in _PASSING_ON)
        held = [found[source] for source in node.all_input_nodes if source in found] if passes_on else []
        held += [Mask(value, node) for value in _own(node, graph_module) if is_mask(value)]
        if held:
            found[node] = max(held, key=lambda mask: mask.severity)
    return found


def is_mask(value: float) -> bool:
    """Whether a number means "leave this out" rather than a measurement."""
    return not math.isfinite(value) or value <= SMALLEST_MASK


def _own(node: Node, graph_module: GraphModule) -> Iterable[float]:
    """The extreme values of a constant, or the numbers that an op puts in."""
    if node.op == "get_attr":
        value = attribute_of(graph_module, node)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return []
        return [float(end) for end in value.detach().aminmax()]
    if node.op != "call_function" or op_of(node.target) not in _FILLING:
        return []
    arguments = (*node.args, *node.kwargs.values())
    return [float(part) for part in arguments if isinstance(part, (int, float)) and not isinstance(part, bool)]


class Observed(NamedTuple):
    """The range of one observer, at one of its places.

    ``low`` and ``high`` are the smallest and largest value of each channel, float64 of shape (channels,), one if it
    observes no channels; empty if it never saw a value.  ``integers`` is how many integers cover the range.
    """

    source: Node
    low: Tensor
    high: Tensor
    integers: int


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
    require(context.given in ("prepared", "pair"), f"before {step}: pass a graph with observers, or a pair")
    return (in_prepared if context.given == "prepared" else in_pair)(context)


@rule(
    severity="error",
    title="observers that never saw a value",
    why="convert_pt2e gives such an observer the scale 1.0 and the zero point 0, with no more than a warning: values "
    "below 0.5 become 0, and values beyond the integers are clamped.",
    fix="before convert_pt2e, run batches through the prepared graph that reach these ops, in all branches; "
    "pt2qa.quantize does it, and raises if an observer saw no value",
)
def never_calibrated(context: CheckContext) -> Iterator[Found]:
    return _either(context, _uncalibrated_observers, _uncalibrated_sites, "prepare")


def _uncalibrated_observers(context: CheckContext) -> Iterator[Found]:
    observers = require(observed(context.prepared), "to graphs whose observers keep no range")
    missed = [observer for observer in observers if not len(observer.low)]
    if len(missed) == len(observers):
        yield Found("", f"none of the {len(observers)} observers saw a value: no batch was run through this graph")
        return
    for observer in missed:
        yield Found(context.name_of(observer.source), "its observer saw no value, and gets the scale 1.0")


def _uncalibrated_sites(context: CheckContext) -> Iterator[Found]:
    if context.pair.recipe is not None:
        return  # pt2qa.quantize raises where an observer saw nothing
    static = [site for site in context.pair.sites if site.kind == "activation" and isinstance(site.params.scale, float)]
    require(static, "to models in which each batch sets the scales")
    # What torchao's observers return if they never saw a value.
    suspects = [site for site in static if (site.params.scale, site.params.zero_point) == (1.0, 0)]
    if suspects and len(suspects) == len(static):
        why = f"all {len(static)} activations have the scale 1.0 and the zero point 0: nothing was calibrated"
        yield Found("", why)
        return
    used = {row.name for row in given_rows(context) if row.range_use > 0.5}
    for site in suspects:
        if site.name not in used:
            why = "its scale is 1.0 and its zero point 0, as from an observer that saw no value"
            unless = "; correct for whole numbers only" if site.op == "input" else ""
            yield Found(site.name, why + unless, "warning")


@rule(
    severity="error",
    title="infinity, NaN or a mask value among rounded values",
    why="A mask of -3.4e38 takes the whole range, so all other values round to 0. An infinite mask is ignored by the "
    "observer and clamped to the smallest value that it saw, so masked positions count again.",
    fix="keep the op, or of a mask the op that adds it, in float: pt2qa.quantize(..., "
    'overrides=pt2qa.OverridePlan((pt2qa.Edit("float", (name,)),))); or mask with a number a little below the smallest '
    "score, such as -30",
)
def nonfinite_observed(context: CheckContext) -> Iterator[Found]:
    return _either(context, _nonfinite_observers, _nonfinite_sites, "calibration")


def _nonfinite_observers(context: CheckContext) -> Iterator[Found]:
    masks = masks_in(context.prepared)
    for observer in observed(context.prepared):
        if not len(observer.low):
            continue
        mask, low, high = masks.get(observer.source), float(observer.low.min()), float(observer.high.max())
        why = _out_of_scale(context, mask, low, high, (high - low) / (observer.integers - 1))
        if not math.isfinite(low) or not math.isfinite(high):
            why = why if _is_infinite(mask) else f"its observer saw values from {low:.3g} to {high:.3g}"
        if why:
            yield Found(context.name_of(observer.source), why, value=math.inf if mask is None else mask.severity)


def _nonfinite_sites(context: CheckContext) -> Iterator[Found]:
    masks = {handle_of(node): mask for node, mask in masks_in(context.pair.reference).items() if node.op != "get_attr"}
    rows = {row.name: row for row in given_rows(context)}
    constants = {constant.slot: constant for constant in context.pair.program.constants}
    for site in context.pair.sites:
        if site.kind != "activation" or not isinstance(site.params.scale, float):
            continue
        name, mask, row = site.name, masks.get(site.handle), rows.get(site.name)
        constant, nonfinite = constants.get(site.source), row is not None and row.nonfinite
        if constant is not None and isinstance(constant.reference, Tensor):
            name, mask = constant.attribute or name, None
            nonfinite = not bool(constant.reference.isfinite().all())
        low, high = limits(site.params)
        why = _out_of_scale(context, mask, low, high, site.params.largest_scale)
        if mask is not None and _is_infinite(mask):
            becomes = "" if math.isnan(mask.value) else f": it becomes {low if mask.value < 0 else high:.3g}"
            yield Found(name, why + becomes, value=math.inf)
        elif nonfinite:
            why = "infinite or NaN values reach it, which integers cannot represent"
            yield Found(name, why, fix="look for NaN and infinity in the weights and in the data", value=math.inf)
        elif why:
            yield Found(name, why, value=max(abs(low), abs(high)))
        elif mask is not None:
            why = f"{mask.value:.3g} from {context.name_of(mask.origin)} is clamped to {low:.3g}"
            yield Found(name, why, "warning", value=0.0)


def _is_infinite(mask: Mask | None) -> bool:
    return mask is not None and not math.isfinite(mask.value)


def _out_of_scale(context: CheckContext, mask: Mask | None, low: float, high: float, step: float) -> str:
    """Why a range is useless: an infinite mask, or values so large that all others round to 0; empty if it is not."""
    origin = "" if mask is None else f"{mask.value:.3g} from {context.name_of(mask.origin)}"
    if _is_infinite(mask):
        return f"{origin} reaches it, which integers cannot represent"
    reach = max(abs(low), abs(high))
    # No activation of a network is so large, and every mask that is given as an input is.
    if reach >= 1e9 or (mask is not None and reach >= abs(mask.value) / 2):
        return f"one step is {step:.3g}{f', for {origin}' if origin else ''}: every other value becomes 0"
    return ""


FEWEST_STEPS = 8
"""A channel whose largest weight is fewer steps has lost four of its eight bits, and is below 24 dB."""


@rule(
    severity="warning",
    title="scales that fit no values",
    why="An observer that saw only zeros gives its smallest scale, eps, and clamps every other value. Values that are "
    "small compared to eps get few integers.",
    fix="calibrate on data that reaches the op; if its values are this small, give the observer a smaller eps; if they "
    "are always zero, remove it from the model",
)
def degenerate_scale(context: CheckContext) -> Iterator[Found]:
    return _either(context, _zero_observers, _degenerate_sites, "calibration")


def _zero_observers(context: CheckContext) -> Iterator[Found]:
    for observer in observed(context.prepared):
        zeros, channels = int(((observer.low == 0) & (observer.high == 0)).sum()), len(observer.low)
        name, constant = context.name_of(observer.source), observer.source.op == "get_attr"
        if zeros and constant:
            yield _zero_weights(name, zeros, channels)
        elif zeros and zeros == channels:
            yield Found(name, "calibration saw only zeros here")


def _degenerate_sites(context: CheckContext) -> Iterator[Found]:
    # ``eps`` of observers, the smallest scale: XNNPACK's and x86's quantizers set the first, torchao's is the second.
    floors = (2.0**-12, float(torch.finfo(torch.float32).eps))
    for site in context.pair.sites:
        scales = torch.as_tensor(site.params.scale if site.params.scale is not None else 1.0).double()
        wrong = scales[~(scales.isfinite() & (scales > 0))]
        if wrong.numel():
            what = f"the scale of its {site.kind} is {float(wrong[0])}"
            yield Found(site.name, what, "error", "look for infinite or NaN values in the calibration data or weights")
        elif site.kind == "activation" and any(abs(float(scales.max()) / floor - 1) < 1e-6 for floor in floors):
            low, high = limits(site.params)
            why = f"its scale {site.params.largest_scale:.3g} is the smallest that an observer gives: calibration saw "
            yield Found(site.name, f"{why}zeros, or values in less than the {high - low:.2g} that it spans")
    for product in context.integer_products:
        yield from _weights(product)


def _weights(product: IntegerProduct) -> Iterator[Found]:
    largest, scales, channels = product.largest, product.scales, len(product.scales)
    if zeros := int((largest == 0).sum()):
        yield _zero_weights(product.name, zeros, channels)
    if product.weight_params.axis is None:
        return  # the rule channel-range looks at weights with one scale
    span = (product.weight_params.quant_max - product.weight_params.quant_min) / 2
    held = (scales * span > 1.01 * largest) & (largest < FEWEST_STEPS * scales) & (largest > 0)
    held &= ~product.zero
    if bool(held.any()):
        held &= product.visible
    share = float(held.sum()) / channels
    if share > FEW_CHANNELS:
        why = (
            f"{int(held.sum())} of {channels} channels of its weight have the smallest scale that the observer gives, "
        )
        why += f"{float(scales[held].max()):.3g}, and fewer than {FEWEST_STEPS} steps on each side"
        fix = 'give the weight observer a smaller eps, or keep the layer in float: pt2qa.Edit("float", (name,))'
        # By share, so that the layer that loses most comes first.
        yield Found(product.name, why, fix=fix, value=share)


def _zero_weights(name: str, zeros: int, channels: int) -> Found:
    why = f"{zeros} of {channels} channels of its weight are zero in float" if channels > 1 else "its weight is zero"
    return Found(name, why, "note", "prune them, unless training intended them")
