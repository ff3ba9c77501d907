"""Single activations whose parameters do not fit: masks, outlier channels, shared or fixed scales, too few integers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._check.rules.calibration import is_mask
from pt2qa._check.rules.specs import VALUE_PRESERVING
from pt2qa._diagnosis.case import OUTLIER, Case, Hypothesis
from pt2qa._diagnosis.worth import error
from pt2qa._report.prose import counted, few, number, share
from pt2qa._sensitivity.ranges import use_of
from pt2qa._sensitivity.roundings import INTEGERS, fitted
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.program import Site
from pt2qa._trials.treatment import Treatment, with_params
from pt2qa.errors import PluginError, QuantizeError, SelectionError
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import OUTPUT

UNFIT = 2.5
"""How many times the noise of a fitted range a site must make: one observer's choice against another's is less."""

AS_SHOWN = 0.7
"""How near, as a share, a site's range must be to the one that calibration showed it to follow from that."""

NOTABLE = 0.2
"""The share of all noise from which on a site is looked at by itself."""


def masked(case: Case) -> Iterator[Hypothesis]:
    """Mask values that are rounded; one hypothesis for all, since one masked score is enough to lose a softmax."""
    masks = [site for site in case.static_sites if is_mask(_lowest(case, site))]
    if not masks:
        return
    treatment, edits, cost = Treatment(), list[str](), 0.0
    for site in masks:
        if not _is_freed(case, site, treatment):
            own, edit, more = in_float(case, site)
            treatment, cost = treatment.then(own), cost + more
            edits.append(edit)
    first = next((site for site in masks if site.index not in case.constants), masks[0])
    yield Hypothesis(
        cause="masked-values",
        name=first.name,
        others=case.names([site.index for site in masks]),
        evidence=f"values down to {number(_lowest(case, first))} give a scale of {number(first.params.largest_scale)}, "
        "which leaves few integer values for ordinary scores",
        remedy="use a mask value that is only a little below the scores, such as -30, or keep the ops in "
        f"float{''.join(dict.fromkeys(edits))}",
        treatment=treatment,
        cost=cost,
    )


def _lowest(case: Case, site: Site) -> float:
    constant = case.constants.get(site.index)
    return case.ranges[site.index].whole[0] if constant is None else float(constant.reference.min())


def _is_freed(case: Case, site: Site, treatment: Treatment) -> bool:
    annotations = case.annotations
    if annotations is None or not treatment.floats:
        return case.places[site.index] in treatment.exact
    return site.index not in annotations.with_edits(treatment.floats).sites_on(case.pair.sites)


def floored(case: Case) -> Iterator[Hypothesis]:
    """Sites whose scale is the smallest that an observer gives, where their values need a smaller one."""
    instead = {**case.fitted, **case.fitted_weights}
    low = [site.index for site in case.pair.sites if site.index in instead and is_floored(case, site)]
    if low:
        site = case.pair.sites[max(low, key=case.noise)]
        found = Hypothesis(
            cause="observer",
            name=site.name,
            others=case.names(low),
            evidence=f"the scale of {counted(len(low), 'site')} is {number(site.params.largest_scale)}, the observer's "
            "eps, and the values need a smaller one",
            remedy="configure these observers with a smaller eps, such as observer.with_args(eps=1e-9)",
            treatment=case.played(instead, low),
            audited=True,
            sentence="the observer's smallest scale, its eps, is too large for the values",
        )
        yield with_own_scales(case, found, low)


FLOORS = (2.0**-12, float(torch.finfo(torch.float32).eps))
"""The smallest scales of torchao's observers: as quantizers configure them, and by default."""


def _is_at_floor(scale: float | Tensor) -> bool:
    scales = torch.as_tensor(scale).cpu().double().flatten()
    at_floor = sum((scales / floor - 1).abs() < 1e-6 for floor in FLOORS)
    return float(torch.as_tensor(at_floor).double().mean()) > 0.5


def is_floored(case: Case, site: Site) -> bool:
    """Whether a scale is the smallest that an observer gives, and costs at least a bit."""
    return site.params.scale is not None and _is_at_floor(site.params.scale) and _needs_less(case, site.index)


def _needs_less(case: Case, index: int) -> bool:
    """Whether the values of a site and zero span less than half of its integers; a weight's, on both sides of it."""
    site, constant = case.pair.sites[index], case.constants.get(index)
    ends = case.ranges[index].whole if constant is None else (most := float(constant.reference.abs().max()), -most)
    return 0 < max(*ends, 0) - min(*ends, 0) < site.params.largest_scale * _steps(site) / 2


def unused_levels(case: Case) -> Iterator[Hypothesis]:
    """Activations whose spec leaves out integers of the dtype; with all of them, the same range has smaller steps.

    Seven bits are no mistake where the quantizer's options ask for them: 16-bit accumulators saturate otherwise.
    """
    sites = [s for s in case.static_sites if has_unused_levels(case, s) and isinstance(s.params.scale, float)]
    if sites:
        site = sites[0]
        whole = {each.index: with_params(fitted(*limits(each.params), *INTEGERS[each.params.dtype])) for each in sites}
        found = Hypothesis(
            cause="activation-scheme",
            name=site.name,
            others=case.names([*whole]),
            evidence=f"{counted(len(sites), 'site')} with a reduced integer range; here {site.params.dtype} "
            f"{site.params.quant_min}..{site.params.quant_max}",
            remedy="annotate the full range of the dtype (quant_min, quant_max)",
            treatment=case.played(whole),
            audited=True,
        )
        yield with_own_scales(case, found, list(whole))


def one_sided(case: Case) -> Iterator[Hypothesis]:
    """Activations of one sign whose zero is in the middle of the integers, as with a symmetric spec: half serve."""
    sites = [site.index for site in case.static_sites if _is_half_used(case, site)]
    if sites:
        site = case.pair.sites[max(sites, key=case.excess)]
        low, high = case.ranges[site.index].whole
        found = Hypothesis(
            cause="activation-scheme",
            name=site.name,
            others=case.names(sites),
            evidence=f"{counted(len(sites), 'site')} with values of one sign and the zero point in the middle; here "
            f"{site.params.zero_point} of {site.params.quant_min}..{site.params.quant_max}, values {number(low)} to "
            f"{number(high)}",
            remedy="annotate an affine scheme (torch.per_tensor_affine)",
            treatment=case.played(case.fitted, sites),
            audited=True,
            sentence="activations of one sign are quantized symmetrically, so half of the integers are unused",
        )
        yield with_own_scales(case, found, sites)


def _is_half_used(case: Case, site: Site) -> bool:
    params = site.params
    if not isinstance(params.zero_point, int) or site.index not in case.fitted or _steps(site) < 2:
        return False
    low, high = case.ranges[site.index].whole
    small, large = sorted((max(-low, 0.0), max(high, 0.0)))
    in_the_middle = abs(2 * params.zero_point - params.quant_min - params.quant_max) <= 1
    return in_the_middle and large > 0 and small <= large / _steps(site)


def has_unused_levels(case: Case, site: Site) -> bool:
    """Whether a spec leaves out more integers than the one that a symmetric range has too many."""
    whole = INTEGERS.get(site.params.dtype)
    chosen = case.options.get("reduce_range") is True
    return whole is not None and not chosen and _steps(site) < whole[1] - whole[0] - 1


def unfit(case: Case, *, data_at_fault: bool) -> Iterator[Hypothesis]:
    """Sites whose range does not fit although the calibration data does: shared with other values, or fixed.

    With ``data_at_fault``, calibration is suspected already of what most sites have in common.
    """
    unfit = [
        site.index
        for site in case.static_sites
        if _is_unfit(case, site) and not _is_as_calibrated(case, site) and not is_floored(case, site)
    ]
    worst = case.ranked(unfit, case.excess)
    shared = [site for site in worst if _sharers(case, site) and _is_of_others(case, site)]
    alone = [site for site in worst if site not in shared]
    # What most sites have in common is no fault of a site, unless one has nearly all of the noise.
    most = len(alone) > 1 and 2 * len(set(unfit) - set(shared)) > len(case.static_sites) > 2
    for sites in (shared, alone):
        if not sites or (sites is alone and most and data_at_fault):
            continue
        site = case.pair.sites[sites[0]]
        used, beyond = use_of(site, *case.ranges[site.index].whole)
        cause = "shared-scale" if sites is shared else "site-range"
        if sites is alone and most:
            calibration = "narrow-calibration" if beyond > 0 else "wide-calibration"
            cause = calibration if case.judge.recipe is None else "observer"
        with_them = (
            f", which it shares with {', '.join(_sharers(case, site.index)[:3])}" if cause == "shared-scale" else ""
        )
        places = unfit if sites is alone and most else sites
        how = f"values exceed the range by {share(beyond)} %" if beyond > 0.01 else f"{share(used)} % of the range used"
        found = Hypothesis(
            cause=cause,
            name=site.name,
            others=case.names(sites),
            evidence=f"{how}{with_them} (scale {number(site.params.largest_scale)}, values "
            f"{number(case.ranges[site.index].whole[0])} to {number(case.ranges[site.index].whole[1])})",
            remedy=_HOW[cause],
            treatment=case.played(case.fitted, places),
            share=case.share(case.excess, places),
        )
        yield with_own_scales(case, found, places, apart=True)
        group = _group(case, site.index) if sites is shared else []
        if ops := ops_in_float(case, group):
            floats = Treatment(floats=(Edit("float", ops),))
            # Where scales of their own leave most of the error, 8 bits are too few, and sharing is not at fault.
            apart = replace(found.treatment, exact=frozenset(case.places[each] for each in group if _moves(case, each)))
            if 2 * _removed(case, apart) >= _removed(case, floats):
                remedy = f"keep all that has this scale in float: {', '.join(ops)}"
                yield replace(found, remedy=remedy, treatment=floats, cost=case.costs.macs_of(ops))


def _moves(case: Case, index: int) -> bool:
    """Whether what is rounded there are values of other sites, which keep the ranges that those have."""
    made = case.pair.program.producers.get(case.pair.sites[index].source)
    return made is not None and case.pair.program.steps[made].op in VALUE_PRESERVING


def _removed(case: Case, treatment: Treatment) -> float:
    """The error at the worst output that a treatment takes away, as a share of that output."""
    output, before = case.now.worst
    return error(before) - error(dict(case.judge.outcome(treatment).outputs)[output])


_HOW = {
    "shared-scale": "annotate it with a scale of its own",
    "observer": "annotate another observer: MinMaxObserver covers all values of the calibration data",
    **dict.fromkeys(
        ("narrow-calibration", "wide-calibration"),
        "calibrate the model as it is now, on data like its inputs in use, with the same preprocessing",
    ),
    "site-range": "let calibration choose its range, or fix one that covers its values",
}


def with_own_scales(case: Case, found: Hypothesis, sites: Sequence[int], *, apart: bool = False) -> Hypothesis:
    """Edits that give sites scales over all integers, in place of what is simulated, which is the preview.

    The same where no edit can, or, if the scales must be ``apart``, the ops around make them share their scale.
    """
    before, all_sites = case.annotations, case.pair.sites
    kinds = {kind: [site for site in sites if all_sites[site].kind == kind] for kind in ("activation", "weight")}
    edits = tuple(
        Edit("int8_weight" if kind == "weight" else "int8", case.names(own)) for kind, own in kinds.items() if own
    )
    if before is None:
        return found
    try:
        after = before.with_edits(edits)
    except (PluginError, QuantizeError, SelectionError):
        return found
    points = before.points_at(all_sites)
    shared = [point for site in sites for point in points[site] if len(before.shared[point]) > 1]
    if apart and shared and all(after.shared.get(point) == before.shared[point] for point in shared):
        return found
    text = "; ".join(f"{edit.kind}: {few(edit.ops)}" for edit in edits)
    return replace(found, remedy=f"{found.remedy} ({text})", treatment=Treatment(edits=edits), preview=found.treatment)


def _is_unfit(case: Case, site: Site) -> bool:
    return case.noise(site.index) > UNFIT * case.noise(site.index, "fitted")


def _is_as_calibrated(case: Case, site: Site) -> bool:
    """Whether calibration explains a site's range."""
    shown = case.seen.get(site.index)
    if shown is None:
        return False
    used, beyond = use_of(site, *shown.whole)
    return AS_SHOWN <= used <= 1 / AS_SHOWN and beyond <= 1 - AS_SHOWN


def _is_of_others(case: Case, index: int) -> bool:
    """Whether a range may be that of the values that share it: observers clip less than its width."""
    lows, highs = zip(*(case.ranges[each].whole for each in _group(case, index)), strict=True)
    return use_of(case.pair.sites[index], min(lows), max(highs))[1] <= 1


def twice(case: Case) -> Iterator[Hypothesis]:
    program = case.pair.program
    rounded = {site.result: site for site in case.static_sites}
    again: dict[int, Site] = {}
    for step in program.steps:
        source = step.reads[0] if len(step.reads) == 1 else None
        held = rounded.get(source) if source is not None else None
        if held is None:
            continue
        if step.site is None and step.op in VALUE_PRESERVING:
            rounded.setdefault(step.out, held)
        elif (
            step.site is not None
            and _scales(site := case.pair.sites[step.site]) != _scales(held)
            and not _is_unfit(case, site)
        ):
            again[step.site] = held
    worst = sorted(again, key=case.noise, reverse=True)
    if worst:
        site, before = case.pair.sites[worst[0]], again[worst[0]]
        yield Hypothesis(
            cause="broken-sharing",
            name=site.name,
            others=case.names(worst),
            evidence=f"scale {number(before.params.largest_scale)} at {before.name}, and "
            f"{number(site.params.largest_scale)} here for the same values",
            remedy="share the scale: SharedQuantizationSpec of the input, since the op only moves values",
            treatment=Treatment(exact=frozenset(case.places[index] for index in worst)),
            share=case.share(case.noise, worst),
        )


def outliers(case: Case) -> Iterator[Hypothesis]:
    """A few channels that need the range: the ops in float, where no weights can absorb them."""
    for index in with_outliers(case, NOTABLE):
        site = case.pair.sites[index]
        treatment, edit, cost = in_float(case, site)
        yield Hypothesis(
            cause="outlier-channel",
            name=site.name,
            evidence=evidence_of_outliers(case, [index]),
            remedy=f"keep the op in float{edit}, or train without the outlier",
            treatment=treatment,
            cost=cost,
        )


def evidence_of_outliers(case: Case, sites: Sequence[int]) -> str:
    """Which channel is largest at the first site, and what the noise of all would be with a range for each channel."""
    channels = case.ranges[sites[0]].channels
    assert channels is not None, "ranges by channel"
    largest = channels[1].abs().maximum(channels[0].abs())
    whole, rest = (sum(case.noise(index, variant) for index in sites) for variant in ("quantized", "by channel"))
    return (
        f"channel {int(largest.argmax())} reaches {number(float(largest.max()))}, half of the channels stay below "
        f"{number(float(largest.median()))}; a range per channel would leave {share(rest / whole)} % of the noise "
        "(error budget)"
    )


PART = 0.02
"""The share of all noise from which on a site counts among several."""


def with_outliers(case: Case, least: float = PART) -> list[int]:
    """The sites that make this share of all noise or more, most of it because of a few channels; noisiest first."""
    if "by channel" not in case.instead:
        return []
    found = [
        site.index
        for site in case.static_sites
        if site.index not in case.needless
        and case.noise(site.index) >= least * case.total_noise
        and case.noise(site.index, "by channel") <= OUTLIER * case.noise(site.index)
        and case.noise(site.index, "fitted") > OUTLIER * case.noise(site.index)
    ]
    return sorted(found, key=case.noise, reverse=True)


def _steps(site: Site) -> int:
    return site.params.quant_max - site.params.quant_min


def _scales(site: Site) -> tuple[Any, ...]:
    """What tells the scales of sites apart, of all channels where each has its own."""
    params = site.params
    both = (each.tolist() if isinstance(each, Tensor) else each for each in (params.scale, params.zero_point))
    return (params.axis, *both)


def _sharers(case: Case, index: int) -> tuple[str, ...]:
    """The other values that the quantizer makes share a site's scale, by name; none if no other site has that scale."""
    annotations, own_site = case.annotations, case.pair.sites[index]
    if annotations is None or all(
        _scales(own_site) != _scales(each) for each in case.static_sites if each is not own_site
    ):
        return ()
    own = annotations.points_at(case.pair.sites).get(index, ())
    roots = {annotations.groups.get(point, point) for point in own}
    name = case.pair.sites[index].name
    names = (annotations.value_name(point) for point, root in annotations.groups.items() if root in roots)
    return tuple(dict.fromkeys(each for each in names if each != name))


def _group(case: Case, index: int) -> list[int]:
    """A site and those with whose values it must share its scale."""
    names = {case.pair.sites[index].name, *_sharers(case, index)}
    return [each.index for each in case.static_sites if each.name in names]


def _float_edit(case: Case, site: Site) -> Edit | None:
    """The smallest edit that keeps a site in float: of its readers, else of the op that computes it, else of both."""
    annotations = case.annotations
    if annotations is None:
        return None
    nodes, points = annotations.graph.nodes, annotations.points_at(case.pair.sites)[site.index]
    readers = tuple(name for name in site.readers if name in annotations.ops)
    readers += (OUTPUT,) if any(reader and nodes[reader].op == OUTPUT for _, reader in points) else ()
    maker = (site.name,) if site.name in annotations.ops else ()
    for ops in filter(None, (readers, maker, (*maker, *readers))):
        after = annotations.after(Edit("float", tuple(dict.fromkeys(ops))))
        if after is not None and site.index not in after.sites_on(case.pair.sites):
            return Edit("float", tuple(dict.fromkeys(ops)))
    return None


def ops_in_float(case: Case, sites: Iterable[int]) -> tuple[str, ...]:
    """The ops of one edit that keeps all of some sites in float."""
    edits = [edit for index in sites for edit in in_float(case, case.pair.sites[index])[0].floats]
    return tuple(dict.fromkeys(op for edit in edits for op in edit.ops))


def in_float(case: Case, site: Site) -> tuple[Treatment, str, float]:
    """What keeps a site in float, as a suffix for the text of a remedy, and its cost."""
    edit = _float_edit(case, site)
    if edit is None:
        return Treatment(exact=frozenset({case.places[site.index]})), "", 0.0
    return Treatment(floats=(edit,)), f" ({edit})", case.costs.macs_of(edit.ops)
