"""What both models predict for a sample, as far as an output shows it: a class with its score, or one number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from pt2qa._bad_cases.case_metrics import OutputPair
from pt2qa.errors import SelectionError

Prediction: TypeAlias = tuple[str, str, str, float, float]
"""The last five columns of a row, from ``target`` on."""

NOTHING: Final[Prediction] = ("", "", "", math.nan, math.nan)


def distinct(names: Sequence[str]) -> list[str]:
    """Names of classes, where those that are there twice, such as the two cranes of ImageNet, have their numbers."""
    seen = Counter(names)
    return [name if seen[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]


def check_names(names: Sequence[str], outputs: Sequence[OutputPair]) -> None:
    """Raises a SelectionError where no output has so many scores, or holds classes."""
    known = (each.reference for each in outputs if each.axis is not None and not each.problem)
    if names and not any(not each.is_floating_point() or each.shape[-1:] == (len(names),) for each in known):
        shapes = ", ".join(f"{each.name} {tuple(getattr(each.reference, 'shape', ()))}" for each in outputs)
        raise SelectionError(f"classes has {len(names)} names, and no output has as many scores: {shapes}.")


def predictions(output: OutputPair, targets: Tensor | None, names: Sequence[str]) -> list[Prediction]:
    """That of each sample; empty ones where the output is neither scores of classes, nor a class or number a sample.

    With a mask, that at the first position where another token wins, or else at the one with the lowest SQNR.
    """
    count = len(output.places)
    if output.problem or output.axis is None or output.reference.shape != output.quantized.shape:
        return [NOTHING] * count
    (reference, quantized), at = output.rows, list(range(count))
    if output.layout is not None and output.keep is not None:
        at = [first if first >= 0 else worst for first, worst in output.positions]
        if reference.dim() != 3:
            return [NOTHING] * count
        reference, quantized = _at(at, reference), _at(at, quantized)
        targets = None if targets is None or targets.dim() != 2 else _at(at, targets)
    right = [-1] * count if targets is None or targets.shape != (count,) else targets.tolist()
    size = reference.shape[1] if reference.dim() == 2 else 0
    labels = ["" if number < 0 else _name(number, size, names) for number in right]
    found = zip(at, labels, _predicted(reference, names), _predicted(quantized, names), strict=True)
    return [
        NOTHING if number < 0 else (label if ref[0] else "", ref[0], quant[0], ref[1], quant[1])
        for number, label, ref, quant in found
    ]


def _at(places: Sequence[int], value: Tensor) -> Tensor:
    return torch.stack([row[max(place, 0)] for place, row in zip(places, value, strict=True)])


def _predicted(value: Tensor, names: Sequence[str]) -> list[tuple[str, float]]:
    """The class and the score of each sample; without the one or the other, or both, as ``value`` has them."""
    size = value.shape[1] if value.dim() == 2 else 1
    if value.dim() > 2 or value.is_complex() or not size or (size > 1 and not value.is_floating_point()):
        return [("", math.nan)] * len(value)
    if size == 1:
        plain = value.flatten().tolist()
        return [("", each) if value.is_floating_point() else (_name(int(each), 0, names), math.nan) for each in plain]
    found = zip(*(each.tolist() for each in value.max(1)), strict=True)
    return [("" if math.isnan(score) else _name(number, size, names), score) for score, number in found]


def _name(number: int, size: int, names: Sequence[str]) -> str:
    """That of a class, of so many; 0 if that is not known."""
    return names[number] if 0 <= number < len(names) and size in (0, len(names)) else str(number)
