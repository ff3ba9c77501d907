"""A look at the first batch: what each op computes and how much it returns, and which values keep samples apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.flops import count_flops
from pt2qa._sensitivity.samples import marks, with_other_first_sample
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator


@dataclass(frozen=True, slots=True)
class Survey:
    """What one forward of the reference told; its first sample was another one than in the batch.

    By step, ``flops`` (without sites) and ``elements`` of the value; by slot, ``marks`` of the values that were asked
    for, see :func:`pt2qa._sensitivity.samples.marks`; ``outputs`` of the graph.
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
