"""An annotation as text by place, so that annotations of two graphs of one model can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pt2qa.overrides import Annotations
from pt2qa.overrides.points import Point, is_quantized, spec_text
from pt2qa.overrides.sharing import root_of

SHOWN = 3
"""Number of differences that a sentence names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """How one place is quantized: dtype, scheme, range, observer, and the places (with itself) that share its scale."""

    spec: str
    group: frozenset[str]


Layout = dict[str, PlaceSpec]
"""How each place (``conv/conv2d → relu/relu``) is quantized; places in float are left out."""


def layout_of(annotations: Annotations) -> Layout:
    specs = annotations.specs
    found: dict[str, str] = {}
    groups: dict[Point | None, list[str]] = defaultdict(list)
    for point in specs:
        root, place = root_of(specs, point), place_of(annotations, point)
        if root is None:
            found[place] = "a scale that resolves to no spec"
        elif is_quantized(specs[root], annotations.graph.nodes[point[0]]):
            found[place] = spec_text(specs[root])
            groups[root].append(place)
    group_of = {place: frozenset(group) for group in groups.values() for place in group}
    return {place: PlaceSpec(spec, group_of.get(place, frozenset((place,)))) for place, spec in found.items()}


def place_of(annotations: Annotations, point: Point) -> str:
    """A point's readable name: ``conv/conv2d → relu/relu``, ``output of fc/linear``, ``argument 1 of fc/linear``."""
    nodes = annotations.graph.nodes
    source, reader = point
    name = nodes[source].name if source in nodes else source
    if not reader:
        return f"output of {name}"
    if source in nodes and nodes[source].constant and source in nodes[reader].inputs:
        # Constants are named differently in each spelling.
        return f"argument {nodes[reader].inputs[source]} of {nodes[reader].name}"
    return f"{name} → {nodes[reader].name}"


def differences(before: Layout, after: Layout) -> list[str]:
    """Each place where two annotations differ, in the order of the first.

    For places with equal specs, a change of the places that share the scale is reported only among places whose specs
    are equal too: a place that is gone is reported once.
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
    """The first differences, worded as the end of a sentence."""
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _spec(layout: Layout, place: str) -> str:
    return layout[place].spec if place in layout else "float"


def _others(group: frozenset[str], place: str) -> str:
    return ", ".join(sorted(group - {place})) or "any other place"
