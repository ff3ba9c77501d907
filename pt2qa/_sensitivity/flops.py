"""Floating-point operations and output size of each op, from one run of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.layouts import laid_out_inputs
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.flops import FlopCounter, own_multiply_adds
from pt2qa._simulator.products import PRODUCTS, arguments_of
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator, Values


@dataclass(frozen=True, slots=True)
class Survey:
    """By step, the ``flops`` over all samples (a multiply-add counts two) and the ``elements`` of its value."""

    samples: int
    flops: dict[int, int]
    elements: dict[int, int]


def survey(simulator: Simulator, values: Sequence[Any]) -> Survey:
    """Runs the reference once.

    Source:
        the formulas are in the registry of ``torch.utils.flop_counter``.
    """
    counting = _Counting(simulator.program)
    elements: dict[int, int] = {}

    def visit(step: Step, value: Any) -> None:
        elements[step.index] = sum(leaf.numel() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))

    counting.run(values, on=False, visit=visit)
    return Survey(count_samples(list(values)), counting.flops, elements)


class _Counting(Simulator):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.counter = FlopCounter()
        self.flops: dict[int, int] = {}

    def call(self, step: Step, env: Values, reuse: bool) -> Any:
        before = self.counter.total
        # Count before the run: the op may overwrite its first input.
        own = _own_flops(step, env)
        with self.counter:
            result = super().call(step, laid_out_inputs(step, env), reuse)
        self.flops[step.index] = self.counter.total - before if own is None else own
        return result


def _own_flops(step: Step, env: Values) -> int | None:
    """The FLOPs of an op for which torch has no formula on a CPU; None for other ops."""
    if step.op not in PRODUCTS:
        return None
    tensors = [value for _, slot in arguments_of(step) if isinstance(value := env[slot], Tensor)]
    macs = own_multiply_adds(step.op, tensors)
    return None if macs is None else 2 * macs
