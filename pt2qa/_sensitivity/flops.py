"""Floating-point operations of each op, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pt2qa._sensitivity.layouts import laid_out_inputs
from pt2qa._simulator.flops import FlopCounter, own_multiply_adds
from pt2qa._simulator.products import PRODUCTS, arguments_of
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator, Values


def count_flops(
    simulator: Simulator, values: Sequence[Any], visit: Callable[[Step, Any], None] = lambda step, value: None
) -> tuple[dict[int, int], Any]:
    """Runs the reference once; returns the counts by step number, and the graph's outputs.

    A multiply-add counts two, an op without a formula zero, over all samples.  ``visit`` must not keep the values.

    Source:
        the formulas are in the registry of ``torch.utils.flop_counter``.
    """
    counting = _Counting(simulator.program)
    outputs = counting.run(values, on=False, visit=visit)
    return counting.found, outputs


class _Counting(Simulator):
    """Counts the flops of each op that it runs."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.counter = FlopCounter()
        self.found: dict[int, int] = {}

    def call(self, step: Step, env: Values, reuse: bool) -> Any:
        before = self.counter.total
        # Count before the run: the op may overwrite its first input.
        own = _own_flops(step, env)
        with self.counter:
            result = super().call(step, laid_out_inputs(step, env), reuse)
        self.found[step.index] = self.counter.total - before if own is None else own
        return result


def _own_flops(step: Step, env: Values) -> int | None:
    """The FLOPs of an op for which torch has no formula on a CPU; None for other ops."""
    if step.op not in PRODUCTS:
        return None
    tensors = [value for _, slot in arguments_of(step) if isinstance(value := env[slot], Tensor)]
    macs = own_multiply_adds(step.op, tensors)
    return None if macs is None else 2 * macs
