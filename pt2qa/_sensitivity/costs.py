"""Estimated cost of each method for a batch, before it runs: the same figure in every run of the same call.

The unit is the floating-point operation.  An op costs its own, plus ``ELEMENT`` for each element that it writes and
``CALL`` for each call.  The constants are those of one CPU core.  Only the ratio of both methods counts, and near a tie
either will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.gradients import laid_out_inputs, tracked_slots
from pt2qa._sensitivity.paths import Path
from pt2qa._sensitivity.site_groups import SiteGroup, steps_behind
from pt2qa._simulator.batches import count_samples
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.products import FlopCounter, arguments_of, own_multiply_adds
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator, Values

ELEMENT = 100.0
"""Cost of an element that an op writes."""

CALL = 1e6
"""Cost of one call from Python."""

BACK = 1.7
"""Cost of an op's backward pass, as a multiple of the op itself, rather too much: one vector's pass takes 0.7 of a
forward on MobileNetV2 and 1.3 on four transformer layers, so near a tie the exact method is chosen."""

CLEARLY = 1.3
"""How many times costlier the exact method, which has no error, must be for projection to be chosen."""


@dataclass(frozen=True, slots=True)
class Survey:
    """By step, the ``flops`` over all samples (a multiply-add counts two) and the ``elements`` of its value."""

    samples: int
    flops: dict[int, int]
    elements: dict[int, int]


def survey(simulator: Simulator, values: Sequence[Any]) -> Survey:
    """Runs the reference once, with the formulas of ``torch.utils.flop_counter``."""
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
        tensors = [value for _, slot in arguments_of(step) if isinstance(value := env[slot], Tensor)]
        own = own_multiply_adds(step.op, tensors)
        with self.counter:
            result = super().call(step, laid_out_inputs(step, env), reuse)
        self.flops[step.index] = self.counter.total - before if own is None else 2 * own
        return result


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one batch, in floating-point operations: a reference run, the exact method, and projection, ``once`` and
    for ``each`` vector.
    """

    forward: float
    exact: float
    once: float
    each: float

    def projection(self, projections: int) -> float:
        return self.once + projections * self.each


def estimate(program: Program, places: Sequence[SiteGroup], paths: Sequence[Path], seen: Survey) -> Costs:
    write = [ELEMENT * seen.elements[step.index] + CALL for step in program.steps]
    ops = [0.0 if step.site is not None else seen.flops[step.index] + write[step.index] for step in program.steps]
    forward = sum(ops)
    two_runs = 2 * forward + sum(write[step.index] for step in program.steps if step.site is not None)
    elements = [seen.elements.get(program.producers.get(slot, -1), 0) for slot in set(slots_in(program.outputs))]
    outputs = ELEMENT * sum(elements) + CALL
    if program.may_share:
        exact = sum(sum(ops[index] for index in steps_behind(program, place)) + outputs for place in places)
    else:
        exact = len(places) * (forward + outputs)
    tracked = tracked_slots(program)
    each = BACK * sum(ops[step.index] for step in program.steps if step.out in tracked) + outputs
    once = two_runs
    for path in paths:
        at_end = write[path.end.index]
        rounded = 0.0 if path.start.site is None else write[path.start.index]
        once += sum(ops[step.index] for step in (path.start, *path.steps)) + rounded + at_end
        each += at_end
    return Costs(forward, two_runs + forward + exact, once, each)
