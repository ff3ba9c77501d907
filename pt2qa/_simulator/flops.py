"""Floating-point operations: torch's formulas, and our own for ops without one on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import OpOverload, TorchDispatchMode, flop_registry
from pt2qa._simulator.products import ATTENTION, RECURRENT


class FlopCounter(TorchDispatchMode):
    """Adds up in ``total`` the flops of the ops that run under it; nested graphs (``cond``, loops) do not count.

    torch's own ``FlopCounterMode`` also counts by module, and fails if a nested graph runs without gradients.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func.overloadpacket) if isinstance(func, OpOverload) else None
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


def own_multiply_adds(op: str, tensors: Sequence[Tensor]) -> int | None:
    """The multiply-adds of an op for which torch has no formula on a CPU; None for all others.

    A recurrent op uses each of its weights once in every step, a bilinear op once in every row; attention multiplies
    queries by keys, and scores by values.
    """
    if op in RECURRENT:
        steps = tensors[0].numel() // tensors[0].shape[-1]
        return steps * sum(tensor.numel() for tensor in tensors[1:] if tensor.dim() == 2)
    if op in ATTENTION:
        query, key, value = tensors[:3]
        return query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    if op == "bilinear":
        return tensors[0].shape[:-1].numel() * tensors[2].numel()
    return None
