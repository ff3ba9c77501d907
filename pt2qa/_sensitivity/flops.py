"""Floating-point operations of each op, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pt2qa._graph.internals.torch import OpOverload
from pt2qa._sensitivity.layouts import laid_out_inputs
from pt2qa._simulator.products import PRODUCTS, arguments_of, own_multiply_adds
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Simulator, Values


def count_flops(
    simulator: Simulator, values: Sequence[Any], visit: Callable[[Step, Any], None] = lambda step, value: None
) -> tuple[dict[int, int], Any]:
    """Runs the reference once and counts, by step number; a multiply-add counts two, an op without a formula nothing.

    Args:
        simulator: runs the reference.
        values: the inputs, flat; the counts are for all of their samples.
        visit: called with every step and its value, which it must not keep.

    Returns:
        The counts, and the graph's outputs.

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
        self.counter = _FlopCounter()  # type: ignore[no-untyped-call]
        self.found: dict[int, int] = {}

    def call(self, step: Step, env: Values, reuse: bool) -> Any:
        before = self.counter.total
        # Counted before it runs: the op may overwrite its first input.
        own = _own_flops(step, env)
        with self.counter:
            result = super().call(step, laid_out_inputs(step, env), reuse)
        self.found[step.index] = self.counter.total - before if own is None else own
        return result


def _own_flops(step: Step, env: Values) -> int | None:
    """The FLOPs of an op that torch has no formula for on a CPU; None for other ops."""
    if step.op not in PRODUCTS:
        return None
    tensors = [value for _, slot in arguments_of(step) if isinstance(value := env[slot], Tensor)]
    macs = own_multiply_adds(step.op, tensors)
    return None if macs is None else 2 * macs


class _FlopCounter(TorchDispatchMode):
    """Adds up the flops of what runs under it; nested graphs (``cond``, loops) count nothing.

    torch's own ``FlopCounterMode`` counts by module too, and fails where a nested graph runs without gradients.
    """

    supports_higher_order_operators = True
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        if formula is None and isinstance(func, OpOverload):
            # A composite op, such as conv2d, is made of ops that may have a formula.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result
