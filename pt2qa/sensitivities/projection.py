"""Sensitivity of all sites at once, from random projections of the output.

For a small error d at a site the output changes by J d, with J the derivative of the output.  For a random vector v of
±1, E[(v·J d)²] = |J d|², the squared output error, and v·J d = (Jᵀv)·d is the dot product of d with the gradient of
v·output: one backward pass gives it for every site.  A site's d is its actual error on the reference's values, followed
exactly through the first nonlinear ops behind it (:mod:`pt2qa.sensitivities.paths`); for a weight it begins as the
change of the output of the op that reads it.

Samples of a batch do not depend on each other in most models; then each sample is a measurement of its own, with less
variance than one for the whole batch (:mod:`pt2qa.sensitivities.samples`).

Source:
    estimating dᵀJᵀJd with random signs is Hutchinson's trace estimator (Communications in Statistics 18, 1989).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2qa.errors import SelectionError
from pt2qa.pairing import QuantizedPair
from pt2qa.sensitivities.flops import count_flops
from pt2qa.sensitivities.gradients import GradientRun, Gradients, float_tensors, needing_gradient
from pt2qa.sensitivities.layouts import has_channels_last
from pt2qa.sensitivities.outputs import PostProcess, finished, float_leaves
from pt2qa.sensitivities.paths import Path, errors_at_end, plan_paths
from pt2qa.sensitivities.samples import is_apart, with_other_first
from pt2qa.sensitivities.vectors import left_to_chance, random_signs
from pt2qa.simulator.batches import count_samples
from pt2qa.simulator.lifetimes import slots_in
from pt2qa.simulator.program import Step
from pt2qa.simulator.simulator import bind

_INSTEAD = 'Use torch functions that have one (softmax, not argmax), or method="exact".'


@dataclass(frozen=True, slots=True)
class Projected:
    """What one batch gave.

    Attributes:
        noise: by site, sum of the squared output errors; sites that no gradient reached are not in it.
        variance: by site, of ``noise``.
        reference: the reference's outputs as the user sees them.
    """

    noise: dict[int, float]
    variance: dict[int, float]
    reference: Any


@dataclass(slots=True)
class Projection:
    """The method on one pair; what it learns from the first batch serves the others.

    Attributes:
        pair: the pair.
        projections: random vectors for each batch.
        post_process: the user's function of the outputs.
        flops: by step, for one sample; None before the first batch.
        apart: slots at which each sample's error reaches that sample's output alone.
        mixed: names of the ops at whose output paths end that are not so; empty for batches of one sample.
        cleaned: names of ops with errors that are not finite, which count as zero.
    """

    pair: QuantizedPair
    projections: int
    post_process: PostProcess | None
    flops: dict[int, float] | None = None
    apart: frozenset[int] = frozenset()
    mixed: tuple[str, ...] = ()
    cleaned: dict[str, None] = field(default_factory=dict)

    def measure(self, values: Sequence[Any], batch: int) -> Projected:
        """One forward, one walk back; on the first batch one more forward, which counts flops and compares samples.

        Args:
            values: the inputs, flat.
            batch: its number, which decides about the random vectors.

        Raises:
            SelectionError: ``post_process`` cannot be differentiated.
            SimulationError: an op cannot.
        """
        run = GradientRun(self.pair.simulator, values)
        samples = count_samples(list(values))
        reference, vectors = self._vectors(run, samples, batch)
        paths = plan_paths(self.pair.program)
        if self.flops is None:
            self._look_at_samples(run, values, reference, paths)
        meter = _Meter(self, run, paths, samples)
        run.backward(vectors, meter.visit)
        estimates = {site: self._estimate(dots, float_leaves(reference), samples) for site, dots in meter.dots.items()}
        return Projected(
            noise={site: noise for site, (noise, _) in estimates.items()},
            variance={site: variance for site, (_, variance) in estimates.items()},
            reference=reference,
        )

    def _vectors(self, run: GradientRun, samples: int, batch: int) -> tuple[Any, dict[int, Gradients]]:
        """The reference's outputs, and the gradients of v·output at the slots of the graph's outputs."""
        slots = sorted(set(slots_in(self.pair.program.outputs)))
        own = dict(enumerate(run.env))
        leaves: dict[int, list[Tensor]] = {}
        with torch.enable_grad():
            for slot in slots:
                own[slot] = pytree.tree_map_only(Tensor, needing_gradient, own[slot])
                leaves[slot] = float_tensors(own[slot])
                # Copies, so that post_process may write to them.
                own[slot] = pytree.tree_map_only(Tensor, Tensor.clone, own[slot])
            reference = self._finished(bind(self.pair.program.outputs, own))
        counted = float_leaves(reference)
        inputs = [leaf for slot in slots for leaf in leaves[slot]]
        signs = random_signs(counted, samples, self.projections, batch)
        found: list[list[Tensor | None]] = [[] for _ in inputs]
        for vector in range(self.projections):
            gradients = torch.autograd.grad(
                counted,
                inputs,
                [vectors[vector] for vectors in signs],
                retain_graph=vector + 1 < self.projections,
                allow_unused=True,
            )
            for column, gradient in zip(found, gradients, strict=True):
                column.append(gradient)
        by_leaf = iter(found)
        by_slot = {slot: [next(by_leaf) for _ in leaves[slot]] for slot in slots}
        reference = pytree.tree_map_only(Tensor, Tensor.detach, reference)
        return reference, {slot: gradients for slot, gradients in by_slot.items() if gradients and slot in run.tracked}

    def _finished(self, outputs: Any) -> Any:
        try:
            reference = finished(self.pair, outputs, self.post_process)
        except RuntimeError as error:
            raise SelectionError(f"post_process cannot be differentiated ({error}). {_INSTEAD}") from error
        if not all(leaf.requires_grad for leaf in float_leaves(reference)):
            raise SelectionError(f"post_process gives an output without a gradient. {_INSTEAD}")
        return reference

    def _estimate(self, dots: Tensor, outputs: list[Tensor], samples: int) -> tuple[float, float]:
        """Noise and its variance from dot products of shape (projections, samples or 1).

        The variance is that of the mean over projections, samples being independent.  A single projection has no
        spread: its dot product is taken to be normal, for which the variance of z² is 2/3 of E[z⁴].
        """
        squares = dots.square()
        count = len(squares)
        spread = squares.var(0, correction=1) / count if count > 1 else squares.square()[0] * (2 / 3)
        chance = left_to_chance(outputs, samples, count, apart=dots.shape[1] == samples)
        return float(squares.mean(0).sum()), float(spread.sum()) * chance

    def _look_at_samples(
        self, run: GradientRun, values: Sequence[Any], reference: Any, paths: tuple[Path, ...]
    ) -> None:
        samples = count_samples(list(values))
        ends = {path.end.index for path in paths}
        apart: dict[int, bool] = {}

        def compare(step: Step, other: Any) -> None:
            if samples > 1 and step.index in ends:
                apart[step.out] = is_apart(run.env[step.out], other, samples)

        flops, outputs = count_flops(self.pair.simulator, with_other_first(values), compare)
        self.flops = {step: count / samples for step, count in flops.items()}
        with torch.no_grad():
            others = float_leaves(finished(self.pair, outputs, self.post_process))
        same = len(others) == len(float_leaves(reference))
        if not same or not all(map(is_apart, float_leaves(reference), others, [samples] * len(others))):
            apart = dict.fromkeys(apart, False)
        self.apart = frozenset(slot for slot, is_so in apart.items() if is_so)
        program = self.pair.program
        names = (program.steps[program.producers[slot]].name for slot in apart if slot not in self.apart)
        self.mixed = tuple(dict.fromkeys(names))


class _Meter:
    """Takes the dot products of errors and gradients on the way back."""

    def __init__(self, projection: Projection, run: GradientRun, paths: tuple[Path, ...], samples: int) -> None:
        self.projection, self.run, self.samples = projection, run, samples
        self.dots: dict[int, Tensor] = {}
        self.paths: dict[int, list[Path]] = defaultdict(list)
        for path in paths:
            self.paths[path.end.index].append(path)

    def visit(self, step: Step, gradients: Gradients) -> None:
        """Projects the errors whose paths end at a step."""
        with torch.no_grad():
            for path in self.paths.get(step.index, ()):
                self._add(path, gradients, errors_at_end(path, self.projection.pair.simulator, self.run.env))

    def _add(self, path: Path, gradients: Gradients, errors: list[Tensor]) -> None:
        """Adds dot products: float64 of shape (projections, samples or 1)."""
        rows = self.samples if path.end.out in self.projection.apart else 1
        for leaf, error in zip(gradients, errors, strict=True):
            dots = _dots(leaf, error, rows)
            if not bool(dots.isfinite().all()):
                self.projection.cleaned[path.start.name] = None
                finite = error.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                dots = _dots(leaf, finite, rows).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            known = self.dots.get(path.site)
            if known is not None and known.shape != dots.shape:
                known, dots = known.sum(1, keepdim=True), dots.sum(1, keepdim=True)
            self.dots[path.site] = dots if known is None else known + dots


def _dots(gradients: Sequence[Tensor | None], error: Tensor, rows: int) -> Tensor:
    """Dot products of each gradient with an error, row by row: float64 of shape (gradients, rows)."""
    if has_channels_last(error):
        gradients = [None if gradient is None else gradient.permute(0, 2, 3, 1) for gradient in gradients]
        error = error.permute(0, 2, 3, 1)
    right = error.reshape(rows, -1)
    left = [None if gradient is None else gradient.reshape(rows, -1) for gradient in gradients]
    # torch.dot writes nothing, and a row of the error stays in the cache from one gradient to the next.
    dots = [[0.0 if each is None else torch.dot(each[row], right[row]).item() for each in left] for row in range(rows)]
    return torch.tensor(dots, dtype=torch.float64).T
