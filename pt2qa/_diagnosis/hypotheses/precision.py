"""Ops that 8 bits are not enough for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.calibration import goes_beyond
from pt2qa._diagnosis.hypotheses.sites import ops_in_float
from pt2qa._grouping import grouped
from pt2qa._reconfigure.candidates import candidates_of, edges_by_site
from pt2qa._report.prose import counted, share
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit

MOST = 3
"""How many regions are tried."""

SHARE = 0.2
"""The share of the noise of all sites below which a region is not tried by itself: without it there is 1 dB less."""

CLAMPED = "rare values are clamped, and nothing that was tried in int8 certainly holds them"
"""What is said of ops in float that calibration saw such values of, or nearly."""


def needed(case: Case, *, clamped: bool = False) -> Iterator[Hypothesis]:
    """The regions whose fallback to float frees the most noise, and the nested graphs.

    With ``clamped``, only regions that clamp rare values which no calibration covers, once all else was tried.
    """
    annotations = case.annotations
    if not clamped:
        yield from _nested(case)
    if annotations is None:
        return
    edges_of = edges_by_site(case.pair, annotations)
    found = []
    for candidate in candidates_of(case.pair, annotations, case.costs, "float"):
        freed = [site for site, edges in edges_of.items() if edges and edges <= candidate.frees]
        noise = sum(map(case.noise, freed))
        if noise > 0 and (not _cause(case, freed)) is clamped:
            found.append((noise, candidate, freed))
    # With a target, small gains count, too.
    least = SHARE if case.judge.target is None else 0.0
    tried: list[set[str]] = []
    for noise, candidate, freed in sorted(found, key=lambda each: -each[0]):
        if noise < least * case.total_noise or len(tried) == MOST:
            break
        tried.append(set(candidate.edit.ops))
        worst, cause = max(freed, key=case.noise), _cause(case, freed)
        yield Hypothesis(
            cause=cause or "precision",
            name=case.pair.sites[worst].name,
            others=candidate.edit.ops,
            evidence=f"accounts for {share(noise / case.total_noise)} % of the noise of all sites (error budget)",
            sentence="" if cause else CLAMPED,
            remedy=f"keep these ops in float: {', '.join(candidate.edit.ops)}",
            treatment=Treatment(floats=(candidate.edit,)),
            cost=case.costs.macs_of(candidate.edit.ops),
        )
    noisiest = case.ranked([site.index for site in case.pair.sites], case.noise)
    narrow = [site for site in noisiest if _cause(case, [site]) == "narrow-calibration"]
    for sites in (noisiest[:MOST], narrow):
        yield from _together(case, sites, tried, clamped)


def _nested(case: Case) -> Iterator[Hypothesis]:
    for sites in grouped((site.source, site.index) for site in case.pair.sites if site.nested).values():
        noise = case.share(case.noise, sites)
        if noise > SHARE:
            yield Hypothesis(
                cause=_cause(case, sites) or "precision",
                name=case.pair.sites[max(sites, key=case.noise)].name,
                others=case.names(sites),
                evidence=f"its nested graph accounts for {share(noise)} % of the noise of all sites (error budget)",
                remedy="keep the nested graph in float: make the quantizer annotate nothing in it, since plans "
                "do not reach nested graphs",
                treatment=Treatment(exact=frozenset(case.places[index] for index in sites)),
                share=noise,
            )


def _together(case: Case, worst: Sequence[int], tried: Sequence[set[str]], clamped: bool) -> Iterator[Hypothesis]:
    """Sites all at once: what one op makes and the next amplifies needs both in float."""
    ops, cause = ops_in_float(case, worst), _cause(case, worst)
    if len(worst) < 2 or not ops or (not cause) is not clamped or any(set(ops) <= before for before in tried):
        return
    noise = case.share(case.noise, worst)
    yield Hypothesis(
        cause=cause or "precision",
        name=case.pair.sites[worst[0]].name,
        others=(*case.names(worst), *ops),
        evidence=f"{share(noise)} % of the noise of all sites comes from {counted(len(worst), 'site')} (error budget)",
        remedy=f"keep these ops in float: {', '.join(ops)}",
        treatment=Treatment(floats=(Edit("float", ops),)),
        cost=case.costs.macs_of(ops),
        share=noise,
        sentence="" if cause else CLAMPED,
    )


def _cause(case: Case, sites: Iterable[int]) -> str:
    """Precision; but calibration, if most of the noise comes from clamping values larger than it saw.

    Empty if they are clamped and calibration saw such values, or nearly: that takes no more bits, but another observer
    or more samples.
    """
    found = {"precision": 0.0, "narrow-calibration": 0.0, "": 0.0}
    for site in sites:
        cause = "precision"
        if _is_clamped(case, site):
            cause = "narrow-calibration" if goes_beyond(case.ranges[site], case.seen[site]) else ""
        found[cause] += case.noise(site)
    return max(found, key=lambda cause: found[cause])


def _is_clamped(case: Case, site: int) -> bool:
    """Whether a site's noise comes from clamping, as far as calibration data of another kind is known."""
    noise = case.noises.noise
    return 2 * noise.get((site, "activation clamping"), 0.0) > noise.get((site, "quantized"), math.inf) and (
        site in case.seen
    )
