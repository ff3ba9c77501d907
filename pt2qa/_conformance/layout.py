"""An annotation as text by place, so that those of two graphs of one model can be held against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pt2qa.overrides import Annotations
from pt2qa.overrides.points import Point, is_quantized, spec_text
from pt2qa.overrides.sharing import root_of

SHOWN = 3
"""Differences that a sentence names before it counts the rest."""


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """How one place is quantized: dtype, scheme, range and observer, and the places of its scale, itself included."""

    spec: str
    group: frozenset[str]


Layout = dict[str, PlaceSpec]
"""By place (``conv/conv2d → relu/relu``) how it is quantized; places in float are not among them."""


def layout_of(annotations: Annotations) -> Layout:
    """Every quantized place of an annotated graph."""
    specs = annotations.specs
    found: dict[str, str] = {}
    groups: dict[Point | None, list[str]] = defaultdict(list)
    for point in specs:
        root, place = root_of(specs, point), place_of(annotations, point)
        if root is None:
            found[place] = "a scale that leads nowhere"
        elif is_quantized(specs[root], annotations.ground.nodes[point[0]]):
            found[place] = spec_text(specs[root])
            groups[root].append(place)
    group_of = {place: frozenset(group) for group in groups.values() for place in group}
    return {place: PlaceSpec(spec, group_of.get(place, frozenset((place,)))) for place, spec in found.items()}


def place_of(annotations: Annotations, point: Point) -> str:
    """What people call a point: ``conv/conv2d → relu/relu``, ``output of fc/linear``, ``argument 1 of fc/linear``."""
    nodes = annotations.ground.nodes
    source, reader = point
    name = nodes[source].name if source in nodes else source
    if not reader:
        return f"output of {name}"
    if source in nodes and nodes[source].constant and source in nodes[reader].inputs:
        # Constants have other names in other spellings.
        return f"argument {nodes[reader].inputs[source]} of {nodes[reader].name}"
    return f"{name} → {nodes[reader].name}"


def differences(before: Layout, after: Layout) -> list[str]:
    """Each place where two annotations differ, in the order of the first.

    Of places that have the same spec, those are told whose scale is shared with other places that also have the same
    spec: that a place is gone is said once.
    """
    places = list(dict.fromkeys((*before, *after)))
    changed = [place for place in places if _spec(before, place) != _spec(after, place)]
    found = [f"{place} is {_spec(after, place)}, not {_spec(before, place)}" for place in changed]
    for place in places:
        if place not in changed:
            old, new = before[place].group.difference(changed), after[place].group.difference(changed)
            if old != new:
                found.append(f"{place} shares its scale with {_others(new, place)}, not with {_others(old, place)}")
    return found


def some(found: Sequence[str]) -> str:
    """The first differences as the end of a sentence."""
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _spec(layout: Layout, place: str) -> str:
    return layout[place].spec if place in layout else "float"


def _others(group: frozenset[str], place: str) -> str:
    return ", ".join(sorted(group - {place})) or "any other place"
