"""Labels that flip: right in the reference and wrong in the quantized model, or vice versa."""

from __future__ import annotations

import operator
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from pt2qa._bad_cases.case_metrics import Scores
from pt2qa._bad_cases.output_pairs import OutputPair
from pt2qa._bad_cases.rows import LabelCounts
from pt2qa._metrics import float64
from pt2qa.errors import BatchError


def as_targets(targets: Any) -> Tensor:
    tensor = torch.as_tensor(targets)
    if tensor.is_floating_point() or tensor.is_complex():
        raise BatchError(
            f"targets_of returned {str(tensor.dtype).removeprefix('torch.')} values; expected integer class numbers."
        )
    return tensor


def count_labels(output: OutputPair, targets: Tensor) -> tuple[LabelCounts, Scores] | None:
    """How often each model is right, and the number of labels that each sample loses.

    The output must hold integers in the shape of the targets, or have an additional last axis with the score of each
    class; else nothing is counted.  Negative targets are ignored, as in losses that ignore -100.
    """
    reference, quantized = (_classes(value, targets) for value in (output.reference, output.quantized))
    if output.problem or reference is None or quantized is None:
        return None
    targets = targets.to(reference.device)
    counted = targets >= 0
    ref_right, quant_right = ((found == targets) & counted for found in (reference, quantized))
    lost, gained = ref_right & ~quant_right, quant_right & ~ref_right
    counts = LabelCounts(output.name, *(int(mask.sum()) for mask in (counted, ref_right, quant_right, lost, gained)))
    by_sample = output.axis is not None and targets.dim() > output.axis
    if by_sample and targets.shape[output.axis] == len(output.places):  # type: ignore[index]  # by_sample says it is one
        numbers = lost.movedim(output.axis, 0).flatten(1).sum(1) if lost.dim() > 1 else lost  # type: ignore[arg-type]
        return counts, Scores(output.places, float64(numbers).tolist(), [""] * len(output.places))
    return counts, Scores([-1], [float(counts.lost)], [""])


def merged(one: LabelCounts, other: LabelCounts) -> LabelCounts:
    return LabelCounts(one.output, *map(operator.add, astuple(one)[1:], astuple(other)[1:]))


def _classes(value: Any, targets: Tensor) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    if value.shape == targets.shape and not value.is_floating_point():
        return value
    if value.is_floating_point() and value.dim() == targets.dim() + 1 and value.shape[:-1] == targets.shape:
        return value.argmax(-1)
    return None
