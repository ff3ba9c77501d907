"""Another configuration of the quantizer: fusions, observers, dynamic scales by row."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._report.prose import counted, share
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.annotations import observing
from pt2qa.overrides.plan import OBSERVERS


def unfused(case: Case) -> Iterator[Hypothesis]:
    edits = case.fusions
    if not edits:
        return
    between = {edit.ops[0] for edit in edits}
    sites = [site.index for site in case.pair.sites if site.kind == "activation" and site.name in between]
    worst = sorted(sites, key=case.noise, reverse=True)
    first = case.pair.sites[worst[0]].name if worst else edits[0].ops[0]
    yield Hypothesis(
        cause="unfused-activation",
        name=first,
        others=case.names(worst),
        evidence=f"{counted(len(edits), 'pair')} of ops quantized separately; the values in between account for "
        f"{share(case.share(case.noise, sites))} % of the noise of all sites (error budget)",
        remedy=f"fuse them: {counted(len(edits), 'edit')} in the plan",
        treatment=Treatment(edits=edits),
    )


def rounded_before(case: Case) -> Iterator[Hypothesis]:
    """Products that are rounded before an activation that alone reads them, where no edit fuses the two."""
    fused = {edit.ops[0] for edit in case.fusions}
    found = [site for site in case.needless if case.pair.sites[site].name not in fused]
    if found:
        site = case.pair.sites[max(found, key=case.noise)]
        yield Hypothesis(
            cause="unfused-activation",
            name=site.name,
            others=(*case.names(found), *site.readers),
            evidence=f"{counted(len(found), 'op')} quantized before the activation that alone reads it; here "
            f"{site.readers[0]}",
            remedy="annotate the two ops as one pattern: no output_qspec on the first",
            treatment=Treatment(exact=frozenset(case.places[index] for index in found)),
        )


def dynamic_by_row(case: Case) -> Iterator[Hypothesis]:
    if case.pair.recipe is None or case.pair.as_deployed() is case.pair:
        return
    dynamic = [site for site in case.pair.sites if site.params.dynamic]
    yield Hypothesis(
        cause="dynamic-by-row",
        name=max(dynamic, key=lambda site: case.noise(site.index)).name,
        evidence=f"{counted(len(dynamic), 'dynamic scale')}, which the kernels compute per row",
        remedy="none needed: on the device the model is better than the converted graph; analyse pair.as_deployed()",
        treatment=Treatment(as_deployed=True),
    )


def observers(case: Case) -> Iterator[Hypothesis]:
    annotations = case.annotations
    if annotations is None:
        return
    worst = case.ranked([site.index for site in case.static_sites], case.noise)
    for observer in OBSERVERS:
        for edit in observing(annotations, observer):
            yield Hypothesis(
                cause="observer",
                name=case.pair.sites[worst[0]].name if worst else "",
                evidence="activations account for most of the noise (error budget)",
                remedy=f"observe activations with {OBSERVERS[observer]}: one edit in the plan",
                treatment=Treatment(edits=(edit,)),
                sentence=f"{OBSERVERS[observer]} chooses better ranges from the same data",
            )
