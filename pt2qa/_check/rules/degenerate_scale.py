"""Scales that say nothing about the values: zero, infinite, or the smallest that an observer gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pt2qa._check.context import CheckContext
from pt2qa._check.integer_products import FEW_CHANNELS, IntegerProduct, limits
from pt2qa._check.observers import observed
from pt2qa._simulator.program import Site
from pt2qa.plugins import DoesNotApplyError, Found, Rule

OBSERVER_EPS = (2.0**-12, float(torch.finfo(torch.float32).eps))
"""``eps`` of observers, below which no scale gets: XNNPACK's and x86's quantizers set the first, torchao's default is
the second."""

FEWEST_STEPS = 8
"""A channel whose largest weight is fewer steps has lost four of its eight bits, and is below 24 dB."""


def find(context: CheckContext) -> Iterator[Found]:
    """Observers that saw nothing but zeros; in a pair, scales that no data can have asked for."""
    if context.given == "prepared":
        return _in_prepared(context)
    if context.given == "pair":
        return _in_pair(context)
    raise DoesNotApplyError("before calibration: give a graph with observers, or a pair")


def _in_prepared(context: CheckContext) -> Iterator[Found]:
    for observer in observed(context.prepared):
        zeros = int(((observer.low == 0) & (observer.high == 0)).sum())
        if observer.saw and zeros == observer.low.numel() and not observer.is_constant:
            yield Found(context.name_of(observer.source), "calibration saw nothing but zeros here")
        elif zeros and observer.is_constant:
            yield Found(context.name_of(observer.source), _empty(zeros, observer.low.numel()), "note", _EMPTY_FIX)


def _in_pair(context: CheckContext) -> Iterator[Found]:
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
    held &= product.visible & (product.integers.flatten(1) != 0).any(1)
    if float(held.sum()) / channels > FEW_CHANNELS:
        # By share, so that the layer which loses most comes first.
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

RULE = Rule(
    id="degenerate-scale",
    severity="warning",
    title="scales that do not fit any value",
    why="An observer that saw nothing but zeros gives the smallest scale it may, its eps; every other value is then "
    "clamped. Where small values meet an eps that is large for them, they get few integers.",
    fix="calibrate on data that reaches the op; where its values are so small, give the observer a smaller eps, and "
    "where they are always zero, leave it out of the model",
    find=find,
)
