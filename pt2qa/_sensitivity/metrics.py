"""The outputs that an analysis covers, the floating-point tensors that the model returns, and metrics of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import ErrorSums, divergence, error_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.set_apart import SetApart
from pt2qa._sensitivity.report import SensitivityBatch, SensitivityPart
from pt2qa._simulator.accumulate import empty_batch, first_fault, unlike
from pt2qa._simulator.batches import leaf_names, structured
from pt2qa._simulator.simulator import Simulator
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
    leaves = pytree.tree_leaves(result)
    return tuple(name for name, leaf in zip(leaf_names(result), leaves, strict=True) if _counts(leaf))


def _counts(leaf: Any) -> bool:
    return is_measured(leaf) and leaf.numel() > 0


Loss = Callable[[Any, Any], float]
"""Maps the reference's and the quantized model's outputs to a number."""

METRICS = ("sqnr", "cosine", "l1", "atol", "kl")


@dataclass(frozen=True, slots=True)
class OutputMetric:
    """A metric of outputs; ``loss`` is a user's function; it and ``kl`` are means, ``weighted`` by samples or rows."""

    name: str
    loss: Loss | None
    smallest_is_worst: bool
    weighted: bool

    @classmethod
    def of(cls, metric: str | Loss, larger_is_worse: bool | None) -> OutputMetric:
        """The metric of a name or of a user's function."""
        if callable(metric):
            name = getattr(metric, "__name__", type(metric).__name__)
            return cls(name, metric, smallest_is_worst=larger_is_worse is False, weighted=True)
        if metric not in METRICS:
            raise SelectionError(
                f"unknown metric {metric!r}; expected one of {', '.join(METRICS)}, or a function of the reference's "
                "and the quantized outputs."
            )
        if larger_is_worse is not None:
            raise SelectionError(f"larger_is_worse applies to functions only; the direction of {metric!r} is known.")
        return cls(metric, None, metric in ("sqnr", "cosine"), weighted=metric == "kl")

    def part(self, place: int, batch: int, reference: Any, quantized: Any, samples: int) -> SensitivityPart:
        """The sums of one place on one batch; ``samples`` is the weight of a user's loss."""
        sums = ErrorSums()
        loss = weight = 0.0
        for ref, quant in paired_leaves(reference, quantized):
            sums = sums.merge(error_sums(ref, quant))
            if self.name == "kl" and self.loss is None:
                rows = divergence(*(leaf.reshape(-1, leaf.shape[-1] if leaf.dim() else 1) for leaf in (ref, quant)))
                loss, weight = loss + float(rows.sum()), weight + len(rows)
        if self.loss is not None:
            loss, weight = float(self.loss(reference, quantized)) * samples, float(samples)
        return SensitivityPart(
            place=place,
            batch=batch,
            noise=math.nan if sums.nonfinite else sums.noise,
            quant_signal=sums.quant_signal,
            product=sums.product,
            absolute=sums.absolute,
            largest=math.nan if sums.nonfinite else sums.atol_seen,
            count=sums.count,
            loss=loss,
            weight=weight,
        )

    def value(self, parts: Sequence[SensitivityPart], data: Sequence[SensitivityBatch]) -> float:
        """The number computed from the sums of all batches; nan if it is not defined.

        Formulas are those of :class:`pt2qa.LayerRow`; ``kl`` is the mean over rows of
        ``sum(p_ref * log(p_ref / p_quant))`` with ``p`` the softmax over the last axis, in nats; a loss is the mean
        over batches, weighted by samples.
        """
        if self.weighted:
            weight = sum(part.weight for part in parts)
            return sum(part.loss for part in parts) / weight if weight else math.nan
        signal = sum(batch.signal for batch in data)
        noise = sum(part.noise for part in parts)
        if self.name == "sqnr":
            return math.inf if noise == 0.0 else decibels(signal, noise)
        sums = ErrorSums(nonfinite=math.isnan(noise))
        for part in parts:
            seen = part.quant_signal, part.product, part.absolute, part.largest
            sums = sums.merge(ErrorSums(part.count, 0.0, part.noise, *seen))
        found: float = getattr(replace(sums, signal=signal), self.name)
        return found


def signal_of(reference: Any) -> float:
    """Sum of the squared reference outputs, over finite elements."""
    return sum(error_sums(leaf, leaf).signal for leaf in float_leaves(reference))


def paired_leaves(reference: Any, quantized: Any) -> list[tuple[Tensor, Tensor]]:
    """The outputs whose error is measured, side by side; they must agree in number and shape."""
    refs, quants = float_leaves(reference), float_leaves(quantized)
    shapes = [[tuple(leaf.shape) for leaf in leaves] for leaves in (refs, quants)]
    if shapes[0] != shapes[1]:
        raise SelectionError(
            f"the outputs of the reference have the shapes {shapes[0]}, with sites quantized {shapes[1]}. "
            "Pass post_process= that returns outputs of fixed shapes, such as scores before a selection."
        )
    return list(zip(refs, quants, strict=True))


def fault_of(
    simulator: Simulator, values: Sequence[Any], number: int, samples: int, reference: Any, quantized: Any
) -> SetApart | None:
    """Why a batch is to be set apart, from the outputs of both models; None if they give a number."""
    pairs = paired_leaves(reference, quantized)
    broken = next(filter(None, (unlike(ref, quant) for ref, quant in pairs)), None)
    if broken is not None:
        what, side, _ = broken
        found = first_fault(simulator, values, number, samples)
        return found or SetApart(number, samples, -1, side, what, "post_process")
    return None if pairs else replace(empty_batch(number), samples=samples)
