"""Which edit first: gain for cost, from the noise of the sites that an edit switches off.

A site stays as long as somebody asks for it: the op that makes the value, or one that reads it.  So a single edit may
gain nothing, and two together much; candidates are therefore single edits, and for each site the edits that free it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pt2qa.overrides.annotations import Edge
from pt2qa.overrides.plan import Edit

Noise = tuple[float, ...]
"""Noise power in each output, as a share of the power of what the float model returns there."""


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
        gain: noise that goes, in each output.
        cost: what the units cost.
        off: sites that are off because of this choice and the ones before.
    """

    units: tuple[int, ...]
    gain: Noise
    cost: float
    off: frozenset[int]


def order_choices(
    units: Sequence[Unit], holders: Mapping[int, frozenset[Edge]], noise: Mapping[int, Noise]
) -> list[Choice]:
    """Choices in the order in which a search adds them: each time the largest gain for its cost; free ones first.

    The gain is that of the output that is worst by then, or of the worst one that any choice still helps.

    Args:
        units: all edits.
        holders: by site, the edges that ask for it.
        noise: by site, the noise that it causes in each output.
    """
    remaining = {site: set(edges) for site, edges in holders.items() if edges}
    sites_of: dict[Edge, list[int]] = {}
    for site, edges in remaining.items():
        for edge in edges:
            sites_of.setdefault(edge, []).append(site)
    bundles = list(dict.fromkeys([*((number,) for number in range(len(units))), *_freeing(units, holders)]))
    outputs = range(len(next(iter(noise.values()), ())))
    chosen: set[int] = set()
    gone: set[int] = set()
    choices: list[Choice] = []

    def weigh(bundle: tuple[int, ...]) -> Choice:
        new = tuple(number for number in bundle if number not in chosen)
        freed = frozenset().union(*(units[number].frees for number in new)) if new else frozenset()
        touched = {site for edge in freed for site in sites_of.get(edge, ()) if site in remaining}
        off = frozenset(site for site in touched if remaining[site] <= freed)
        return Choice(new, total_noise(noise, off, outputs), sum(units[number].cost for number in new), off)

    while True:
        weighed = [(bundle, choice) for bundle in bundles if any((choice := weigh(bundle)).gain)]
        left = total_noise(noise, noise.keys() - gone, outputs)
        worst = next((o for o in _worst_first(left) if any(choice.gain[o] for _, choice in weighed)), None)
        if worst is None:
            return choices
        best = max((choice for _, choice in weighed), key=lambda choice: _worth(choice.gain[worst], choice.cost))
        chosen.update(best.units)
        freed = frozenset().union(*(units[number].frees for number in best.units))
        for edges in remaining.values():
            edges -= freed
        for site in best.off:
            del remaining[site]
        gone |= best.off
        choices.append(replace(best, off=frozenset(gone)))
        bundles = [bundle for bundle, _ in weighed if not chosen.issuperset(bundle)]


def total_noise(noise: Mapping[int, Noise], sites: Iterable[int], outputs: Iterable[int]) -> Noise:
    """The noise of some sites together, in each output."""
    silent = (0.0,) * len(tuple(outputs))
    found = [noise.get(site, silent) for site in sites]
    return tuple(map(sum, zip(*found, strict=True))) if found else silent


def _worst_first(noise: Noise) -> list[int]:
    return sorted(range(len(noise)), key=lambda output: -noise[output])


def _worth(gain: float, cost: float) -> tuple[bool, float]:
    """What costs nothing and helps comes first, then the largest gain for its cost."""
    return cost == 0 and gain > 0, gain / cost if cost else gain


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
