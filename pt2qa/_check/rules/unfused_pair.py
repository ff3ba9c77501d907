"""Pairs of ops that are rounded in between, though they could run as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import own_spec, spec_read
from pt2qa._simulator.products import CONVOLUTIONS
from pt2qa.overrides import Annotations, fusions_in
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import GraphNode
from pt2qa.plugins import Found, Rule

_PRODUCERS = CONVOLUTIONS | {"linear", "add", "mul", "matmul", *BATCH_NORMS}
_ACTIVATIONS = ("relu", "relu6", "hardtanh", "clamp", "leaky_relu", "hardswish", "silu", "gelu", "sigmoid", "tanh")


def find(context: CheckContext) -> Iterator[Found]:
    """What the backend could fuse, and what the quantizer itself takes as one at other places."""
    annotations = context.annotations
    nodes = {node.name: node for node in annotations.ground.nodes.values()}
    declared = set[str]()
    for edit in fusions_in(annotations):
        first, second = (nodes[name] for name in edit.ops)
        declared.add(first.name)
        yield Found(first.name, f"is rounded before the {_label(second, context)} that reads it; {_KERNEL}")
    for first, second, elsewhere in _fused_elsewhere(annotations):
        if first.name not in declared:
            times = f"at {elsewhere} other place{'' if elsewhere == 1 else 's'}"
            yield Found(
                first.name,
                f"is rounded before the {second.op} that reads it, while {times} the quantizer takes {first.op} and "
                f"{second.op} as one",
            )


def _label(node: GraphNode, context: CheckContext) -> str:
    """The op as people call it: a ReLU6 is a hardtanh from 0 to 6."""
    found = context.nodes.get(node.name)
    is_relu6 = found is not None and node.op == "hardtanh" and list(found.args[1:]) == [0.0, 6.0]
    return "ReLU6" if is_relu6 else node.op


def _fused_elsewhere(annotations: Annotations) -> Iterator[tuple[GraphNode, GraphNode, int]]:
    """Pairs with a rounding in between of a kind that the quantizer takes as one elsewhere, and how many times."""
    pairs = list(_pairs(annotations))
    fused = Counter((first.op, second.op) for first, second, rounded in pairs if not rounded)
    for first, second, rounded in pairs:
        if rounded and fused[first.op, second.op]:
            yield first, second, fused[first.op, second.op]


def _pairs(annotations: Annotations) -> Iterator[tuple[GraphNode, GraphNode, bool]]:
    """An annotated op and the activation that alone reads it; whether its output is rounded in between."""
    nodes = annotations.ground.nodes
    for first in nodes.values():
        if first.op not in _PRODUCERS or first.name not in annotations.ops or len(first.readers) != 1:
            continue
        second = nodes[first.readers[0]]
        if second.op in _ACTIVATIONS:
            rounded = spec_read(annotations, first.key, second.key) is not None
            # Between two ops in float nothing is rounded, either.
            if rounded or own_spec(annotations, (second.key, "")) is not None:
                yield first, second, rounded


_KERNEL = "the backend runs the two as one kernel"

RULE = Rule(
    id="unfused-pair",
    severity="warning",
    title="pairs of ops with a rounding in between that could run as one",
    why="What the second op throws away is rounded, too: before a ReLU6 the scale has to span values that are cut off "
    "right after. On EfficientNet-Lite0 fusing the 33 such pairs was worth 11 dB.",
    fix="pt2qa.reconfigure(pair, batches, target=...) tries it; by hand for all: overrides=pt2qa.OverridePlan("
    "pt2qa.overrides.fusions(capture, quantizer)), for one: "
    'pt2qa.OverridePlan((pt2qa.Edit("fuse", (first, second)),)), given to pt2qa.quantize',
    needs=("annotations",),
    find=find,
)
