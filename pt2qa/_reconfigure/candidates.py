"""The edits available to a search, and their order by gain per cost, from the noise of the sites that they switch off.

A site stays on while any op requires it: the one that produces the value, or one that reads it.  So a single edit may
gain nothing, and two together much; bundles are single edits, and for each site the edits that free it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any, Literal

from torch import Tensor

from pt2qa._grouping import grouped
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import few
from pt2qa._sensitivity.costs import survey
from pt2qa._simulator.products import PRODUCTS, constant_role, is_quantized, reads_of
from pt2qa.errors import QuantizeError
from pt2qa.overrides.annotations import Annotations, Edge
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import OUTPUT

Fallback = Literal["float", "int16", "dynamic"]

Noise = tuple[float, ...]
"""Noise power in each output, as a share of the power of the float model's output."""


@dataclass(frozen=True, slots=True)
class EditCandidate:
    """One edit, the edges it stops quantizing, and its cost as a share of the model; 0 for a fusion."""

    edit: Edit
    frees: frozenset[Edge]
    cost: float


def edges_by_site(pair: QuantizedPair, annotations: Annotations) -> dict[int, frozenset[Edge]]:
    return {
        index: frozenset(edge for point in points if (edge := annotations.unspecified(point)) is not None)
        for index, points in annotations.points_at(pair.sites).items()
    }


def candidates_of(pair: QuantizedPair, base: Annotations, costs: Costs, fallback: Fallback) -> Iterator[EditCandidate]:
    """The fallback of each region and each annotated input or output; those that free nothing are left out."""
    edges = _edges(base)
    owners = dict.fromkeys(edge.reader or edge.source for edge in edges)
    ends = ((name,) for name, op in base.ops.items() if op.op in ("input", OUTPUT))
    for places in (*(region.ops for region in pair.regions), *ends):
        ops = tuple(name for name in places if name in owners)
        if not ops or any(fallback not in base.ops[name].levels for name in ops if name in base.ops):
            continue
        # The simulator treats int16 and dynamic activations as exact; their real cost is measured at the end.
        frees = edges - _edges(base.with_edits([Edit("float", ops)]))
        if fallback != "float":
            frees = frozenset(edge for edge in frees if edge.kind == "activation")
        if frees:
            yield EditCandidate(Edit(fallback, ops), frees, costs.of(ops))


def applied(base: Annotations, edits: Iterable[Edit]) -> tuple[tuple[Edit, ...], Annotations]:
    """The edits and the resulting annotation; skips an edit whose effect earlier ones already have."""
    made: list[Edit] = []
    annotations = base
    for edit in edits:
        try:
            annotations = annotations.with_edits([edit])
        except QuantizeError:
            if not made:
                raise
            continue
        made.append(edit)
    return tuple(made), annotations


def unintended(old: QuantizedPair, new: QuantizedPair, on: frozenset[int], fallback: Fallback) -> list[str]:
    intended = {(site.kind, site.name) for site in old.sites if site.index in on}
    got = {(site.kind, site.name) for site in new.sites}
    too_few = sorted(f"{kind} of {name}" for kind, name in intended - got)
    too_many = sorted(f"{kind} of {name}" for kind, name in got - intended) if fallback == "float" else []
    notes = (("left int8 unexpectedly", too_few), ("stayed in int8 unexpectedly", too_many))
    return [f"{what}: {few(sites)}" for what, sites in notes if sites]


def _edges(annotations: Annotations) -> frozenset[Edge]:
    """The edges by what annotates them; the rounding may change when the anchor of a shared spec is removed."""
    return frozenset(edge for point in annotations.specs if (edge := annotations.unspecified(point)) is not None)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Candidates that are added together, by their positions in the candidate list.

    ``gain`` is the noise removed from each output; ``off`` are the sites that this bundle and the ones before switch
    off.
    """

    members: tuple[int, ...]
    gain: Noise
    cost: float
    off: frozenset[int]


def order_bundles(
    candidates: Sequence[EditCandidate], edges_of: Mapping[int, frozenset[Edge]], noise: Mapping[int, Noise]
) -> list[Bundle]:
    """Bundles in the order in which a search adds them: largest gain per cost each time, free ones first.

    The gain is that of the current worst output, or of the worst one that any bundle still improves.
    """
    remaining = {site: set(edges) for site, edges in edges_of.items() if edges}
    sites_of = grouped((edge, site) for site, edges in remaining.items() for edge in edges)
    groups = list(dict.fromkeys([*((number,) for number in range(len(candidates))), *_freeing(candidates, edges_of)]))
    outputs = range(len(next(iter(noise.values()), ())))
    chosen: set[int] = set()
    gone: set[int] = set()
    bundles: list[Bundle] = []

    def weigh(group: tuple[int, ...]) -> Bundle:
        new = tuple(number for number in group if number not in chosen)
        freed = frozenset().union(*(candidates[number].frees for number in new))
        touched = {site for edge in freed for site in sites_of.get(edge, ()) if site in remaining}
        off = frozenset(site for site in touched if remaining[site] <= freed)
        return Bundle(new, total_noise(noise, off, outputs), sum(candidates[number].cost for number in new), off)

    while True:
        weighed = [(group, bundle) for group in groups if any((bundle := weigh(group)).gain)]
        left = total_noise(noise, noise.keys() - gone, outputs)
        worst_first = sorted(outputs, key=lambda output: -left[output])
        worst = next((o for o in worst_first if any(bundle.gain[o] for _, bundle in weighed)), None)
        if worst is None:
            return bundles
        best = max((bundle for _, bundle in weighed), key=lambda bundle: _worth(bundle.gain[worst], bundle.cost))
        chosen.update(best.members)
        freed = frozenset().union(*(candidates[number].frees for number in best.members))
        for edges in remaining.values():
            edges -= freed
        for site in best.off:
            del remaining[site]
        gone |= best.off
        bundles.append(replace(best, off=frozenset(gone)))
        groups = [group for group, _ in weighed if not chosen.issuperset(group)]


def total_noise(noise: Mapping[int, Noise], sites: Iterable[int], outputs: Iterable[int]) -> Noise:
    silent = (0.0,) * len(tuple(outputs))
    found = [noise.get(site, silent) for site in sorted(sites)]
    return tuple(map(sum, zip(*found, strict=True))) if found else silent


def _worth(gain: float, cost: float) -> tuple[bool, float]:
    """Free edits that help come first, then the largest gain per cost."""
    return cost == 0 and gain > 0, gain / cost if cost else gain


def sites_off(candidates: Iterable[EditCandidate], edges_of: Mapping[int, frozenset[Edge]]) -> frozenset[int]:
    freed = frozenset().union(*(candidate.frees for candidate in candidates))
    return frozenset(site for site, edges in edges_of.items() if edges and edges <= freed)


def _freeing(candidates: Sequence[EditCandidate], edges_of: Mapping[int, frozenset[Edge]]) -> Iterable[tuple[int, ...]]:
    """For each site the cheapest candidates that together free it."""
    by_edge = grouped((edge, number) for number, candidate in enumerate(candidates) for edge in candidate.frees)
    for edges in edges_of.values():
        if edges and all(edge in by_edge for edge in edges):
            yield tuple(sorted({min(by_edge[edge], key=lambda number: candidates[number].cost) for edge in edges}))


LEAST_COST = 1e-3
"""The cost of an op without multiplications, as a share of the model: its input and output are converted."""


@dataclass(frozen=True)
class Costs:
    """Shares of the multiply-accumulates, and of the bytes of all weights, by op name.

    ``float_macs`` and ``float_bytes`` are what the quantizer itself leaves in float.
    """

    macs: Mapping[str, float]
    bytes: Mapping[str, float]
    float_macs: float
    float_bytes: float = 0.0

    def of(self, ops: Iterable[str]) -> float:
        names = set(ops)
        return max(self.macs_of(names), LEAST_COST) if names else 0.0

    def macs_of(self, ops: Collection[str]) -> float:
        return fsum(self.macs.get(name, 0.0) for name in set(ops))  # the same in any order

    def bytes_of(self, ops: Collection[str]) -> float:
        return fsum(self.bytes.get(name, 0.0) for name in set(ops))


def costs_of(pair: QuantizedPair, values: Sequence[Any]) -> Costs:
    """The shares of a pair's ops; arithmetic is counted in one run of the reference on ``values``."""
    return costs_from(pair, survey(pair.simulator, values).flops)


def costs_from(pair: QuantizedPair, flops: Mapping[int, int]) -> Costs:
    whole = sum(flops.values())
    macs: dict[str, float] = {}
    left = 0.0
    for step, reads in reads_of(pair.program):
        share = flops.get(step.index, 0) / whole if whole else 0.0
        macs[step.name] = macs.get(step.name, 0.0) + share
        left += share if step.op in PRODUCTS and not is_quantized(step.op, reads) else 0.0
    sizes: dict[str, float] = {}
    total = alone = 0.0
    for constant in pair.program.constants:
        if not isinstance(constant.reference, Tensor):
            continue
        # Biases are float, or int32 of the same size, whatever the weights are.
        weight = constant_role(constant.op, constant.argument, constant.is_parameter) == "weight"
        if not weight and (constant.site is None or pair.sites[constant.site].kind != "weight"):
            continue
        size = constant.reference.numel() * constant.reference.element_size()
        total += size
        if constant.site is None:
            alone += size
        else:
            sizes[constant.reader] = sizes.get(constant.reader, 0.0) + size
    shares = {name: size / total for name, size in sizes.items()}
    return Costs(macs, shares, left, alone / total if total else 0.0)
