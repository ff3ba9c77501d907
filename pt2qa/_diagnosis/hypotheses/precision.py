"""Ops that 8 bits are not enough for."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.hypotheses.sites import in_float
from pt2qa._diagnosis.trials import Treatment
from pt2qa._reconfigure.candidates import candidates_of, edges_by_site
from pt2qa._report.formats import share

MOST = 3
"""How many regions are tried."""

HALF = 0.5
"""The share of all noise from which on a single value is looked at by itself."""


def needed(case: Case) -> Iterator[Hypothesis]:
    """The regions whose fallback to float frees the most noise."""
    annotations = case.annotations
    if annotations is None:
        return
    edges_of = edges_by_site(case.pair, annotations)
    total = sum(case.noise(site.index) for site in case.pair.sites)
    found = []
    for candidate in candidates_of(case.pair, annotations, case.costs, "float"):
        freed = [site for site, edges in edges_of.items() if edges and edges <= candidate.frees]
        noise = sum(map(case.noise, freed))
        if noise > 0:
            found.append((noise, candidate, freed))
    for noise, candidate, freed in sorted(found, key=lambda each: -each[0])[:MOST]:
        worst = max(freed, key=case.noise)
        yield Hypothesis(
            cause="precision",
            name=case.pair.sites[worst].name,
            others=tuple(name for name in candidate.edit.ops if name != case.pair.sites[worst].name),
            evidence=f"its roundings make {share(noise / total)} % of the noise of all sites (error budget)",
            remedy=f"leave it in float: {candidate.edit}",
            treatment=Treatment(floats=(candidate.edit,)),
            cost=case.costs.macs_of(candidate.edit.ops),
        )
    tried = {candidate.edit.ops for _, candidate, _ in found}
    # A value that no single op frees: both its maker and its readers must stay in float.
    noisiest = max((site for site in case.static_sites), key=lambda site: case.noise(site.index), default=None)
    if noisiest is None or case.noise(noisiest.index) < HALF * total:
        return
    treatment, edit, cost = in_float(case, noisiest)
    if not any(set(edit.ops) <= set(ops) for edit in treatment.floats for ops in tried):
        yield Hypothesis(
            cause="precision",
            name=noisiest.name,
            others=noisiest.readers,
            evidence=f"rounding this value makes {share(case.noise(noisiest.index) / total)} % of the noise of all "
            "sites (error budget)",
            remedy=f"leave it in float{edit}",
            treatment=treatment,
            cost=cost,
        )
