"""One output of both models on one batch, and the metrics that rank its samples: built-in, custom, and lost labels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from pt2qa._bad_cases.report import LabelCounts
from pt2qa._graph.internals.torch import pytree
from pt2qa._metrics import ErrorSums, divergence, error_sums, float64
from pt2qa._simulator.batches import leaf_names
from pt2qa._simulator.data import LEADING, Layout
from pt2qa.errors import BatchError, SelectionError

FLIPS: Final = "flips"
"""The ranking by lost labels; it needs targets."""

LARGE = 1 << 14
"""Elements in a sample above which one reduction per sample costs less than float64 copies of the whole batch."""


@dataclass(frozen=True)
class OutputPair:
    """Both models' values of one output, after post-processing.

    Attributes:
        axis: of the samples; None if the value belongs to the batch as a whole.
        problem: why the two cannot be compared.
        layout, keep: where the value has the axes of a mask, and which positions count; None if all do.
    """

    name: str
    reference: Any
    quantized: Any
    axis: int | None
    problem: str = ""
    layout: Layout | None = None
    keep: Tensor | None = None

    @property
    def places(self) -> list[int]:
        """Numbers of the samples; -1 for a batch as a whole."""
        return [-1] if self.axis is None else list(range(self.reference.shape[self.axis]))

    def counted(self, place: int) -> tuple[Tensor, Tensor]:
        """Both values of one sample, as far as they count: of shape (positions, ...) with a mask."""
        both = self.reference, self.quantized
        if self.axis is not None:
            both = self.reference.narrow(self.axis, place, 1), self.quantized.narrow(self.axis, place, 1)
        if self.layout is None or self.keep is None:
            return both
        keep = self.keep if self.axis is None else self.keep.narrow(0, place, 1)
        return self.layout.counted(both[0], keep), self.layout.counted(both[1], keep)

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """Of each sample, the first position where another class or token wins, and that with the lowest SQNR.

        -1 where there is none, or the value has no positions.
        """
        keep, both = self.keep, (self.reference, self.quantized)
        leads = self.layout in (LEADING, replace(LEADING, batch=None))  # (samples, positions, ...)
        if not leads or keep is None or self.axis != 0 or both[0].shape != both[1].shape:
            return [(-1, -1)] * len(self.places)
        reference, quantized = (float64(x).reshape(*keep.shape, -1) for x in both)
        winners = both if both[0].dim() == 2 else tuple(x.argmax(-1) for x in both)
        others = (winners[0] != winners[1]).reshape(*keep.shape, -1).any(-1)
        signal, noise = reference.square().sum(-1), (reference - quantized).square().sum(-1)
        ratio = torch.where(noise > 0, noise / signal, 0.0).masked_fill(~keep, 0.0)
        first = torch.where(others & keep, 1, 0)
        return [
            (int(wrong.argmax()) if bool(wrong.any()) else -1, int(noisy.argmax()) if bool(noisy.any()) else -1)
            for wrong, noisy in zip(first, ratio, strict=True)
        ]

    @functools.cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Both values with the samples first, of shape (samples, ...)."""
        axis = self.axis
        both = self.reference, self.quantized
        return tuple(x.unsqueeze(0) if axis is None else x.movedim(axis, 0) for x in both)

    @functools.cached_property
    def sums(self) -> list[ErrorSums]:
        """The error sums of each sample, equal to those of ``compare_layers`` for that sample alone."""
        if self.layout is not None:
            return [error_sums(*self.counted(place)) for place in self.places]
        reference, quantized = self.rows
        size = reference[:1].numel()
        if reference.is_complex() or quantized.is_complex() or size >= LARGE or not size:
            return [error_sums(ref, quant) for ref, quant in zip(reference, quantized, strict=True)]
        sums = _vectorised(float64(reference).reshape(-1, size), float64(quantized).reshape(-1, size))
        return [
            error_sums(reference[place], quantized[place]) if found is None else found
            for place, found in enumerate(sums)
        ]

    def nonfinite(self, place: int) -> bool:
        """Whether the quantized model returns NaN or an infinity where the reference is finite."""
        if self.problem or self.reference.shape != self.quantized.shape:
            return False
        whole = self.axis is not None and place < 0
        reference, quantized = (self.reference, self.quantized) if whole else self.counted(place)
        return bool((reference.isfinite() & ~quantized.isfinite()).any())


def output_pairs(
    reference: Any, quantized: Any, axis: int | None, size: int, layouts: Sequence[Layout | None], keep: Tensor | None
) -> Iterator[OutputPair]:
    """The outputs of both models on a batch of this size, leaf by leaf; without a batch axis, each as a whole.

    ``layouts`` are those of the leaves for the mask ``keep``.
    """
    names, left = leaf_names(reference), pytree.tree_leaves(reference)
    if leaf_names(quantized) != names:
        for name, ref in zip(names, left, strict=True):
            yield OutputPair(name, ref, None, None, "reference and quantized results are nested differently")
        return
    for name, ref, quant, layout in zip(names, left, pytree.tree_leaves(quantized), layouts, strict=True):
        ref, quant = _as_tensor(ref), _as_tensor(quant)
        if not isinstance(ref, Tensor) or not isinstance(quant, Tensor):
            yield OutputPair(name, ref, quant, None, f"{'None' if ref is None else type(ref).__name__} is not a tensor")
        else:
            both = axis is not None and all(x.dim() > axis and x.shape[axis] == size for x in (ref, quant))
            yield OutputPair(name, ref, quant, axis if both else None, layout=layout, keep=keep)


def _as_tensor(value: Any) -> Any:
    """A plain number, such as a count of boxes, as a tensor."""
    return torch.as_tensor(value) if isinstance(value, (bool, int, float)) else value


def _vectorised(ref: Tensor, quant: Tensor) -> list[ErrorSums | None]:
    """Sums of each row of float64 matrices; None for a row with a non-finite value."""
    difference = ref - quant
    absolute = difference.abs()
    pairs = (ref, ref), (difference, difference), (quant, quant), (ref, quant)
    columns = [*(torch.linalg.vecdot(*pair) for pair in pairs), absolute.sum(1), absolute.amax(1)]
    found: list[ErrorSums | None] = []
    for signal, noise, quant_signal, product, total, largest in torch.stack(columns, 1).tolist():
        finite = math.isfinite(signal + noise + quant_signal)
        found.append(ErrorSums(ref.shape[1], signal, noise, quant_signal, product, total, largest) if finite else None)
    return found


@dataclass(frozen=True, slots=True)
class Scores:
    """A metric's values for one output on one batch, by sample; sample -1 is the batch as a whole.

    ``notes`` say why a number is nan, or what was excluded; ``problem`` says why there is no number at all.
    """

    places: Sequence[int] = ()
    numbers: Sequence[float] = ()
    notes: Sequence[str] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CaseMetric:
    """A custom metric for :func:`pt2qa.find_bad_cases`.

    Args:
        name: its name in reports.
        function: takes the reference's and the quantized model's value of one output for a whole batch.  Returns a 1-d
            tensor with one number for each sample, or one number for the whole batch.  If the output has no batch axis,
            the worst number of a 1-d tensor counts for the batch.  With a mask it is called for each sample, with the
            positions that count: shape (1, positions, ...).
        worst: which numbers are bad.

    >>> worst_class = CaseMetric("worst class", lambda ref, quant: (ref - quant).abs().amax(1))
    >>> worst_class.function(torch.zeros(2, 3), torch.eye(2, 3)).tolist()
    [1.0, 1.0]
    """

    name: str
    function: Callable[[Any, Any], Tensor | float]
    worst: Literal["smallest", "largest"] = "largest"

    def scores(self, output: OutputPair) -> Scores:
        """One number for each sample, or one for the batch.

        Raises:
            SelectionError: the function returned something else.
        """
        if output.problem and output.quantized is None:
            return Scores(problem=output.problem)
        numbers = self._numbers(output)
        if len(numbers) != len(output.places):
            if len(numbers) > 1 and output.axis is not None:
                raise SelectionError(
                    f"the metric {self.name!r} returned {len(numbers)} numbers for {output.name}, which holds "
                    f"{len(output.places)} samples; expected one per sample, or one number."
                )
            known = [number for number in numbers if not math.isnan(number)]
            pick = min if self.worst == "smallest" else max
            return Scores([-1], [pick(known, default=math.nan)], ["" if known else "the metric is nan"])
        return Scores(output.places, numbers, ["the metric is nan" if math.isnan(n) else "" for n in numbers])

    def _numbers(self, output: OutputPair) -> list[float]:
        if output.layout is None:
            return self._returned(output, output.reference, output.quantized)
        counted = ([x.unsqueeze(0) for x in output.counted(place)] for place in output.places)
        return [number for both in counted for number in self._returned(output, *both)]

    def _returned(self, output: OutputPair, reference: Any, quantized: Any) -> list[float]:
        result = self.function(reference, quantized)
        if isinstance(result, Tensor) and result.dim() <= 1:
            return float64(result.detach()).reshape(-1).tolist()
        if isinstance(result, Tensor):
            got = f"a tensor of shape {tuple(result.shape)}"
        else:
            try:
                return [float(result)]
            except (TypeError, ValueError):
                got = type(result).__name__
        raise SelectionError(
            f"the metric {self.name!r} returned {got} for {output.name}; expected one number, or a 1-d tensor "
            "with one number per sample."
        )


@dataclass(frozen=True, slots=True)
class BuiltInMetric:
    """A metric computed from the error sums, or ``kl``.

    ``kl`` is ``KL(softmax(ref) || softmax(quant))`` in nats over the last axis, the mean over a sample's other axes.
    """

    name: str
    worst: Literal["smallest", "largest"] = "largest"

    def scores(self, output: OutputPair) -> Scores:
        """One number for each sample; a problem where the values cannot be compared."""
        if problem := self._problem(output):
            return Scores(problem=problem)
        if self.name == "kl":
            if output.layout is None:
                numbers = divergence(*output.rows).reshape(len(output.places), -1).mean(1).tolist()
            else:
                numbers = [float(divergence(*output.counted(place)).mean()) for place in output.places]
            return Scores(output.places, numbers, ["NaN or infinite logits" if math.isnan(n) else "" for n in numbers])
        numbers = [getattr(sums, self.name) for sums in output.sums]
        # Only a cosine is nan without a reason of the sums.
        notes = [
            sums.reason or ("one of the two is all zero" if math.isnan(number) else "")
            for sums, number in zip(output.sums, numbers, strict=True)
        ]
        return Scores(output.places, numbers, notes)

    def _problem(self, output: OutputPair) -> str:
        if output.problem:
            return output.problem
        reference, quantized = output.reference, output.quantized
        if reference.shape != quantized.shape:
            return f"shapes differ: {tuple(reference.shape)} and {tuple(quantized.shape)}"
        if self.name == "kl" and not (reference.is_floating_point() and quantized.is_floating_point()):
            return f"kl needs floating-point logits, not {str(reference.dtype).removeprefix('torch.')}"
        if self.name == "kl" and reference.dim() - (output.axis is not None) < 1:
            return "kl needs an axis of classes, the last one"
        return ""


BUILT_IN: Final = {
    **{name: BuiltInMetric(name, "smallest") for name in ("sqnr", "cosine")},
    **{name: BuiltInMetric(name) for name in ("l1", "atol", "kl")},
}

AnyMetric: TypeAlias = BuiltInMetric | CaseMetric


def chosen_metrics(metric: str | CaseMetric | Sequence[str | CaseMetric], *, with_targets: bool) -> list[AnyMetric]:
    """The metrics that the user chose, without ``flips``, which is computed whenever there are targets."""
    given = [metric] if isinstance(metric, (str, CaseMetric)) else list(metric)
    asked = [entry.lower() if isinstance(entry, str) else entry for entry in given]
    names = [entry if isinstance(entry, str) else entry.name for entry in asked]
    known = [*BUILT_IN, FLIPS]
    for name, entry in zip(names, asked, strict=True):
        if isinstance(entry, str) and name not in known:
            raise SelectionError(f"unknown metric {name!r}; expected {', '.join(known)}, or a pt2qa.CaseMetric.")
        if isinstance(entry, CaseMetric) and name in known:
            raise SelectionError(f"the metric name {name!r} is taken by a built-in metric. Choose another name.")
        if names.count(name) > 1:
            raise SelectionError(f"the metric {name!r} was given twice.")
        if name == FLIPS and not with_targets:
            raise SelectionError('metric="flips" needs targets: pass targets_of=, which returns those of an item.')
    if not asked:
        raise SelectionError("no metric was given.")
    return [BUILT_IN[entry] if isinstance(entry, str) else entry for entry in asked if entry != FLIPS]


def as_targets(targets: Any) -> Tensor:
    tensor = torch.as_tensor(targets)
    if tensor.is_floating_point() or tensor.is_complex():
        raise BatchError(
            f"targets_of returned {str(tensor.dtype).removeprefix('torch.')} values; expected integer class numbers."
        )
    return tensor.reshape(tensor.shape or (1,))  # a number is that of one sample


def count_labels(output: OutputPair, targets: Tensor) -> tuple[LabelCounts, Scores] | None:
    """How often each model is right, and the number of labels that each sample loses.

    The output must hold integers in the shape of the targets, or have an additional last axis with the score of each
    class; else nothing is counted.  Negative targets are ignored, as in losses that ignore -100.
    """
    reference, quantized = (_classes(value, targets) for value in (output.reference, output.quantized))
    if output.problem or reference is None or quantized is None:
        return None
    targets = targets.to(reference.device)
    counted = targets >= 0
    ref_right, quant_right = ((found == targets) & counted for found in (reference, quantized))
    lost, gained = ref_right & ~quant_right, quant_right & ~ref_right
    counts = LabelCounts(output.name, *(int(mask.sum()) for mask in (counted, ref_right, quant_right, lost, gained)))
    by_sample = output.axis is not None and targets.dim() > output.axis
    if by_sample and targets.shape[output.axis] == len(output.places):  # type: ignore[index]  # by_sample says it is one
        numbers = lost.movedim(output.axis, 0).flatten(1).sum(1) if lost.dim() > 1 else lost  # type: ignore[arg-type]
        return counts, Scores(output.places, float64(numbers).tolist(), [""] * len(output.places))
    return counts, Scores([-1], [float(counts.lost)], [""])


def _classes(value: Any, targets: Tensor) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    if value.shape == targets.shape and not value.is_floating_point():
        return value
    if value.is_floating_point() and value.dim() == targets.dim() + 1 and value.shape[:-1] == targets.shape:
        return value.argmax(-1)
    return None
