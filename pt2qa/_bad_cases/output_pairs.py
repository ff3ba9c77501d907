"""One output of both models on one batch, and its error sums sample by sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import ErrorSums, error_sums, float64
from pt2qa._simulator.outputs import leaf_names
from pt2qa._simulator.positions import LEADING, Layout

LARGE = 1 << 14
"""Elements in a sample above which one reduction per sample costs less than float64 copies of the whole batch."""


@dataclass(frozen=True)
class OutputPair:
    """Both models' values of one output, after post-processing.

    Attributes:
        axis: of the samples; None if the value belongs to the batch as a whole.
        problem: why the two cannot be compared.
        layout, keep: where the value has the axes of a mask, and which positions count; None if all do.
    """

    name: str
    reference: Any
    quantized: Any
    axis: int | None
    problem: str = ""
    layout: Layout | None = None
    keep: Tensor | None = None

    @property
    def places(self) -> list[int]:
        """Numbers of the samples; -1 for a batch as a whole."""
        return [-1] if self.axis is None else list(range(self.reference.shape[self.axis]))

    def counted(self, place: int) -> tuple[Tensor, Tensor]:
        """Both values of one sample, as far as they count: of shape (positions, ...) with a mask."""
        both = self.reference, self.quantized
        if self.axis is not None:
            both = self.reference.narrow(self.axis, place, 1), self.quantized.narrow(self.axis, place, 1)
        if self.layout is None or self.keep is None:
            return both
        keep = self.keep if self.axis is None else self.keep.narrow(0, place, 1)
        return self.layout.counted(both[0], keep), self.layout.counted(both[1], keep)

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """Of each sample, the first position where another class or token wins, and that with the lowest SQNR.

        -1 where there is none, or the value has no positions.
        """
        keep, both = self.keep, (self.reference, self.quantized)
        leads = self.layout in (LEADING, replace(LEADING, batch=None))  # (samples, positions, ...)
        if not leads or keep is None or self.axis != 0 or both[0].shape != both[1].shape:
            return [(-1, -1)] * len(self.places)
        reference, quantized = (float64(x).reshape(*keep.shape, -1) for x in both)
        winners = both if both[0].dim() == 2 else tuple(x.argmax(-1) for x in both)
        others = (winners[0] != winners[1]).reshape(*keep.shape, -1).any(-1)
        signal, noise = reference.square().sum(-1), (reference - quantized).square().sum(-1)
        ratio = torch.where(noise > 0, noise / signal, 0.0).masked_fill(~keep, 0.0)
        first = torch.where(others & keep, 1, 0)
        return [
            (int(wrong.argmax()) if bool(wrong.any()) else -1, int(noisy.argmax()) if bool(noisy.any()) else -1)
            for wrong, noisy in zip(first, ratio, strict=True)
        ]

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Both values with the samples first, of shape (samples, ...)."""
        axis = self.axis
        both = self.reference, self.quantized
        return tuple(x.unsqueeze(0) if axis is None else x.movedim(axis, 0) for x in both)

    @functools.cached_property
    def sums(self) -> list[ErrorSums]:
        """The error sums of each sample, equal to those of ``compare_layers`` for that sample alone."""
        if self.layout is not None:
            return [error_sums(*self.counted(place)) for place in self.places]
        reference, quantized = self.rows
        size = reference[:1].numel()
        if reference.is_complex() or quantized.is_complex() or size >= LARGE or not size:
            return [error_sums(ref, quant) for ref, quant in zip(reference, quantized, strict=True)]
        sums = _vectorised(float64(reference).reshape(-1, size), float64(quantized).reshape(-1, size))
        return [
            error_sums(reference[place], quantized[place]) if found is None else found
            for place, found in enumerate(sums)
        ]

    def nonfinite(self, place: int) -> bool:
        """Whether the quantized model returns NaN or an infinity where the reference is finite."""
        if self.problem or self.reference.shape != self.quantized.shape:
            return False
        whole = self.axis is not None and place < 0
        reference, quantized = (self.reference, self.quantized) if whole else self.counted(place)
        return bool((reference.isfinite() & ~quantized.isfinite()).any())


def output_pairs(
    reference: Any, quantized: Any, axis: int | None, size: int, layouts: Sequence[Layout | None], keep: Tensor | None
) -> Iterator[OutputPair]:
    """The outputs of both models on a batch of this size, leaf by leaf; without a batch axis, each as a whole.

    ``layouts`` are those of the leaves for the mask ``keep``, none if there is no mask.
    """
    names, left = leaf_names(reference), pytree.tree_leaves(reference)
    if leaf_names(quantized) != names:
        for name, ref in zip(names, left, strict=True):
            yield OutputPair(name, ref, None, None, "reference and quantized results are nested differently")
        return
    every = layouts or [None] * len(left)
    for name, ref, quant, layout in zip(names, left, pytree.tree_leaves(quantized), every, strict=True):
        ref, quant = _as_tensor(ref), _as_tensor(quant)
        if not isinstance(ref, Tensor) or not isinstance(quant, Tensor):
            yield OutputPair(name, ref, quant, None, f"{'None' if ref is None else type(ref).__name__} is not a tensor")
        else:
            both = axis is not None and all(x.dim() > axis and x.shape[axis] == size for x in (ref, quant))
            yield OutputPair(name, ref, quant, axis if both else None, layout=layout, keep=keep)


def _as_tensor(value: Any) -> Any:
    """A plain number, such as a count of boxes, as a tensor."""
    return torch.as_tensor(value) if isinstance(value, (bool, int, float)) else value


def _vectorised(ref: Tensor, quant: Tensor) -> list[ErrorSums | None]:
    """Sums of each row of float64 matrices; None for a row with a non-finite value."""
    difference = ref - quant
    absolute = difference.abs()
    pairs = (ref, ref), (difference, difference), (quant, quant), (ref, quant)
    columns = [*(torch.linalg.vecdot(*pair) for pair in pairs), absolute.sum(1), absolute.amax(1)]
    found: list[ErrorSums | None] = []
    for signal, noise, quant_signal, product, total, largest in torch.stack(columns, 1).tolist():
        finite = math.isfinite(signal + noise + quant_signal)
        found.append(ErrorSums(ref.shape[1], signal, noise, quant_signal, product, total, largest) if finite else None)
    return found
