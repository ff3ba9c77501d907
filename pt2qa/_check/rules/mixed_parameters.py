"""Values that are rounded twice on their way, with scales that need not agree."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import differing, own_spec
from pt2qa.overrides import Annotations
from pt2qa.overrides.points import Point
from pt2qa.plugins import DoesNotApplyError, Found, Rule

VALUE_PRESERVING = frozenset(
    {"transpose", "permute", "t", "swapaxes", "movedim", "numpy_T", "reshape", "view", "_unsafe_view", "flatten"}
    | {"unflatten", "squeeze", "unsqueeze", "expand", "repeat", "slice", "select", "narrow", "chunk", "split", "flip"}
    | {"roll", "clone", "contiguous", "cat", "stack", "max_pool1d", "max_pool2d", "max_pool3d", "pixel_shuffle"}
    | {"pixel_unshuffle", "channel_shuffle", "dropout", "upsample_nearest2d", "unbind", "detach", "alias"}
)
"""Ops that hand on values as they are, or some of them."""


def find(context: CheckContext) -> Iterator[Found]:
    """Value-preserving ops with other scales before than after, and values that are rounded in two ways."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    yield from _unequal_sides(annotations)
    yield from _rounded_twice(annotations)


def _unequal_sides(annotations: Annotations) -> Iterator[Found]:
    groups = {point: first for point, first in annotations.groups.items() if own_spec(annotations, point) is not None}
    for node in annotations.ground.nodes.values():
        after = groups.get((node.key, ""))
        if node.op not in VALUE_PRESERVING or node.constant or after is None:
            continue
        before = {groups[point] for key in node.inputs if (point := (key, node.key)) in groups}
        if others := sorted(before - {after}):
            names = {name for point in others for name in _differing(annotations, point, (node.key, ""))}
            how = f"another {' and '.join(sorted(names))}" if names else "a scale of its own"
            sides = f"{len(others)} of its {len(before)} inputs" if len(before) > 1 else "its input"
            yield Found(node.name, f"{node.op} hands values on, and {sides} has {how}, not that of its output")


def _rounded_twice(annotations: Annotations) -> Iterator[Found]:
    for source, reader in annotations.specs:
        if not reader or annotations.ground.nodes[source].constant:
            continue
        names = _differing(annotations, (source, ""), (source, reader))
        if names:
            node = annotations.ground.nodes[source]
            how = " and ".join(names)
            yield Found(
                node.name, f"is rounded as its output and again for the {_op(annotations, reader)}: {how} differ"
            )


def _op(annotations: Annotations, key: str) -> str:
    return annotations.ground.nodes[key].op


def _differing(annotations: Annotations, one: Point, other: Point) -> tuple[str, ...]:
    first, second = own_spec(annotations, one), own_spec(annotations, other)
    return () if first is None or second is None else differing(first, second)


RULE = Rule(
    id="mixed-parameters",
    severity="warning",
    title="values that are rounded with one scale and then with another",
    why="The second rounding adds error for nothing, and kernels that only move data refuse it when the model is "
    "loaded, as a transpose does that asks for equal parameters on both sides (executorch#19836, executorch#22238).",
    fix="in the quantizer, give the op's output a SharedQuantizationSpec to its (first) input edge; for one value with "
    "two readers, ask for the same spec at both",
    needs=("annotations",),
    find=find,
)
