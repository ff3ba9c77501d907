"""The edits available to a search, what each of them frees, and their combined effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._reconfigure.costs import Costs
from pt2qa._reconfigure.ordering import EditCandidate
from pt2qa._report.prose import few
from pt2qa.errors import QuantizeError
from pt2qa.overrides.annotations import Annotations, Edge
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import OUTPUT

Fallback = Literal["float", "int16", "dynamic"]


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
    notes = (("not meant to leave int8, but did", too_few), ("meant to leave int8, but did not", too_many))
    return [f"{what}: {few(sites)}" for what, sites in notes if sites]


def _edges(annotations: Annotations) -> frozenset[Edge]:
    """The edges by what annotates them; the rounding may change when the anchor of a shared spec is removed."""
    return frozenset(edge for point in annotations.specs if (edge := annotations.unspecified(point)) is not None)
