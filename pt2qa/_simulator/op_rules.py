"""What the lowering must know about ops: which write in place, which allocate their output, which extend a region."""

from __future__ import annotations

import operator
from typing import Any

import torch

from pt2qa._graph.internals.torch import OpOverload

_ALLOCATING = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
    *("linear", "addmm", "bmm", "matmul", "add", "sub", "mul", "div", "mean", "softmax", "layer_norm", "cat", "clamp"),
    *("relu", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu", "elu", "leaky_relu", "tanh"),
    *("batch_norm", "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d"),
}
"""Composite ATen ops and others whose output certainly shares no memory with an input."""

_IN_PLACE = {"relu", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "elu", "leaky_relu", "tanh", "clamp"}
"""Unary pointwise ops whose in-place spelling gives equal bits."""

_CUTTING = {"relu", "hardtanh", "clamp"}
"""Pointwise ops that keep the order of values to the last bit."""

_EPILOGUES = _IN_PLACE | {"gelu", "batch_norm", "_native_batch_norm_legit_no_training", "dropout", "prelu", "relu6"}
"""Ops that backends compute together with the op before them."""

_COPIES = {"clone", "_unsafe_view", "lift_fresh_copy", "_to_copy"}
"""Ops whose result holds the values of their argument without being declared a view of it."""

_RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "multinomial", "normal", "dropout"}
"""Ops of which two calls may differ."""


def op_name(target: Any) -> str:
    """``aten.relu_.default`` → ``relu``; the name of any other callable."""
    if isinstance(target, OpOverload):
        return _plain(target.overloadpacket.__name__)
    return _plain(str(getattr(target, "__name__", target)))


def _plain(name: str) -> str:
    """Without the underscore of the in-place spelling."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def mutates_first_argument(target: Any) -> bool:
    """Whether the op writes to the memory of its first argument; ``detach_`` changes no value, whatever it declares."""
    if not isinstance(target, OpOverload) or target is torch.ops.aten.detach_.default:
        return False
    arguments = target._schema.arguments
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)


def functional_spelling(target: OpOverload) -> OpOverload | None:
    """The overload that computes the same without writing: ``aten.relu_.default`` → ``aten.relu.default``."""
    packet = getattr(getattr(torch.ops, target.namespace), _plain(target.overloadpacket.__name__), None)
    overload = getattr(packet, target._overloadname, None)
    return overload if isinstance(overload, OpOverload) and not overload._schema.is_mutable else None


def in_place_spelling(target: Any) -> OpOverload | None:
    """The in-place overload of a unary op in :data:`_IN_PLACE`."""
    if not is_pointwise(target):
        return None
    packet = getattr(torch.ops.aten, target.overloadpacket.__name__ + "_", None)
    overload = getattr(packet, target._overloadname, None)
    return overload if isinstance(overload, OpOverload) else None


def is_pointwise(target: Any) -> bool:
    """Whether an op computes each element from that element alone; a clamp by a tensor does not."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or op_name(target) not in _IN_PLACE:
        return False
    return sum("Tensor" in str(argument.type) for argument in target._schema.arguments) == 1


def keeps_order(target: Any) -> bool:
    """Whether a pointwise op turns the range of its input into the range of its output."""
    return is_pointwise(target) and op_name(target) in _CUTTING


def allocates(target: Any) -> bool:
    """Whether the output certainly owns its memory."""
    return isinstance(target, OpOverload) and target.namespace == "aten" and op_name(target) in _ALLOCATING


def only_moves(target: Any) -> bool:
    """Whether the values of the result are those of the first argument, or some of them."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns)
    return is_view or op_name(target) in _COPIES


def is_epilogue(name: str) -> bool:
    """Whether an op belongs to the region of the op that feeds it."""
    return name in _EPILOGUES


def is_random(target: Any) -> bool:
    """Whether two calls with equal arguments may differ."""
    return op_name(target) in _RANDOM


def returns_view(target: OpOverload) -> bool:
    """Whether the schema declares that the output shares memory with an input."""
    return any(result.alias_info is not None for result in target._schema.returns)


def may_share_memory(target: Any) -> bool:
    """Whether the output may be a view of an input: declared as one, or a composite op that may return its input."""
    if not isinstance(target, OpOverload):
        return True
    if returns_view(target):
        return True
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return bool(composite) and not allocates(target)
