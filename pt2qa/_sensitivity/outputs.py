"""The outputs that an analysis covers: the floating-point tensors that the model returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.outputs import leaf_names, structured
from pt2qa.errors import SelectionError

PostProcess = Callable[[Any], Any]
"""Maps the model's outputs to what counts: boxes, probabilities, the logits alone."""


def finished(pair: QuantizedPair, outputs: Any, post_process: PostProcess | None) -> Any:
    """The model's outputs after the user's function."""
    result = structured(pair.quantized, outputs)
    return result if post_process is None else post_process(result)


def float_leaves(result: Any) -> list[Tensor]:
    """The tensors whose error is measured, at least one; empty tensors have no error."""
    leaves = pytree.tree_leaves(result)
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
        raise SelectionError(
            "no output is a floating-point tensor, so there is no error to measure. "
            "Pass post_process= that returns one, such as the logits."
        )
    return [leaf for leaf in leaves if _counts(leaf)]


def float_names(result: Any) -> tuple[str, ...]:
    """The names of :func:`float_leaves`."""
    leaves = pytree.tree_leaves(result)
    return tuple(name for name, leaf in zip(leaf_names(result), leaves, strict=True) if _counts(leaf))


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0
