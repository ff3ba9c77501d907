"""Which values of an annotated graph are rounded when read, and how."""

from __future__ import annotations

from typing import Any

from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import Derives, Point, is_quantized
from pt2qa.overrides.sharing import COMPARED, root_of


def own_spec(annotations: Annotations, point: Point) -> Any | None:
    """The spec that a point resolves to; None if it has none, leads nowhere, or rounds nothing."""
    root = root_of(annotations.specs, point)
    if root is None or not is_quantized(annotations.specs[root], annotations.graph.nodes[point[0]]):
        return None
    spec = annotations.specs[root]
    return spec.spec if isinstance(spec, Derives) else spec


def spec_read(annotations: Annotations, source: str, reader: str) -> Any | None:
    """The spec with which an op reads a value; None if it reads it in float.  Both go by their fx names."""
    for point in ((source, reader), (source, "")):
        if (spec := own_spec(annotations, point)) is not None:
            return spec
    # A constant may be rounded before it is reshaped.
    node = annotations.graph.nodes[source]
    deeper = node.inputs if node.constant else ()
    return next((spec for one in deeper if (spec := spec_read(annotations, one, source)) is not None), None)


def differing(one: Any, other: Any) -> tuple[str, ...]:
    """The attributes of :data:`COMPARED` in which two specs differ."""
    missing = object()
    return tuple(name for name in COMPARED if getattr(one, name, missing) != getattr(other, name, missing))
