"""Whether two runs of one model agree: one comparison of outputs for every stage, capture, prepare and convert.

Floating-point values agree to a number of decibels, since kernels and folded batch norms sum in another order; in
bfloat16 and float16 it is fewer (:func:`agreement_in`).  All else agrees exactly: integers, booleans, where NaN and
infinities stand, shapes, dtypes and the number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from pt2qa._decibels import agreement
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import error_sums

FLIPS = 1e-3
"""Share of the integers and booleans of one output that a folded batch norm may change, as in the argmax of pixels."""


def agreement_in(graph: Graph, least: float) -> float:
    """The SQNR in dB by which two runs of a graph must agree, if it is ``least`` in float32.

    The coarsest dtype of its values counts: an op rounds to it, whatever the dtype of the outputs.
    """
    values = (value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get(VALUE)))
    return agreement(least, {name_of_dtype(value) for value in values if isinstance(value, Tensor)})


def name_of_dtype(value: Tensor) -> str:
    """The dtype of a tensor, such as ``float32``."""
    return str(value.dtype).removeprefix("torch.")


def compare_outputs(expected: Any, actual: Any, least: float, *, flips: float = 0.0) -> str | None:
    """The first of some nested outputs in which two runs differ, and how; None if they agree.

    Floating-point outputs must have an SQNR of ``least`` dB.  ``flips`` is the share of an output's integers and
    booleans that may differ, 0..1: where two values are nearly equal, float rounding decides which is the larger one.

    >>> compare_outputs((torch.ones(2), 1), (torch.ones(2), 2), 100)
    'output[1] is 2 instead of 1'
    """
    wanted, spec = pytree.tree_flatten_with_path(expected)
    given, other = pytree.tree_flatten_with_path(actual)
    if len(wanted) != len(given):
        return f"output has {len(given)} leaves ({other}) instead of {len(wanted)} ({spec})"
    names = [leaf_name(path) for path, _ in wanted]
    return compare_leaves([leaf for _, leaf in wanted], [leaf for _, leaf in given], names, least, flips=flips)


def compare_leaves(
    expected: Sequence[Any], actual: Sequence[Any], names: Sequence[str], least: float, *, flips: float = 0.0
) -> str | None:
    """As :func:`compare_outputs`, for flat outputs and their names."""
    for name, want, got in zip(names, expected, actual, strict=True):
        if what := difference(want, got, least, flips=flips):
            return f"{name} {what}"
    return None


def difference(expected: Any, actual: Any, least: float, *, flips: float = 0.0) -> str | None:
    """How a value differs from what is expected, as the end of a sentence; None if they agree.

    >>> difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 60)
    'differs in 1 of 2 values'
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = type(expected) is type(actual) and (expected == actual or (expected != expected and actual != actual))
        return None if same else f"is {actual!r} instead of {expected!r}"
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"is {kind_of(actual)} instead of {kind_of(expected)}"
    if not (expected.is_floating_point() or expected.is_complex()):
        count = int((expected != actual).sum())
        return f"differs in {count} of {expected.numel()} values" if count > flips * expected.numel() else None
    if not expected.numel() or torch.equal(expected, actual):
        return None
    sums = error_sums(expected, actual)
    if sums.nonfinite:
        return f"is NaN or infinite at {sums.nonfinite} other places"
    if not sums.count or sums.sqnr >= least:
        return None
    number = f"{sums.sqnr:.1f} dB" if sums.sqnr == sums.sqnr else f"a largest difference of {sums.atol:.3g} from zero"
    return f"has an SQNR of {number} instead of at least {least:.0f} dB"


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of an output, from its pytree path.

    >>> leaf_name((pytree.MappingKey("logits"), pytree.SequenceKey(1)))
    'output.logits[1]'
    """
    parts = [
        f".{key.key}" if isinstance(key, pytree.MappingKey) and str(key.key).isidentifier() else str(key)
        for key in path
    ]
    return "output" + "".join(parts)


def kind_of(value: Any) -> str:
    """What a value is: dtype and shape of a tensor, the type of anything else.

    >>> kind_of(torch.zeros(2, 3)), kind_of(1)
    ('float32[2, 3]', 'int')
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{name_of_dtype(value)}{list(value.shape)}"
