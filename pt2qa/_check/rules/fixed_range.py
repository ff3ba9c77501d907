"""Ops with a known range whose scale is calibrated all the same."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import spec_read
from pt2qa.plugins import DoesNotApplyError, Found, Rule

FIXED = {
    **dict.fromkeys(("softmax", "_softmax", "sigmoid", "hardsigmoid"), "1/256"),
    "tanh": "1/128",
}
"""The scale that covers an op's range with 8 bits; int8 kernels of XNNPACK, TFLite and CMSIS-NN ask for it."""


def find(context: CheckContext) -> Iterator[Found]:
    """Outputs of softmax, sigmoid and tanh that are rounded to 8 bits with a scale from calibration."""
    annotations = context.annotations
    ops = [node for node in annotations.ground.nodes.values() if node.op in FIXED]
    if not ops:
        raise DoesNotApplyError("to models without softmax, sigmoid or tanh")
    for node in ops:
        specs = [spec_read(annotations, node.key, reader) for reader in (*node.readers, "")]
        calibrated = [spec for spec in specs if spec is not None and not _is_settled(spec)]
        if calibrated:
            yield Found(node.name, f"the output of {node.op} has a calibrated scale; {FIXED[node.op]} covers its range")


def _is_settled(spec: object) -> bool:
    """Whether a scale needs no calibration, or the spec has more than 8 bits."""
    wide = getattr(getattr(spec, "dtype", None), "itemsize", 1) > 1
    return hasattr(spec, "scale") or bool(getattr(spec, "is_dynamic", False)) or wide


RULE = Rule(
    id="fixed-range",
    severity="note",
    title="a calibrated scale where the range is known",
    why="The range follows from the op, so that data can only make it too small: what calibration did not see is cut "
    "off. Several int8 kernels take the fixed scale alone.",
    fix="in the quantizer, annotate the output with FixedQParamsQuantizationSpec; without one, calibrate on data that "
    "reaches both ends",
    needs=("annotations",),
    find=find,
)
