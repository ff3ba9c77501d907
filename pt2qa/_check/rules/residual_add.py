"""Sums and concatenations whose branches are not treated alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import differing, spec_read
from pt2qa.overrides import Annotations
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import GraphNode
from pt2qa.plugins import DoesNotApplyError, Found, Rule

_JOINS = ("add", "sub", "mul", "cat", "stack")


def find(context: CheckContext) -> Iterator[Found]:
    """Annotated joins that read one branch rounded and another in float, or rounded in another way."""
    annotations = context.annotations
    joins = [node for node in annotations.ground.nodes.values() if node.op in _JOINS and node.name in annotations.ops]
    if not joins:
        raise DoesNotApplyError("to models without annotated sums or concatenations")
    for node in joins:
        branches = [annotations.ground.nodes[key] for key in node.inputs]
        branches = [branch for branch in branches if branch.is_tensor and not branch.constant]
        specs = {branch.name: spec_read(annotations, branch.key, node.key) for branch in branches}
        rounded = [spec for spec in specs.values() if spec is not None]
        in_float = [
            branch.name
            for branch in branches
            if specs[branch.name] is None and not _is_fused(annotations, branch, node)
        ]
        if rounded and in_float:
            yield Found(node.name, f"one branch of the {node.op} is rounded, and {', '.join(in_float)} is not")
        elif attributes := _differing(rounded):
            yield Found(node.name, f"the branches of the {node.op} are rounded with another {' and '.join(attributes)}")


def _is_fused(annotations: Annotations, branch: GraphNode, node: GraphNode) -> bool:
    """Whether a branch stays in float as its op and the join are one kernel, as x86 has conv + add."""
    if branch.readers != (node.key,):
        return False
    if branch.op in BATCH_NORMS and branch.name not in annotations.ops:
        # QAT keeps the batch norm between the two, and annotates the ops around it.
        return _is_fused(annotations, annotations.ground.nodes[next(iter(branch.inputs))], branch)
    return branch.name in annotations.ops


def _differing(specs: list[Any]) -> tuple[str, ...]:
    """What any of the specs has otherwise than the first, scales aside."""
    names = dict.fromkeys(name for other in specs[1:] for name in differing(specs[0], other))
    return tuple(name for name in names if name not in ("scale", "zero_point"))


RULE = Rule(
    id="residual-add",
    severity="warning",
    title="branches of a sum or concatenation that are not rounded alike",
    why="A backend has int8 kernels for operands of one kind: it computes such an op in float, and the rounding of the "
    "one branch is error without gain.",
    fix="annotate both branches in the quantizer, with the same dtype and scheme; or keep the op in float: "
    'pt2qa.Edit("float", (name,))',
    needs=("annotations",),
    find=find,
)
