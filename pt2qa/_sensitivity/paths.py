"""Where the error of a site is projected: behind the first nonlinear ops that it passes, not at the site.

A gradient misses what an error changes in a nonlinear op: to first order, a relu6 that clips every reference value
blocks even a large error that in fact passes.  So the error is followed exactly through the ops that alone read it, up
to the second op that does arithmetic, and projected behind the last nonlinear one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pt2qa._graph.handles import op_of
from pt2qa._sensitivity.gradients import float_tensors, laid_out_inputs
from pt2qa._simulator import op_rules
from pt2qa._simulator.fused import is_elementwise
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.products import PRODUCTS
from pt2qa._simulator.program import Program, Slot, Step
from pt2qa._simulator.simulator import Simulator, Values

_LINEAR = {
    *("add", "sub", "mean", "sum", "avg_pool2d", "adaptive_avg_pool2d", "batch_norm", "dropout", "cat", "pad"),
    *("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "select", "slice", "expand"),
    *("contiguous", "clone", "upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle"),
}
_NONLINEAR = {
    *("relu", "relu6", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "elu", "leaky_relu", "tanh", "clamp"),
    *("gelu", "prelu", "softmax", "layer_norm", "max_pool2d", "mul", "div", "mish", "softplus"),
}

PIECE = 2 << 20
"""Bytes of the largest value along a path up to which samples are followed together."""


@dataclass(frozen=True, slots=True)
class Path:
    """From the site's step, or the op that reads the ``constant`` in this slot, to where its error is projected."""

    site: int
    start: Step
    constant: int | None
    steps: tuple[Step, ...]

    @property
    def end(self) -> Step:
        """The step at whose output the error is projected."""
        return self.steps[-1] if self.steps else self.start

    @property
    def source(self) -> int:
        return self.start.reads[0] if self.constant is None else self.constant

    def by_sample(self, values: Values, samples: int) -> bool:
        """Whether it can be followed for some samples at a time: one value leads to its end, through ops of samples."""
        if self.constant is None and not is_elementwise(self.start.function):
            return False
        steps = (self.start, *self.steps)
        slots = {slot for step in steps for slot in (*step.reads, step.out)}
        return all(
            len(step.reads) == 1 and (step.op in ("conv2d", "linear") or op_rules.is_pointwise(step.function))
            for step in steps
            if step.site is None
        ) and all(values[slot].dim() and len(values[slot]) == samples for slot in slots)


def plan_paths(program: Program) -> tuple[Path, ...]:
    """A path for each site and each op that reads a quantized constant; duplicates have none."""
    alone = {slot: own[0] for slot, own in program.readers().items() if len(own) == 1}
    for slot in slots_in(program.outputs):
        alone.pop(slot, None)
    for step in program.steps:
        if step.duplicate_of is not None:
            alone.pop(step.duplicate_of, None)
    site_of = {constant.slot: constant.site for constant in program.constants if constant.site is not None}
    paths = []
    for step in program.steps:
        if step.site is not None and step.duplicate_of is None:
            paths.append(Path(step.site, step, None, _steps_after(step, alone)))
        for slot in step.constants:
            if slot in site_of:
                paths.append(Path(site_of[slot], step, slot, _steps_after(step, alone)))
    return tuple(paths)


def _steps_after(start: Step, alone: dict[int, Step]) -> tuple[Step, ...]:
    found: list[Step] = []
    kept, heavy = 0, start.site is None
    step = alone.get(start.out)
    while step is not None and not step.mutates:
        name = op_of(step.function) if step.site is None else ""
        if step.site is None and name in PRODUCTS:
            if heavy:
                break
            heavy = True
        elif step.site is None and name not in _LINEAR and name not in _NONLINEAR:
            break
        found.append(step)
        if name in _NONLINEAR:
            kept = len(found)
        step = alone.get(step.out)
    return tuple(found[:kept])


def pieces_of(path: Path, reference: Values, samples: int) -> Iterator[tuple[slice | None, Values]]:
    """The values along a path, for some samples at a time; for all at once, with None, if it does not go by sample.

    What is computed from few stays in the CPU's cache, and in memory that need not be asked of the system.
    """
    if not path.by_sample(reference, samples):
        yield None, reference
        return
    steps = (path.start, *path.steps)
    constants = {slot: reference[slot] for step in steps for slot in step.constants}
    values = {slot: reference[slot] for step in steps for slot in (*step.reads, step.out)}
    count = max(1, PIECE * samples // max(1, *(value.nbytes for value in values.values())))
    for first in range(0, samples, count):
        own = slice(first, first + count)
        yield own, {**constants, **{slot: value[own] for slot, value in values.items()}}


def error_at_end(path: Path, simulator: Simulator, reference: Values, changed: Any) -> list[Tensor]:
    """How each tensor at the end of a path changes with the value of its site, whose memory is reused."""
    # Whether ``changed`` owns its memory: a constant may be the quantized model's own.
    slot, own = path.source, path.constant is None
    for step in (path.start, *path.steps):
        if step.site is None:
            env = {read: reference[read] for read in (*step.reads, *step.constants)}
            env[slot] = changed
            # The in-place variant of a step writes to its first argument.
            reuse = own and step.args[:1] == (Slot(slot),)
            changed = simulator.call(step, laid_out_inputs(step, env), reuse)
            own = own or op_rules.allocates(step.function)
        slot = step.out
    own = own and isinstance(changed, Tensor)
    pairs = zip(float_tensors(changed), float_tensors(reference[slot]), strict=True)
    return [a.sub_(b) if own else a - b for a, b in pairs]
