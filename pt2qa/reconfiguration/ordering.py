"""Which edit first: gain for cost, from the noise of the sites that an edit switches off.

A site stays as long as somebody asks for it: the op that makes the value, or one that reads it.  So a single edit may
gain nothing, and two together much; candidates are therefore single edits, and for each site the edits that free it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pt2qa.overrides.annotations import Edge
from pt2qa.overrides.plan import Edit


@dataclass(frozen=True, slots=True)
class Unit:
    """One edit, with the edges whose quantization it ends and what it costs.

    Attributes:
        edit: for the plan.
        frees: the edges.
        cost: share of the model; 0 for a fusion.
    """

    edit: Edit
    frees: frozenset[Edge]
    cost: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Units that are added together.

    Attributes:
        units: positions in the list of units.
        gain: noise that goes, in the unit of the site's noise.
        cost: what the units cost.
        off: sites that are off because of this choice and the ones before.
    """

    units: tuple[int, ...]
    gain: float
    cost: float
    off: frozenset[int]


def order_choices(
    units: Sequence[Unit], holders: Mapping[int, frozenset[Edge]], noise: Mapping[int, float]
) -> list[Choice]:
    """Choices in the order in which a search adds them: each time the largest gain for its cost; free ones first.

    Args:
        units: all edits.
        holders: by site, the edges that ask for it.
        noise: by site, the output noise power that it causes.
    """
    remaining = {site: set(edges) for site, edges in holders.items() if edges}
    sites_of: dict[Edge, list[int]] = {}
    for site, edges in remaining.items():
        for edge in edges:
            sites_of.setdefault(edge, []).append(site)
    bundles = list(dict.fromkeys([*((number,) for number in range(len(units))), *_freeing(units, holders)]))
    chosen: set[int] = set()
    choices: list[Choice] = []

    def weigh(bundle: tuple[int, ...]) -> tuple[float, float, list[int]]:
        new = [number for number in bundle if number not in chosen]
        freed = frozenset().union(*(units[number].frees for number in new)) if new else frozenset()
        touched = {site for edge in freed for site in sites_of.get(edge, ()) if site in remaining}
        off = [site for site in touched if remaining[site] <= freed]
        return sum(noise.get(site, 0.0) for site in off), sum(units[number].cost for number in new), off

    while bundles:
        weighed = [(bundle, *weigh(bundle)) for bundle in bundles]
        weighed = [entry for entry in weighed if entry[1] > 0]
        if not weighed:
            break
        best = max(weighed, key=lambda entry: (entry[2] == 0, entry[1] / entry[2] if entry[2] else entry[1]))
        bundle, gain, cost, off = best
        new = tuple(number for number in bundle if number not in chosen)
        chosen.update(new)
        freed = frozenset().union(*(units[number].frees for number in new))
        for edges in remaining.values():
            edges -= freed
        for site in off:
            del remaining[site]
        before = choices[-1].off if choices else frozenset()
        choices.append(Choice(new, gain, cost, before | frozenset(off)))
        bundles = [entry[0] for entry in weighed if not chosen.issuperset(entry[0])]
    return choices


def sites_off(units: Iterable[Unit], holders: Mapping[int, frozenset[Edge]]) -> frozenset[int]:
    """The sites that nobody asks for any more."""
    freed = frozenset().union(*(unit.frees for unit in units))
    return frozenset(site for site, edges in holders.items() if edges and edges <= freed)


def _freeing(units: Sequence[Unit], holders: Mapping[int, frozenset[Edge]]) -> Iterable[tuple[int, ...]]:
    """For each site the cheapest units that free it together."""
    by_edge: dict[Edge, list[int]] = {}
    for number, unit in enumerate(units):
        for edge in unit.frees:
            by_edge.setdefault(edge, []).append(number)
    for edges in holders.values():
        if edges and all(edge in by_edge for edge in edges):
            yield tuple(sorted({min(by_edge[edge], key=lambda number: units[number].cost) for edge in edges}))
