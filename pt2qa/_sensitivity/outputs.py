"""The outputs that an analysis covers: the floating-point tensors that the model returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.outputs import leaf_names, structured
from pt2qa.errors import SelectionError

PostProcess = Callable[[Any], Any]
"""Maps the model's outputs to what counts: boxes, probabilities, the logits alone."""


def finished(pair: QuantizedPair, outputs: Any, post_process: PostProcess | None) -> Any:
    result = structured(pair.quantized, outputs)
    return result if post_process is None else post_process(result)


def float_leaves(result: Any) -> list[Tensor]:
    """The tensors whose error is measured, at least one: no empty ones, and complex ones as pairs of real numbers."""
    leaves = pytree.tree_leaves(result)
    if not any(is_measured(leaf) for leaf in leaves):
        raise SelectionError(
            "no output is a floating-point tensor, so there is no error to measure. "
            "Pass post_process= that returns one, such as the logits."
        )
    return [as_real(leaf) for leaf in leaves if _counts(leaf)]


def is_measured(leaf: Any) -> bool:
    """Whether an output has an error: it is a tensor of real or complex numbers, no integers."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def as_real(leaf: Tensor) -> Tensor:
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf


def float_names(result: Any) -> tuple[str, ...]:
    """The names of :func:`float_leaves`."""
    leaves = pytree.tree_leaves(result)
    return tuple(name for name, leaf in zip(leaf_names(result), leaves, strict=True) if _counts(leaf))


def _counts(leaf: Any) -> bool:
    return is_measured(leaf) and leaf.numel() > 0
