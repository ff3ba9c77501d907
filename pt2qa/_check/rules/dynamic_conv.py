"""Convolutions with scales that are computed anew for each input."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import spec_read
from pt2qa._simulator.products import CONVOLUTIONS
from pt2qa.plugins import DoesNotApplyError, Found, Rule
from pt2qa.plugins.abilities import own_method


def find(context: CheckContext) -> Iterator[Found]:
    """Convolutions with a dynamic input, unless the plug-in says that its backend has them."""
    annotations = context.annotations
    nodes = annotations.ground.nodes
    convolutions = [node for node in nodes.values() if node.op in CONVOLUTIONS]
    if not convolutions:
        raise DoesNotApplyError("to models without convolutions")
    declares = own_method(context.plugin, "unsupported_reason") is not None
    for node in convolutions:
        specs = [spec_read(annotations, key, node.key) for key in node.inputs if not nodes[key].constant]
        refusal = annotations.ground.refusals.get(("dynamic", node.key), "")
        if any(getattr(spec, "is_dynamic", False) for spec in specs) and (refusal or not declares):
            yield Found(node.name, refusal or f"the scale of the {node.op}'s input is computed anew for each batch")


RULE = Rule(
    id="dynamic-conv",
    severity="warning",
    title="convolutions with dynamic scales",
    why="Few backends have a kernel for it: elsewhere it runs in float between rounding ops. One scale serves a whole "
    "batch, so that a prediction depends on what it is batched with; accuracy was seen to drop (ao#4292).",
    fix="quantize convolutions statically, with calibration, and keep dynamic scales for linears: many "
    "quantizers take a configuration for one type of op",
    needs=("annotations",),
    find=find,
)
