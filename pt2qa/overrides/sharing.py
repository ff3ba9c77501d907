"""Points that share one scale: which ones, and what happens to the others when one is removed.

torchao makes one observer for a group of points.  The group's first point must have a spec that is not a reference, and
every reference must lead to an existing point; otherwise torchao fails, or follows a cycle until Python's stack
overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pt2qa.errors import QuantizeError
from pt2qa.overrides.points import Derives, GraphNode, Point, Shares, Specs, is_quantized, own_spec

COMPARED = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")
"""The fields that torchao compares before two points of one value share an observer (``_union_input_edge_with``)."""


def root_of(specs: Specs, point: Point) -> Point | None:
    """The point at the end of a chain of shared specs; None if the chain is broken or circular."""
    seen: set[Point] = set()
    while point in specs and point not in seen:
        spec = specs[point]
        if not isinstance(spec, Shares):
            return point
        seen.add(point)
        point = spec.point
    return None


def rounds_at(specs: Specs, point: Point, nodes: Mapping[str, GraphNode]) -> bool:
    """Whether a point's resolved spec rounds its value."""
    root = root_of(specs, point)
    return root is not None and is_quantized(specs[root], nodes[point[0]])


def groups_of(specs: Specs) -> dict[Point, Point]:
    """For each point, the first one that has the same scale, by reference or as the same value with an equal spec.

    Source:
        ``_get_edge_or_node_to_group_id`` in ``torchao/quantization/pt2e/prepare.py``.
    """
    parents = {point: point for point in specs}

    def find(point: Point) -> Point:
        while parents[point] != point:
            parents[point] = point = parents[parents[point]]
        return point

    alike: dict[Any, Point] = {}
    for point, spec in specs.items():
        if isinstance(spec, Shares) and spec.point in parents:
            parents[find(point)] = find(spec.point)
        root = root_of(specs, point)
        if root is not None:
            asks = (point[0], *(getattr(own_spec(specs[root]), name, None) for name in COMPARED))
            parents[find(point)] = find(alike.setdefault(asks, point))
    first: dict[Point, Point] = {}
    return {point: first.setdefault(find(point), point) for point in specs}


def remove(specs: Specs, gone: Collection[Point], describe: Callable[[Point], str]) -> dict[Point, Any]:
    """The specs without some points; those that shared with them share among themselves.

    If the point with a group's spec is removed, the first remaining point of the group gets the spec.  A point that
    derives its scale from a removed one derives it from another of that group.
    """
    gone = set(gone)
    kept = {point: spec for point, spec in specs.items() if point not in gone}
    roots = {point: root_of(specs, point) for point in specs}
    anchors = {root: root for root in roots.values() if root is not None and root in kept}
    for point, spec in list(kept.items()):
        root = roots[point]
        if isinstance(spec, Derives):
            kept[point] = replace(spec, points=tuple(_source(p, point, kept, roots, describe) for p in spec.points))
        if not isinstance(spec, Shares):
            continue
        if root is None:
            if spec.point in gone:
                raise QuantizeError(
                    f"{describe(point)} shares its scale with {describe(spec.point)}, which leads to no scale of its "
                    "own: the quantizer's shared specs form a cycle or end nowhere, which this edit cannot repair"
                )
        elif root not in anchors:
            anchors[root] = point
            kept[point] = specs[root]
        elif spec.point in gone:
            kept[point] = Shares(anchors[root])
    return kept


def replace_own(
    specs: Specs, own: Iterable[Point], change: Callable[[Any], Any], describe: Callable[[Point], str]
) -> dict[Point, Any]:
    """The specs with some points changed, which still share among themselves, and the other points as they are."""
    own = list(own)
    rest = remove(specs, own, describe)
    changed: dict[Point, Any] = {}
    first: dict[Point, Point] = {}
    for point in own:
        if (root := root_of(specs, point)) is not None:
            changed[point] = Shares(first[root]) if root in first else change(specs[root])
            first.setdefault(root, point)
    return {point: changed.get(point, rest.get(point)) for point in specs if point in changed or point in rest}


def _source(
    source: Point,
    derived: Point,
    kept: dict[Point, Any],
    roots: dict[Point, Point | None],
    describe: Callable[[Point], str],
) -> Point:
    """A point to derive from: the same one, or an earlier one with the same scale."""
    if source in kept:
        return source
    for point in kept:
        if point == derived:
            break
        if source in roots and roots[point] is not None and roots[point] == roots[source]:
            return point
    raise QuantizeError(
        f"{describe(derived)} derives its scale from {describe(source)}, which this edit removes; "
        "name the op that reads it in the edit, too"
    )
