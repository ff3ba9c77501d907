"""Ops whose gradient is one kernel, called for all vectors without an autograd graph.

A gradient with no other reader is overwritten: a fresh tensor of tens of megabytes costs several times as much as the
kernel, since the system allocates its memory page by page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2qa._simulator.program import Slot, Step
from pt2qa._simulator.simulator import Values

_aten = torch.ops.aten

TOGETHER = 8 << 20
"""Maximum bytes of a convolution's gradients that are copied into one batch: for small ones, reordering the weights
takes as long as multiplying by them."""

Formula = Callable[[Step, Values, list[Tensor], bool], list[Tensor]]
"""Maps a step, its input values, the gradients of its output for each vector, and whether these may be overwritten, to
the gradients of its first input.  The result has no other reader."""


def formula_of(step: Step, env: Values) -> Formula | None:
    """The backward formula of an op that reads one value; None if autograd is needed."""
    formula = _FORMULAS.get(step.function)
    if formula is None or step.kwargs or len(step.reads) != 1 or step.args[0] != Slot(step.reads[0]):
        return None
    value = env[step.reads[0]]
    return formula if value.is_floating_point() and (formula is not _conv2d or value.dim() == 4) else None


_DEFAULTS: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups of a convolution."""


def _relu(step: Step, env: Values, gradients: list[Tensor], may_overwrite: bool) -> list[Tensor]:
    value = env[step.reads[0]]
    if not may_overwrite:
        return [_aten.threshold_backward(gradient, value, 0) for gradient in gradients]
    return [_aten.threshold_backward(gradient, value, 0, grad_input=gradient) for gradient in gradients]


def _hardtanh(step: Step, env: Values, gradients: list[Tensor], may_overwrite: bool) -> list[Tensor]:
    value, limits = env[step.reads[0]], (*step.args[1:], *(-1, 1)[len(step.args) - 1 :])
    if not may_overwrite:
        return [_aten.hardtanh_backward(gradient, value, *limits) for gradient in gradients]
    return [_aten.hardtanh_backward(gradient, value, *limits, grad_input=gradient) for gradient in gradients]


def _conv2d(step: Step, env: Values, gradients: list[Tensor], may_overwrite: bool) -> list[Tensor]:
    shape, weight = env[step.reads[0]].shape, env[step.args[1].number]
    stride, padding, dilation, groups = (*step.args[3:], *_DEFAULTS[max(0, len(step.args) - 3) :])
    largest = max(shape.numel(), gradients[0].numel()) * weight.element_size()
    some = max(1, TOGETHER // largest)
    found: list[Tensor] = []
    for start in range(0, len(gradients), some):
        own = gradients[start : start + some]
        # The kernel uses only the shape and layout of the input, so its memory is never written.
        size = (len(own) * shape[0], *shape[1:])
        like: Any = torch.empty(size, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
        output = torch.cat(own) if len(own) > 1 else own[0]
        arguments = (None, stride, padding, dilation, False, [0, 0], groups, [True, False, False])
        found += _aten.convolution_backward(output, like, weight, *arguments)[0].split(shape[0])
    return found


_FORMULAS: dict[Any, Formula] = {
    _aten.relu.default: _relu,
    _aten.hardtanh.default: _hardtanh,
    _aten.conv2d.default: _conv2d,
}
