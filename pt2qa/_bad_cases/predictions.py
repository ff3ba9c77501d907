"""What both models predict for a sample, as far as an output shows it: a class with its score, or one number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from pt2qa._bad_cases.case_metrics import OutputPair
from pt2qa.errors import SelectionError

Prediction: TypeAlias = tuple[str, str, str, float, float]
"""The last five columns of a row, from ``target`` on."""

NOTHING: Final[Prediction] = ("", "", "", math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class ClassNames:
    """The names of a user's classes, all different; none if the user has none."""

    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, names: Sequence[str] | None) -> ClassNames:
        """Names that are there twice, such as the two cranes of ImageNet, get their numbers."""
        given = [str(name) for name in names or ()]
        seen = Counter(given)
        return cls(tuple(name if seen[name] == 1 else f"{name} ({number})" for number, name in enumerate(given)))

    def check(self, outputs: Sequence[OutputPair]) -> None:
        """Raises a SelectionError where no output is one of so many classes."""
        scores = [each for each in outputs if each.axis is not None and not each.problem]
        if self.names and not any(
            not each.reference.is_floating_point() or each.reference.shape[-1:] == (len(self.names),) for each in scores
        ):
            shapes = ", ".join(f"{each.name} {tuple(getattr(each.reference, 'shape', ()))}" for each in outputs)
            raise SelectionError(f"classes has {len(self.names)} names, and no output has as many scores: {shapes}.")

    def name(self, number: int, of: int) -> str:
        """That of a class, of so many; 0 if that is not known."""
        named = 0 <= number < len(self.names) and of in (0, len(self.names))
        return self.names[number] if named else str(number)


def predictions(output: OutputPair, targets: Tensor | None, names: ClassNames) -> list[Prediction]:
    """That of each sample; empty ones where the output is neither scores of classes, nor a class or number a sample.

    With a mask, that at the first position where another token wins, or else at the one with the lowest SQNR.
    """
    count = len(output.places)
    if output.problem or output.axis is None or output.reference.shape != output.quantized.shape or not count:
        return [NOTHING] * count
    reference, quantized = output.rows
    at = list(range(count))
    if output.layout is not None and output.keep is not None:
        at = [first if first >= 0 else worst for first, worst in output.positions]
        place = torch.arange(count), torch.tensor(at).clamp_(min=0)
        if reference.dim() != 3:
            return [NOTHING] * count
        reference, quantized = reference[place], quantized[place]
        targets = targets[place] if targets is not None and targets.dim() == 2 else None
    labels = [""] * count
    if targets is not None and targets.shape == (count,):
        classes = reference.shape[1] if reference.dim() == 2 else 0
        labels = [names.name(number, classes) if number >= 0 else "" for number in targets.tolist()]
    return [
        (label if ref[0] else "", ref[0], quant[0], ref[1], quant[1]) if number >= 0 else NOTHING
        for number, label, ref, quant in zip(
            at, labels, _predicted(reference, names), _predicted(quantized, names), strict=True
        )
    ]


def _predicted(value: Tensor, names: ClassNames) -> list[tuple[str, float]]:
    """The class and the score of each sample; without the one or the other, or both, as ``value`` has them."""
    wide: Any = value.reshape(len(value), -1)
    if value.dim() > 2 or value.is_complex() or not wide.shape[1]:
        return [("", math.nan)] * len(value)
    if wide.shape[1] == 1:
        plain = wide[:, 0].tolist()
        return [("", each) if value.is_floating_point() else (names.name(int(each), 0), math.nan) for each in plain]
    if not value.is_floating_point():
        return [("", math.nan)] * len(value)
    scores, classes = (each.tolist() for each in wide.max(1))
    found = zip(scores, classes, strict=True)
    return [("" if math.isnan(score) else names.name(number, wide.shape[1]), score) for score, number in found]
