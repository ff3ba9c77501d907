"""Properties of ops that the lowering needs: which write in place, allocate their output, or extend a region."""

from __future__ import annotations

import operator
from typing import Any

import torch

from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import OpOverload, arguments_of, is_composite, is_mutable, results_of, same_overload

_ALLOCATING = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
    *("linear", "addmm", "bmm", "matmul", "add", "sub", "mul", "div", "mean", "softmax", "layer_norm", "cat", "clamp"),
    *("relu", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu", "elu", "leaky_relu", "tanh"),
    *("batch_norm", "avg_pool2d", "adaptive_avg_pool2d", "max_pool2d"),
}
"""ATen ops, composite ones included, whose output is certain to share no memory with an input."""

_IN_PLACE = {"relu", "hardtanh", "hardswish", "hardsigmoid", "sigmoid", "silu", "elu", "leaky_relu", "tanh", "clamp"}
"""Unary pointwise ops whose in-place form gives equal bits."""

_MONOTONE = {"relu", "hardtanh", "clamp"}
"""Pointwise ops that keep the order of values to the last bit."""

EPILOGUES = _IN_PLACE | {"gelu", "batch_norm", "_native_batch_norm_legit_no_training", "dropout", "prelu", "relu6"}
"""Ops that backends fuse with the op before them."""

_COPIES = {"clone", "_unsafe_view", "lift_fresh_copy", "_to_copy"}
"""Ops whose result has the values of their argument, though it is not declared as a view of it."""

_RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "multinomial", "normal", "dropout"}
"""Ops whose result may differ from call to call."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""Ops that give memory as it is, for another op to write to."""


def mutates_first_argument(target: Any) -> bool:
    """Whether the op writes to its first argument; ``detach_`` declares so, but changes no value."""
    if not isinstance(target, OpOverload) or target is torch.ops.aten.detach_.default:
        return False
    arguments = arguments_of(target)
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)


def functional_spelling(target: OpOverload) -> OpOverload | None:
    """The overload that computes the same without writing: ``aten.relu_.default`` → ``aten.relu.default``."""
    found = same_overload(target, op_of(target))
    return None if found is None or is_mutable(found) else found


def in_place_spelling(target: Any) -> OpOverload | None:
    """The in-place overload of a unary op in :data:`_IN_PLACE`."""
    return same_overload(target, f"{target.overloadpacket.__name__}_") if is_pointwise(target) else None


def is_pointwise(target: Any) -> bool:
    """Whether each output element depends only on the same input element; not so for a clamp by a tensor."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or op_of(target) not in _IN_PLACE:
        return False
    return sum("Tensor" in str(argument.type) for argument in arguments_of(target)) == 1


def keeps_order(target: Any) -> bool:
    """Whether a pointwise op maps the range of its input to the range of its output."""
    return is_pointwise(target) and op_of(target) in _MONOTONE


def allocates(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace == "aten" and op_of(target) in _ALLOCATING


def only_moves(target: Any) -> bool:
    """Whether the result consists of values of the first argument, all or some of them."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in results_of(target))
    return is_view or op_of(target) in _COPIES


def is_random(target: Any) -> bool:
    return op_of(target) in _RANDOM


def is_uninitialised(target: Any) -> bool:
    return op_of(target) in _UNINITIALISED


def returns_view(target: OpOverload) -> bool:
    return any(result.alias_info is not None for result in results_of(target))


def may_share_memory(target: Any) -> bool:
    """Whether the output may be a view of an input: declared as one, or a composite op that may return its input."""
    if not isinstance(target, OpOverload):
        return True
    return returns_view(target) or (is_composite(target) and not allocates(target))
