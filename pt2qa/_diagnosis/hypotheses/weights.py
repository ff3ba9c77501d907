"""Weights that are rounded more coarsely than kernels need."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._diagnosis.case import Case, Hypothesis, weight_axis
from pt2qa._diagnosis.hypotheses.sites import has_unused_levels, is_floored, with_own_scales
from pt2qa._report.prose import counted, number
from pt2qa._sensitivity.roundings import fitted_weight, rounding
from pt2qa._simulator.program import Site
from pt2qa._trials.treatment import Substitute, Treatment
from pt2qa._weights.sums import weight_sums

COARSE = 4.0
"""How many times the squared error of int8 weights per output channel is too much: half the integer steps are lost."""

CHANGED_STEPS = 1.5
"""How far, in integer steps, a weight may be from its float value unless it is clamped: rounding moves it by half."""


def coarse(case: Case) -> Iterator[Hypothesis]:
    groups: dict[str, list[int]] = {}
    for index in case.ranked(filter(functools.partial(_is_coarse, case), case.fitted_weights), case.excess):
        groups.setdefault("per-tensor-weights" if _per_tensor(case, index) else "weight-scheme", []).append(index)
    for cause, sites in groups.items():
        site = case.pair.sites[sites[0]]
        found = Hypothesis(
            cause=cause,
            name=site.name,
            others=case.names(sites),
            evidence=f"{counted(len(sites), 'weight')}, here {_scheme(site)}, with "
            f"{number(case.noise(site.index) / max(case.noise(site.index, 'fitted'), 1e-300))} times the noise of int8 "
            f"per output channel (error budget); {_spread(case, site)}",
            remedy="annotate these weights as int8, symmetric, -127..127, one scale per output channel",
            treatment=case.played(case.fitted_weights, sites),
        )
        if cause == "per-tensor-weights" and case.options.get("per_channel") is False:
            option = Treatment(options=(("per_channel", True),))
            yield replace(found, remedy="quantize with per_channel=true", treatment=option)
        else:
            yield with_own_scales(case, found, sites)


def _is_coarse(case: Case, index: int) -> bool:
    """Whether a weight's rounding error is far larger than it need be, and neither another weight nor eps is why."""
    constant = case.constants[index]
    site = case.pair.sites[index]
    if is_floored(case, site):
        return False
    own, fitted = (
        weight_sums(constant.reference, value, None).total.noise
        for value in (constant.by_rows, case.fitted_weights[index].value(constant.reference))
    )
    if own <= COARSE * fitted and not has_unused_levels(case, site):
        return False
    return _steps_apart(site, constant.reference, constant.quantized) <= CHANGED_STEPS


def changed(case: Case) -> dict[int, float]:
    """Weights that are not the float model's, rounded: by site, how many integer steps they are apart."""
    found = {}
    for site in case.pair.sites:
        constant = case.constant(site)
        if constant is not None and site.index in case.fitted_weights and site.params.scale is not None:
            steps = _steps_apart(site, constant.reference, constant.quantized)
            if steps > CHANGED_STEPS:
                found[site.index] = steps
    return found


def biases(case: Case) -> Iterator[Hypothesis]:
    few = [site.index for site in case.pair.sites if site.kind == "bias" and site.params.dtype in NARROW]
    if few:
        site = case.pair.sites[max(few, key=case.noise)]
        yield Hypothesis(
            cause="weight-scheme",
            name=site.name,
            others=case.names(few),
            evidence=f"{counted(len(few), 'bias', 'biases')} quantized to {site.params.dtype} with scale "
            f"{number(site.params.largest_scale)}",
            remedy="keep biases in float, or int32 with a derived scale: scale of the input times scale of the weight",
            treatment=Treatment(exact=frozenset(case.places[index] for index in few)),
            sentence="biases are quantized more coarsely than the accumulators that they are added to",
        )


NARROW = ("int8", "uint8", "int16")
"""Integer types that hold no sum of products."""


def unread(case: Case) -> Iterator[Hypothesis]:
    """Weights of input channels that are always zero, which take the range from those that count."""
    for site in case.static_sites:
        channels = case.ranges[site.index].channels
        if channels is None:
            continue
        size = channels[1].abs().maximum(channels[0].abs())
        silent = size <= SILENT * size.max()
        if not silent.any() or silent.all():
            continue
        for weight in case.pair.sites:
            constant = case.constant(weight)
            if weight.kind != "weight" or constant is None or weight.name not in site.readers:
                continue
            value = constant.reference
            if weight_axis(constant) != 0 or value.shape[1] != len(size):
                continue
            others = [axis for axis in range(value.dim()) if axis != 1]
            largest = value.abs().amax(others)
            if largest[silent].max() > UNEQUAL * largest[~silent].max() and weight.index in case.fitted_weights:
                yield _without_unread(case, weight, silent, largest)


SILENT = 1e-4
"""Share of the largest channel's values below which a channel counts for nothing."""

UNEQUAL = 4.0
"""How many times larger than the others weights of such a channel must be to matter: two bits."""


def _without_unread(case: Case, site: Site, silent: Tensor, largest: Tensor) -> Hypothesis:
    constant = case.constants[site.index]
    assert isinstance(constant.reference, Tensor), "unread looks only at weights with a float value"
    params = fitted_weight(_zeroed(constant.reference, silent), 0)
    return Hypothesis(
        cause="outlier-channel",
        name=site.name,
        evidence=f"{counted(int(silent.sum()), 'input channel is', 'input channels are')} always zero, and the weights "
        f"there reach {number(float(largest[silent].max()))}, all others {number(float(largest[~silent].max()))}",
        remedy="set these weights to 0 in the model: weight[:, channels] = 0",
        treatment=case.played({site.index: Substitute(lambda weight: rounding(params)(_zeroed(weight, silent)))}),
        sentence="huge weights of channels that are always zero dominate the range",
    )


def _zeroed(weight: Tensor, channels: Tensor) -> Tensor:
    zeroed = weight.clone()
    zeroed[:, channels] = 0
    return zeroed


def _steps_apart(site: Site, reference: Tensor, quantized: Tensor) -> float:
    """The largest distance in integer steps of an unclamped weight from its float value; 0 if due to rounding."""
    params = site.params
    assert params.scale is not None, "weights have fixed scales"
    assert params.zero_point is not None, "as above"
    scale, zero = params.along(reference)
    apart = (quantized - reference).abs_().div_(scale)
    if not apart.numel() or apart.amax() <= CHANGED_STEPS:  # then clamped weights are not apart either
        return 0.0
    low, high = (params.quant_min - zero) * scale, (params.quant_max - zero) * scale
    return float(torch.where((reference >= low) & (reference <= high), apart, 0.0).amax())


def _per_tensor(case: Case, index: int) -> bool:
    constant = case.constants[index]
    params = case.pair.sites[index].params
    return params.axis is None and not params.block and weight_axis(constant) is not None


def _scheme(site: Site) -> str:
    params = site.params
    where = "per tensor" if params.axis is None else f"per channel of axis {params.axis}"
    where = f"in blocks of {'x'.join(map(str, params.block))}" if params.block else where
    return f"{params.dtype} {params.quant_min}..{params.quant_max} {where}"


def _spread(case: Case, site: Site) -> str:
    constant = case.constants[site.index]
    axis = weight_axis(constant)
    if axis is None:
        return "it has no channels"
    others = [each for each in range(constant.reference.dim()) if each != axis]
    largest = constant.reference.abs().amax(others)
    noise = (constant.reference - constant.quantized).double().square().sum()
    sqnr = decibels(float(constant.reference.double().square().sum()), float(noise))
    return (
        f"its channels reach {number(float(largest.min()))} to {number(float(largest.max()))}, channel "
        f"{int(largest.argmax())} most, and its SQNR is {number(sqnr)} dB"
    )
