"""Shared scales that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa.overrides import Annotations
from pt2qa.overrides.points import Derives, Point, Shares
from pt2qa.overrides.sharing import root_of
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Chains of shared specs that go in a circle or break off, groups whose first point has no spec of its own."""
    annotations = context.annotations
    if not any(isinstance(spec, Shares | Derives) for spec in annotations.specs.values()):
        raise DoesNotApplyError("to annotations without shared scales")
    yield from _endless(annotations)
    yield from _out_of_order(annotations)
    yield from _underived(annotations)


def _endless(annotations: Annotations) -> Iterator[Found]:
    """Each circle, and each missing point, once."""
    seen: set[Point] = set()
    for start in annotations.specs:
        if root_of(annotations.specs, start) is not None:
            continue
        chain = _chain(annotations, start)
        end = chain[-1]
        if seen.isdisjoint(chain):
            text = _text(annotations, chain)
            if end in annotations.specs:
                yield Found(_name(annotations, start), f"shares its scale in a circle: {text}", fix=_FIX_CIRCLE)
            else:
                yield Found(_name(annotations, start), f"shares a scale that nothing has: {text}", fix=_FIX_MISSING)
        seen.update(chain)


def _chain(annotations: Annotations, point: Point) -> list[Point]:
    """The points from one on, up to the first that is missing, or that stands in the chain already."""
    chain = [point]
    while isinstance(spec := annotations.specs.get(chain[-1]), Shares):
        chain.append(spec.point)
        if spec.point in chain[:-1]:
            break
    return chain


def _out_of_order(annotations: Annotations) -> Iterator[Found]:
    """Groups whose first point refers to a later one."""
    for point, first in annotations.groups.items():
        spec = annotations.specs[point]
        ends = root_of(annotations.specs, point) is not None
        if ends and point == first and isinstance(spec, Shares):
            text = _text(annotations, _chain(annotations, point))
            yield Found(_name(annotations, point), f"shares a scale that comes later in the graph: {text}")


def _underived(annotations: Annotations) -> Iterator[Found]:
    """Derived scales whose sources are missing or come later."""
    order = {point: index for index, point in enumerate(annotations.specs)}
    for point, spec in annotations.specs.items():
        for source in spec.points if isinstance(spec, Derives) else ():
            if order.get(source, len(order)) > order[point]:
                what = "comes later in the graph" if source in order else "nothing has"
                text = _text(annotations, [point, source])
                yield Found(_name(annotations, point), f"derives its scale from one that {what}: {text}")


def _text(annotations: Annotations, chain: list[Point]) -> str:
    return " -> ".join(annotations.ground.describe(point).rstrip(",") for point in chain)


def _name(annotations: Annotations, point: Point) -> str:
    source, reader = point
    return annotations.ground.nodes[reader or source].name


_FIX_CIRCLE = (
    "in the quantizer, let one point of the circle have a QuantizationSpec of its own; the others may go on sharing"
)
_FIX_MISSING = "in the quantizer, annotate the edge or output that SharedQuantizationSpec names, with a spec of its own"

RULE = Rule(
    id="broken-share",
    severity="error",
    title="shared scales that lead nowhere",
    why="prepare_pt2e makes one observer for all that share a scale, at the first of them in the order of the graph. "
    "Without a spec there it fails with an AssertionError or a KeyError, in a circle with a RecursionError "
    "(ao#4421, ao#4483).",
    fix="in the quantizer, give the spec to the first in the order of the graph, and let the later ones refer to it",
    needs=("annotations",),
    find=find,
)
