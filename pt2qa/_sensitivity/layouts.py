"""Memory layout of each op: channels last for convolutions and the ops between them, contiguous for the rest.

With channels last, a forward and a backward pass take about half the time on CPUs, since oneDNN need not reorder.
Results differ in the last bits, which is fine for an estimate; the exact method computes what the simulator computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pt2qa._graph.handles import op_of
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Values

_ANY_LAYOUT = {
    *("relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "elu", "leaky_relu", "tanh", "clamp"),
    *("add", "sub", "mul", "div", "cat", "batch_norm", "dropout", "clone", "mean", "gelu"),
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d", "upsample_bilinear2d"),
}


def laid_out(step: Step, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() != 4 or value.layout != torch.strided:
        return value
    name = op_of(step.function)
    if name == "conv2d":
        return value.contiguous(memory_format=torch.channels_last)
    return value if name in _ANY_LAYOUT else value.contiguous()


def laid_out_inputs(step: Step, env: Values) -> Mapping[int, Any]:
    """The inputs of an op by slot, in the layout of the op; constants are unchanged."""
    constants = {slot: env[slot] for slot in step.constants}
    return constants | {slot: laid_out(step, env[slot]) for slot in step.reads}


def has_channels_last(value: Tensor) -> bool:
    """Whether a tensor is channels last in memory, and not also contiguous."""
    return value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
