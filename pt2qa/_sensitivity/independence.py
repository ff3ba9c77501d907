"""Which values keep the samples of a batch apart: a property of the graph, found once for a pair, without its data.

The reference runs twice on inputs of the captured shapes, the second time with another first sample.  A value keeps
samples apart if its elements, in order, are equal parts for each sample, and only the first part differs.  Inputs are
random, because what real data leave equal (samples that are alike, a relu that is zero) says nothing about the graph,
and would be decided differently in each part of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pt2qa._exclusion import computes
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import sizes_of
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._sensitivity.gradients import float_tensors
from pt2qa._sensitivity.metrics import PostProcess, finished, float_leaves
from pt2qa._simulator.batches import as_batch, count_samples
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator, tensors_equal

_KNOWN: WeakKeyDictionary[Simulator, Independence] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Independence:
    """At ``slots`` an error of one sample reaches the outputs of that sample alone.

    ``problem`` is the exception that a run raised; there are no slots then.
    """

    slots: frozenset[int] = frozenset()
    problem: str = ""


def independence(pair: QuantizedPair, post_process: PostProcess | None) -> Independence:
    """Where samples are apart; empty if they are not at the outputs, or if the graph takes one sample at a time."""
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
