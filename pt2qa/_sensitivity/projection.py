"""Sensitivity of all sites at once, from random projections of the output.

For a small error d at a site the output changes by J d, with J the derivative of the output.  For a random vector v of
±1, E[(v·J d)²] = |J d|², the squared output error, and v·J d = (Jᵀv)·d is the dot product of d with the gradient of
v·output: one backward pass gives it for every site.  A site's d is its actual error on the reference's values, or that
of any other :class:`Variant` of it, followed exactly through the first nonlinear ops behind it
(:mod:`pt2qa._sensitivity.paths`); for a weight it begins as the change of the output of the op that reads it.

Samples of a batch do not depend on each other in most models; then each sample is a measurement of its own, with less
variance than one for the whole batch (:func:`independence`).

Source:
    estimating dᵀJᵀJd with random signs is Hutchinson's trace estimator (Communications in Statistics 18, 1989).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pt2qa._exclusion import computes
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, sizes_of
from pt2qa._grouping import grouped
from pt2qa._metrics import float64
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import few
from pt2qa._sensitivity.gradients import GradientRun, Gradients, float_tensors, gradients_of, needing_gradient
from pt2qa._sensitivity.metrics import PostProcess, finished, float_leaves
from pt2qa._sensitivity.paths import Path, error_at_end, pieces_of
from pt2qa._sensitivity.precision import left_to_chance, random_signs
from pt2qa._sensitivity.roundings import Rounding, Variant, changes
from pt2qa._simulator.batches import as_batch, count_samples
from pt2qa._simulator.data import Counted
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator, bind, tensors_equal
from pt2qa.errors import SelectionError

Key = tuple[int, str]
"""A site's index, and the name of a variant."""


class PostProcessWithoutGradient(SelectionError):
    def __init__(self, reason: str) -> None:
        super().__init__(f'{reason}. Use differentiable functions (softmax, not argmax), or method="exact".')
        self.reason = reason


@dataclass(slots=True)
class Projection:
    """The method on one pair, with variants by site.

    At ``independent`` slots each sample's error reaches only that sample's output; None before the first batch of
    several samples.
    """

    pair: QuantizedPair
    post_process: PostProcess | None
    paths: tuple[Path, ...]
    variants: Mapping[int, Mapping[str, Variant]]
    independent: frozenset[int] | None = None
    together: str = ""
    cleaned: dict[str, None] = field(default_factory=dict)

    def start(self, values: Sequence[Any], seed: int, counted: Counted) -> ProjectedBatch:
        """The reference's forward on a batch; ``seed`` is that of its random vectors, ``counted`` what has errors."""
        started = ProjectedBatch(self, values, seed, counted)
        if self.independent is None and started.samples > 1:
            program, found = self.pair.program, independence(self.pair, self.post_process)
            self.independent, ends = found.slots, {path.end.out for path in self.paths}
            names = [program.steps[program.producers[slot]].name for slot in sorted(ends - found.slots)]
            if found.problem:
                self.together = f"the independence of samples could not be tested ({found.problem})"
            elif names:
                self.together = f"no axis of independent samples at {few(list(dict.fromkeys(names)), 3)}"
        return started

    @property
    def notes(self) -> list[str]:
        cleaned = [f"non-finite errors count as zero at {few(list(self.cleaned), 3)}"] if self.cleaned else []
        together = [f"{self.together}: projected for the whole batch at once"] if self.together else []
        return [*together, *cleaned]


class ProjectedBatch:
    """One batch: its forward, and rounds of random vectors; each round but the first reruns the forward.

    ``returned`` is what the reference graph returned, ``reference`` the same as the user sees it.
    """

    def __init__(self, projection: Projection, values: Sequence[Any], seed: int, counted: Counted) -> None:
        self.projection, self.values, self.seed, self.counted = projection, values, seed, counted
        self.samples = count_samples(list(values))
        self.projections = 0
        self._dots: dict[Key, list[Tensor]] = defaultdict(list)
        self._fresh = True
        self._forward()

    def _forward(self) -> None:
        """The reference, and the user's outputs with gradients back to the slots of the graph's outputs."""
        pair = self.projection.pair
        self.run = GradientRun(pair.simulator, self.values)
        self.returned = self.run.outputs()
        own = dict(enumerate(self.run.env))
        self._leaves: dict[int, list[Tensor]] = {}
        with torch.enable_grad():
            for slot in sorted(set(slots_in(pair.program.outputs))):
                own[slot] = pytree.tree_map_only(Tensor, needing_gradient, own[slot])
                self._leaves[slot] = float_tensors(own[slot])
                # Copies, so that post_process may write to them.
                own[slot] = pytree.tree_map_only(Tensor, Tensor.clone, own[slot])
            outputs = self._finished(bind(pair.program.outputs, own))
            # What does not count has no error.
            result = self.counted.zeroed_result(outputs, processed=self.projection.post_process is not None)
        self._counted = float_leaves(result)
        self.reference = pytree.tree_map_only(Tensor, Tensor.detach, result)

    def _finished(self, outputs: Any) -> Any:
        try:
            reference = finished(self.projection.pair, outputs, self.projection.post_process)
        except RuntimeError as error:
            raise PostProcessWithoutGradient(f"post_process cannot be differentiated ({error})") from error
        if not all(leaf.requires_grad for leaf in float_leaves(reference)):
            raise PostProcessWithoutGradient("post_process returns an output without a gradient")
        return reference

    def project(self, count: int, scales: Sequence[float] | None = None) -> None:
        if not self._fresh:
            self._forward()
        meter = _Meter(self)
        self.backward(self.signs(count, scales), meter.visit)
        for key, dots in meter.dots:
            self._dots[key].append(dots)

    def backward(self, vectors: Sequence[Sequence[Tensor]], visit: Callable[[Step, Gradients], None]) -> None:
        """Runs the backward pass once for vectors, of which each output that is measured has as many."""
        if not vectors:  # outputs without an element have no error
            return
        inputs = [leaf for leaves in self._leaves.values() for leaf in leaves]
        found = iter(gradients_of(self._counted, inputs, vectors))
        by_slot = {slot: [next(found) for _ in leaves] for slot, leaves in self._leaves.items()}
        # post_process need not read every output.
        reached = {slot: each for slot, each in by_slot.items() if any(leaf is not None for leaf in each)}
        tracked = {slot: each for slot, each in reached.items() if slot in self.run.tracked}
        self.run.backward(tracked, visit)
        self._fresh = False
        self.projections += len(vectors[0])

    def noise(self, keys: Iterable[Key]) -> tuple[float, float]:
        """The squared output error of variants, summed, and its variance; zero for sites that no gradient reached."""
        found = [self._estimate(torch.cat(self._dots[key])) for key in keys if key in self._dots]
        return sum(noise for noise, _ in found), sum(variance for _, variance in found)

    def together(self) -> tuple[float, float]:
        """The noise of all variants, summed, and its variance: the same vectors measure them all.

        Errors in many directions add up to less spread than those of one, so the variance is that of the sums.
        """
        squares = [torch.cat(dots).square() for dots in self._dots.values()]
        if not squares:
            return 0.0, 0.0
        if len({each.shape for each in squares}) > 1:
            squares = [each.sum(1, keepdim=True) for each in squares]
        sums = torch.stack(squares).sum(0)
        if len(sums) == 1:
            return self._estimate(sums.sqrt())
        return float(sums.mean(0).sum()), float(sums.var(0).sum()) / len(sums) * self._left_to_chance(sums)

    @property
    def reached(self) -> set[int]:
        return {site for site, _ in self._dots}

    def signs(self, count: int, scales: Sequence[float] | None = None) -> list[list[Tensor]]:
        """The next vectors of ±1, for each output that is measured; times a scale for each."""
        signs = random_signs(self._counted, self.samples, count, self.seed, self.projections)
        if scales is None:
            return signs
        return [[each * scale for each in own] for own, scale in zip(signs, scales, strict=True)]

    @property
    def scales(self) -> list[float]:
        """1/|output| for each output that is measured; 0 where it is all zero."""
        sizes = [float(float64(leaf.detach()).square().sum()) for leaf in self._counted]
        return [size**-0.5 if size > 0 else 0.0 for size in sizes]

    def _estimate(self, dots: Tensor) -> tuple[float, float]:
        """Noise and its variance from dot products of shape (projections, samples or 1).

        A sample's dot products are taken as normal, so K of them have a mean square m with the variance 2 E[m]² / K,
        and 2 m² / (K + 2) is that in the mean.  It can only be less: sums of signs spread less than a normal variable.
        What K squares themselves spread is far less certain, and small where m is too small.
        """
        squares = dots.square().mean(0)
        variance = float(squares.square().sum()) * 2 / (len(dots) + 2)
        return float(squares.sum()), variance * self._left_to_chance(dots)

    def _left_to_chance(self, dots: Tensor) -> float:
        return left_to_chance(self._counted, self.samples, len(dots), apart=dots.shape[1] == self.samples)


class _Meter:
    """Computes the dot products of errors and gradients in the backward pass, for each rounding of each site."""

    def __init__(self, batch: ProjectedBatch) -> None:
        self.projection, self.run, self.samples = batch.projection, batch.run, batch.samples
        self.independent = batch.projection.independent or frozenset()
        self.roundings = {
            site: tuple(dict.fromkeys(each for own in variants.values() for each in own.both))
            for site, variants in self.projection.variants.items()
        }
        self.found: dict[int, dict[Rounding, Tensor]] = defaultdict(dict)
        self.paths = grouped((path.end.index, path) for path in self.projection.paths)

    def visit(self, step: Step, gradients: Gradients) -> None:
        with torch.no_grad():
            for path in self.paths.get(step.index, ()):
                parts = self._projected(path, gradients)
                dots = grouped((rounding, found) for roundings, found in parts for rounding in roundings)
                known = self.found[path.site]
                for rounding, own in dots.items():
                    new, old = torch.cat(own, 1), known.get(rounding)
                    if old is not None and old.shape != new.shape:  # over all samples where one of them is
                        new, old = new.sum(1, keepdim=True), old.sum(1, keepdim=True)
                    known[rounding] = new if old is None else old + new

    def _projected(self, path: Path, gradients: Gradients) -> Iterator[tuple[list[Rounding], Tensor]]:
        """The dot products of each change at the end of a path with each gradient, for some samples after others."""
        env, roundings = self.run.env, self.roundings[path.site]
        independent = path.end.out in self.independent and in_parts(float_tensors(env[path.end.out]), self.samples)
        pieces = pieces_of(path, env, self.samples) if independent else [(None, env)]
        constant = None if path.constant is None else list(changes(env[path.source], roundings))
        for own, values in pieces:
            rows, there = self.samples if independent else 1, gradients
            if own is not None:
                rows = len(range(self.samples)[own])
                there = [None if leaf is None else [each[own] for each in leaf] for leaf in gradients]
            for same, changed in constant or changes(values[path.source], roundings):
                if changed is values[path.source]:
                    count = next(len(leaf) for leaf in there if leaf is not None)
                    yield same, torch.zeros(count, rows, dtype=torch.float64)
                else:
                    errors = error_at_end(path, self.projection.pair.simulator, values, changed)
                    yield same, self._dots(path, there, errors, rows)

    def _dots(self, path: Path, gradients: Gradients, errors: list[Tensor], rows: int) -> Tensor:
        """The dot products of an error with each gradient, row by row: float64 of shape (projections, rows)."""
        dots = None
        for leaf, error in zip(gradients, errors, strict=True):
            if leaf is None:
                continue
            found = _dots(leaf, error, rows)
            if not bool(found.isfinite().all()):
                self.projection.cleaned[path.start.name] = None
                finite = error.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                found = _dots(leaf, finite, rows).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            dots = found if dots is None else dots + found
        assert dots is not None, "a gradient reached the value"
        return dots

    @property
    def dots(self) -> Iterator[tuple[Key, Tensor]]:
        """Those of each variant: the error that it ends with, less the one that it starts with."""
        for site, variants in self.projection.variants.items():
            if site in self.found:
                for name, own in variants.items():
                    end = self.found[site][own.end]
                    yield (site, name), end if own.start is None else end - self.found[site][own.start]


def _dots(gradients: Sequence[Tensor], error: Tensor, rows: int) -> Tensor:
    """Dot products of each gradient with an error, row by row: float64 of shape (gradients, rows)."""
    channels_last = error.dim() == 4 and error.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not error.is_contiguous() and len(error) % rows == 0:
        gradients = [gradient.permute(0, 2, 3, 1) for gradient in gradients]
        error = error.permute(0, 2, 3, 1)
    right = error.reshape(rows, -1)
    left = [gradient.reshape(rows, -1) for gradient in gradients]
    # torch.dot writes nothing, and a row of the error stays in cache across gradients.
    dots = [[torch.dot(each[row], right[row]).item() for each in left] for row in range(rows)]
    return torch.tensor(dots, dtype=torch.float64).T


_KNOWN: WeakKeyDictionary[Simulator, Independence] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Independence:
    """At ``slots`` an error of one sample reaches the outputs of that sample alone.

    ``problem`` is the exception that a run raised; there are no slots then.
    """

    slots: frozenset[int] = frozenset()
    problem: str = ""


def independence(pair: QuantizedPair, post_process: PostProcess | None) -> Independence:
    """Where samples are apart; empty if they are not at the outputs, or if the graph takes one sample at a time.

    A property of the graph, found once for a pair, without its data.  The reference runs twice on inputs of the
    captured shapes, the second time with another first sample.  A value keeps samples apart if its elements, in order,
    are equal parts for each sample, and only the first part differs.  Inputs are random, because what real data leave
    equal (samples that are alike, a relu that is zero) says nothing about the graph, and would be decided differently
    in each part of the data.
    """
    if post_process is None and pair.simulator in _KNOWN:
        return _KNOWN[pair.simulator]
    try:
        found = _tried(pair, post_process)
    except Exception as error:
        # Random inputs need not be ones that the model or post_process can take, such as indices.
        found = Independence(problem=f"{type(error).__name__}: {error}")
    if post_process is None:
        _KNOWN[pair.simulator] = found
    return found


def in_parts(leaves: Sequence[Tensor], samples: int) -> bool:
    """Whether each tensor has elements, as many for each sample."""
    return bool(leaves) and all(leaf.numel() and leaf.numel() % samples == 0 for leaf in leaves)


@computes
def _tried(pair: QuantizedPair, post_process: PostProcess | None) -> Independence:
    values, changed = _inputs(pair)
    samples = count_samples(values)
    if samples < 2:
        return Independence()
    slots: set[int] = set()
    walk = pair.simulator.walk(changed, on=False)

    def visit(step: Step, value: Any) -> None:
        # Both at once, because later steps may overwrite a value.
        _, other = next(walk)
        if _apart(float_tensors(value), float_tensors(other), samples):
            slots.add(step.out)

    outputs = [pair.simulator.run(values, on=False, visit=visit)]
    try:
        next(walk)
    except StopIteration as end:
        outputs.append(end.value)
    own, other = (float_leaves(finished(pair, each, post_process)) for each in outputs)
    return Independence(frozenset(slots) if _apart(own, other, samples) else frozenset())


def _apart(own: Sequence[Tensor], other: Sequence[Tensor], samples: int) -> bool:
    """Whether the first sample's part of each tensor differs and the others are equal."""
    if not in_parts(own, samples) or [leaf.shape for leaf in own] != [leaf.shape for leaf in other]:
        return False
    parts = [(left.reshape(samples, -1), right.reshape(samples, -1)) for left, right in zip(own, other, strict=True)]
    return all(tensors_equal(left[1:], right[1:]) and not tensors_equal(left[0], right[0]) for left, right in parts)


def _inputs(pair: QuantizedPair) -> tuple[list[Any], list[Any]]:
    """Inputs of the captured shapes, and the same with another first sample.

    Floats are from 0 to 1, which no root or logarithm refuses.  Integers may be indices, so they are those of the
    example, or 0 and 1 where there is none.
    """
    generator = torch.Generator().manual_seed(20242)
    if pair.capture is not None:
        example = pair.values(as_batch(pair.capture.args, pair.capture.kwargs, pair.quantized))
    else:
        traced = (node.meta.get(VALUE) for node in pair.quantized.graph.find_nodes(op="placeholder"))
        example = [_bits(value, generator) if isinstance(value, Tensor) else value for value in traced]
    samples = count_samples(example)
    values = [_filled(value, generator) for value in example]
    return values, [_with_other_first(value, samples, generator) for value in values]


def _bits(traced: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, sizes_of(traced), generator=generator).to(traced.device, traced.dtype)


def _filled(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return torch.rand(value.shape, generator=generator).to(value)


def _with_other_first(value: Any, samples: int, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != samples or samples < 2:
        return value
    changed, first = value.clone(), value[0]
    reversed_second = value[1].flip(tuple(range(first.dim())))
    if value.is_floating_point() or value.is_complex():
        changed[0] = _filled(first, generator)
    elif not torch.equal(first, reversed_second):
        changed[0] = reversed_second
    else:
        # A mask of ones, say: about half of the elements become zero, but not all of them, and zeros one.
        there = torch.randint(0, 2, (first.numel(),), generator=generator).bool()
        there[:1], there[-1:] = False, True
        changed[0] = torch.where(there.reshape(first.shape).to(value.device), (first == 0).to(value.dtype), first)
    return changed
