"""A survey of the first batch: each op's flops and output size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.flops import count_flops
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator


@dataclass(frozen=True, slots=True)
class Survey:
    """Results of one forward of the reference: by step, ``flops`` (without sites) and ``elements`` of the value."""

    samples: int
    flops: dict[int, int]
    elements: dict[int, int]


def survey(simulator: Simulator, values: Sequence[Any]) -> Survey:
    """Runs the reference once."""
    elements: dict[int, int] = {}

    def visit(step: Step, value: Any) -> None:
        elements[step.index] = sum(leaf.numel() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))

    flops, _ = count_flops(simulator, values, visit)
    return Survey(count_samples(list(values)), flops, elements)
