"""Annotations against what the backend takes."""

from __future__ import annotations

from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa.overrides.broken_lines import BrokenLine
from pt2qa.plugins import Found
from pt2qa.plugins.backend_spec import TensorSpec
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="annotations that the backend does not support",
    why="What a kernel does not support fails when the model is lowered, stays in float or, worse, runs with the "
    "kernel's own zero point, channel axis or range instead of the calibrated ones. The findings quote the plug-in's "
    "spec.",
    fix="annotate what the line says",
)
def backend_spec(context: CheckContext) -> Iterator[Found]:
    """A warning if only accuracy is lost."""
    for broken in context.broken_lines:
        mild = broken.differs in (("range",), ("fusion",))
        yield Found(broken.name, str(broken), "warning" if mild else None, _fix(broken))


def _fix(broken: BrokenLine) -> str:
    line = broken.line
    if line.part == "scales":
        return "in the quantizer, give all but the first input, and the output, SharedQuantizationSpec((input, node))"
    if line.part == "fused":
        return f"in the quantizer, annotate the output of the activation, and not that of the {line.op} before it"
    spec = line.takes[0]
    if spec.quant_min is None and spec.dtype == "float32":
        return f"in the quantizer, leave the {line.part} of the {line.op} out of input_qspec_map"
    return f"in the quantizer, give it QuantizationSpec({_arguments(spec)})"


def _arguments(spec: TensorSpec) -> str:
    """A spec as the arguments of torchao's class, without its observer."""
    found = [f"torch.{spec.dtype}"]
    if spec.quant_min is not None:
        scales = "per_tensor" if spec.axis is None else "per_channel"
        found += [f"quant_min={spec.quant_min}", f"quant_max={spec.quant_max}"]
        found += [f"qscheme=torch.{scales}_{spec.scheme}"]
        found += [f"ch_axis={spec.axis}"] if spec.axis is not None else []
        found += ["is_dynamic=True"] if spec.dynamic else []
    return ", ".join(found)
