"""A survey of the first batch: each op's flops and output size, and which values keep samples independent.

Dependence between samples shows in a run with the first sample replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.flops import count_flops
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator


@dataclass(frozen=True, slots=True)
class Survey:
    """Results of one forward of the reference, with the first sample of the batch replaced.

    By step, ``flops`` (without sites) and ``elements`` of the value; by slot, ``marks`` of the requested values, see
    :func:`marks`; ``outputs`` of the graph.
    """

    samples: int
    flops: dict[int, int]
    elements: dict[int, int]
    marks: dict[int, Tensor | None]
    outputs: Any


def survey(simulator: Simulator, values: Sequence[Any], marked: Collection[int]) -> Survey:
    """Runs the reference once, and marks the values of some slots."""
    samples = count_samples(list(values))
    elements: dict[int, int] = {}
    found: dict[int, Tensor | None] = {}

    def visit(step: Step, value: Any) -> None:
        elements[step.index] = sum(leaf.numel() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        if step.out in marked:
            found[step.out] = marks(value, samples)

    flops, outputs = count_flops(simulator, with_other_first_sample(values), visit)
    return Survey(samples, flops, elements, found, outputs)


def with_other_first_sample(values: Sequence[Any]) -> list[Any]:
    """The inputs with the first sample replaced by the second, reversed; other samples unchanged."""
    samples = count_samples(list(values))
    return [_with_other_first_sample(value) if _has_samples(value, samples) else value for value in values]


def marks(value: Any, samples: int) -> Tensor | None:
    """A hash of the bits of each sample; None if a value has no sample axis.

    Equal bits give equal hashes; different bits collide once in 2³² times, or if they are the same in another order.
    """
    if not _has_samples(value, samples) or value.is_complex() or not value.numel():
        return None
    return torch.hash_tensor(value.detach().unsqueeze(-1), tuple(range(1, value.dim() + 1)))


def is_independent(mark: Tensor | None, other: Tensor | None) -> bool:
    """Whether a value has a sample axis on which only the first sample changed, from its marks before and after.

    An unchanged first sample proves nothing, so it does not count as independent.
    """
    if mark is None or other is None or mark.shape != other.shape:
        return False
    return torch.equal(mark[1:], other[1:]) and not torch.equal(mark[0], other[0])


def _has_samples(value: Any, samples: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples > 1


def _with_other_first_sample(value: Tensor) -> Tensor:
    changed = value.detach().clone()
    second = value.detach()[1]
    changed[0] = second.flip(tuple(range(second.dim()))) if second.dim() else second
    return changed
