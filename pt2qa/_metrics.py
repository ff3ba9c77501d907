"""Error sums between a reference tensor and a quantized one, and the metrics computed from them.

The sums are frozen accumulators with ``empty / update / merge / compute``: updating with the chunks of a tensor,
however split, or merging the sums of several batches equals one update with all the data.

Precision and speed.  A float32 dot product over millions of elements loses four digits, and a float64 copy of every
tensor costs more than the model.  So float32 tensors are reduced in cache-sized chunks, with torch's pairwise sum or in
rows of 64 values, and the results are added in float64: within 1e-7 relative of an all-float64 computation
(3e-7 dB).
Values whose squares exceed the range of float32, infinities, NaN and all other dtypes take the exact path: float64
throughout.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._report.rows import Amount, Count
from pt2qa._report.sums import LARGEST, SMALLEST, Mergeable

CHUNK = 1 << 19
"""Elements summed in float32 before float64 takes over: 2 MiB, which stays in cache between passes."""
_ROW = 64
"""Squares summed in float32 before float64 takes over."""
_SMALLEST_CHUNK = 1024
"""Below this the float64 path is as fast."""
SMALLEST_SQUARES = 1e-24
"""Below this a float32 sum of squares may have lost elements to underflow; it is recomputed in float64."""
WITHOUT_FLOAT64 = {"mps"}
"""Devices that have no float64."""


ENDS = ("ref_min", "ref_max", "quant_min", "quant_max")
"""The smallest and the largest value of both sides, as :class:`ErrorSums` and rows call them."""

Range = tuple[float, float]
"""Smallest and largest value of a tensor; nan if it contains a NaN."""


@runtime_checkable
class Metric(Protocol):
    """A user-defined metric: an immutable accumulator.

    The instance given to ``compare_layers(metrics={"name": instance})`` is the empty state of every row.

    It may have an attribute ``worse``, ``"smaller"`` or ``"larger"``: which values are worse.  Without it, tables and
    ``report.worst`` treat larger values as worse, and a gate's ``max_drop`` refuses the metric.

    >>> from typing import NamedTuple
    >>> class LargestError(NamedTuple):
    ...     largest: float = 0.0
    ...
    ...     def update(self, reference, quantized):
    ...         return LargestError(max(self.largest, float((reference - quantized).abs().max())))
    ...
    ...     def merge(self, other):
    ...         return LargestError(max(self.largest, other.largest))
    ...
    ...     def compute(self):
    ...         return self.largest
    >>> isinstance(LargestError(), Metric)
    True
    >>> LargestError().update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5])).compute()
    0.5
    """

    def update(self, reference: Tensor, quantized: Tensor) -> Metric:
        """The state after one more pair of tensors of equal shape.

        A metric that declares them as keyword arguments, with default None, also receives ``isolated``: the output of
        the op's region run quantized on the reference's inputs, of the same shape, or None if that was not run; and
        ``scale``: the size of one integer step as a float, or None if there is no single step size.
        """
        ...

    def merge(self, other: Metric) -> Metric:
        """The combined state; ``a.merge(empty)`` equals ``a``, and the order does not matter."""
        ...

    def compute(self) -> float:
        """The number for the table; nan if nothing was seen."""
        ...


@dataclass(frozen=True, slots=True)
class ErrorSums(Mergeable):
    """Everything the layer table needs from a pair of tensors, as sums that add up over chunks, batches and ranks.

    Elements where both tensors have the same infinity, or both NaN, carry no error and no finite signal: they are left
    out and counted in ``excluded``.  Elements where only one is finite, or they differ in kind, are counted in
    ``nonfinite``; a single one makes every error nan.

    >>> sums = ErrorSums().update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]))
    >>> sums.signal, sums.noise, sums.l1, sums.atol
    (25.0, 0.25, 0.25, 0.5)
    >>> round(sums.sqnr, 3)
    20.0
    """

    count: Count = 0
    signal: Amount = 0.0
    noise: Amount = 0.0
    quant_signal: Amount = 0.0
    product: float = 0.0
    absolute: Amount = 0.0
    atol_seen: Amount = field(default=0.0, metadata=LARGEST)
    ref_sum: float = 0.0
    quant_sum: float = 0.0
    ref_min: float = field(default=math.inf, metadata=SMALLEST)
    ref_max: float = field(default=-math.inf, metadata=LARGEST)
    quant_min: float = field(default=math.inf, metadata=SMALLEST)
    quant_max: float = field(default=-math.inf, metadata=LARGEST)
    excluded: Count = 0
    nonfinite: Count = 0

    def update(self, reference: Tensor, quantized: Tensor) -> ErrorSums:
        return self.merge(error_sums(reference, quantized))

    def _unless_broken(self, value: float) -> float:
        return math.nan if self.nonfinite or not self.count else value

    @property
    def sqnr(self) -> float:
        """dB; see :func:`pt2qa.sqnr`. Identical tensors give inf, even if the reference is all zero."""
        if self.count and not self.nonfinite and self.noise == 0.0:
            return math.inf
        return self._unless_broken(decibels(self.signal, self.noise))

    @property
    def mse(self) -> float:
        return self._unless_broken(self.noise / max(self.count, 1))

    @property
    def l1(self) -> float:
        return self._unless_broken(self.absolute / max(self.count, 1))

    @property
    def atol(self) -> float:
        return self._unless_broken(self.atol_seen)

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two flattened tensors; nan if either is all zero."""
        scale = math.sqrt(self.signal) * math.sqrt(self.quant_signal)
        return self._unless_broken(min(1.0, max(-1.0, self.product / scale)) if scale else math.nan)

    @property
    def ref_mean(self) -> float:
        return self.ref_sum / self.count if self.count else math.nan

    @property
    def quant_mean(self) -> float:
        """Mean of the quantized values at elements where both are finite."""
        return self.quant_sum / self.count if self.count else math.nan

    @property
    def reason(self) -> str:
        """Why a number is nan, or what was left out; empty otherwise."""
        reasons = []
        if not self.count and not self.nonfinite:
            reasons.append("no finite values" if self.excluded else "no elements")
        if self.nonfinite:
            reasons.append(f"{self.nonfinite} values are NaN or infinite in one of the two only")
        if self.count and self.signal == 0.0 and self.noise != 0.0:
            reasons.append("the reference is all zero")
        if self.excluded:
            reasons.append(f"{self.excluded} equal NaN or infinite values left out")
        return "; ".join(reasons)


@dataclass(frozen=True, slots=True)
class NoiseSums(Mergeable):
    """Only the two sums of an SQNR: for error columns that share their reference with an :class:`ErrorSums`."""

    signal: Amount = 0.0
    noise: Amount = 0.0
    count: Count = 0

    @property
    def sqnr(self) -> float:
        """dB; see :func:`pt2qa.sqnr`. nan if nothing was seen."""
        return math.inf if self.count and self.noise == 0.0 else decibels(self.signal, self.noise)


def error_sums(reference: Tensor, quantized: Tensor) -> ErrorSums:
    """The :class:`ErrorSums` of one pair of tensors of equal shape, any dtype, any strides."""
    return sums_of_row(reference, quantized, ())[0]


def noise_sums(tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> list[NoiseSums]:
    """The :class:`NoiseSums` of pairs of tensors of one shape, the reference first, by their numbers in ``tensors``.

    Each tensor is read from memory once. A noise is nan if one of two values alone is not finite.
    """
    noises = [NoiseSums()] * len(pairs)
    for chunk in chunks(tensors):
        signals = {number: _fast_signal(chunk[number]) for number in {first for first, _ in pairs}}
        for number, (first, second) in enumerate(pairs):
            noises[number] = noises[number].merge(_noise(chunk[first], chunk[second], signals[first]))
    return noises


def divergence(reference: Tensor, quantized: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of each row in nats, in float64, from logits whose last axis has the classes."""
    ref, quant = (float64(logits.detach()).log_softmax(-1) for logits in (reference, quantized))
    # Where the reference's probability is zero the term is zero, though its logarithm is not finite.
    terms = torch.where(ref == -math.inf, 0.0, ref.exp() * (ref - quant))
    # Rounding may leave -1e-17 for equal distributions.
    return terms.sum(-1).clamp(min=0.0)


def differing(left: Tensor, right: Tensor) -> tuple[int, float]:
    """How many elements of two floating-point tensors of one shape differ, and the largest absolute difference."""
    count, largest = 0, [torch.zeros(())]
    for a, b in chunks((left, right)):
        memory = scratch(a) if a.dtype == b.dtype == torch.float32 else None
        count += int(torch.ne(a, b, out=memory).sum())
        largest.append(torch.sub(a, b, out=memory).abs_().amax().cpu())
    return count, float(torch.stack(largest).amax())


def value_range(x: Tensor) -> Range:
    """Smallest and largest value of a non-empty floating-point tensor; nan if it contains a NaN."""
    # Two passes that use the vector units beat torch.aminmax, which does not.
    return float(x.amin()), float(x.amax())


def sums_of_row(
    reference: Tensor, quantized: Tensor, others: Sequence[Tensor], ranges: Sequence[Range] = ()
) -> tuple[ErrorSums, tuple[NoiseSums, ...]]:
    """All sums of one row of the layer table, chunk by chunk, so that the reference is read from memory once.

    The ``others``, its isolated and its rounded value, get :class:`NoiseSums` against the same reference.  ``ranges``
    of ``reference`` and ``quantized`` are computed only if not given.
    """
    tensors = (reference, quantized, *others)
    for tensor in tensors:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"cannot compare shape {tuple(tensor.shape)} with reference shape {tuple(reference.shape)}"
            )
    total, noises = ErrorSums(), [NoiseSums()] * len(others)
    for ref, quant, *rest in chunks(tensors):
        sums = _fast_sums(ref, quant, ranges) or _exact_sums(ref, quant)
        total = total.merge(sums)
        finite = not sums.excluded and not sums.nonfinite
        noises = [
            noise.merge(_noise(ref, other, sums.signal if finite else None))
            for noise, other in zip(noises, rest, strict=True)
        ]
    return total, tuple(noises)


def _noise(ref: Tensor, other: Tensor, signal: float | None) -> NoiseSums:
    """The sums of one chunk; ``signal`` is the reference's sum of squares if all of it is finite."""
    if signal is not None and (noise := _fast_noise(ref, other)) is not None:
        return NoiseSums(signal, noise, ref.numel())
    exact = _exact_sums(ref, other)
    return NoiseSums(exact.signal, math.nan if exact.nonfinite else exact.noise, exact.count)


def chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Flat chunks of tensors of one shape in one common element order, without a copy if the layouts agree."""
    if not tensors[0].numel():
        return iter(())
    if any(tensor.is_complex() for tensor in tensors):
        tensors = [torch.view_as_real(tensor.to(torch.complex128).resolve_conj()) for tensor in tensors]
    strides = tensors[0].stride()
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    return zip(*(tensor.detach().permute(order).reshape(-1).split(CHUNK) for tensor in tensors), strict=True)


class _Scratch(threading.local):
    """Memory reused for every chunk, so that writes hit the cache and not fresh pages."""

    def __init__(self) -> None:
        # Modules are imported on first use, with whatever the caller has set then.
        with torch.inference_mode(False):
            self.memory = torch.empty(CHUNK, dtype=torch.float32, device="cpu")


_scratch = _Scratch()


def scratch(like: Tensor) -> Tensor:
    """Flat float32 memory for intermediate values of so many elements; on the CPU, the next call returns the same."""
    count = like.numel()
    reused = count <= CHUNK and like.device.type == "cpu"
    return _scratch.memory[:count] if reused else torch.empty(count, device=like.device)


def float64(x: Tensor) -> Tensor:
    """A tensor in float64, on the CPU if its device has none."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()


def _trusted(square_sum: float, *, identical: bool) -> bool:
    return math.isfinite(square_sum) and (square_sum >= SMALLEST_SQUARES or identical)


def _is_fast(ref: Tensor, quant: Tensor) -> bool:
    return ref.dtype == quant.dtype == torch.float32 and ref.numel() >= _SMALLEST_CHUNK and ref.device.type == "cpu"


def _square_sum(x: Tensor) -> float:
    """Sum of the squares of a flat float32 tensor: rows in float32, their sum in float64."""
    norm = torch.linalg.vector_norm
    whole = x.numel() // _ROW * _ROW
    total = float(norm(norm(x[:whole].view(-1, _ROW), dim=1), dtype=torch.float64)) ** 2
    return total if whole == x.numel() else total + float(norm(x[whole:], dtype=torch.float64)) ** 2


def _fast_sums(ref: Tensor, quant: Tensor, ranges: Sequence[Range]) -> ErrorSums | None:
    """The float32 path; None if its result cannot be trusted.

    With d = r - q the product needs no separate pass: 2 Σrq = Σrr + Σqq - Σdd.  The cosine stays
    accurate, because for close r and q it does not depend to first order on an error in Σrr or Σqq.
    """
    if not _is_fast(ref, quant):
        return None
    count = ref.numel()
    difference = torch.sub(ref, quant, out=scratch(ref))
    signal, quant_signal = _square_sum(ref), _square_sum(quant)
    ref_sum, quant_sum, absolute = float(ref.sum()), float(quant.sum()), float(difference.abs_().sum())
    largest = float(difference.amax())
    noise = float(difference.square_().sum())
    (ref_min, ref_max), (quant_min, quant_max) = ranges or (value_range(ref), value_range(quant))
    trusted = (
        math.isfinite(ref_sum + quant_sum + absolute)
        and _trusted(signal, identical=ref_min == ref_max == 0.0)
        and _trusted(quant_signal, identical=quant_min == quant_max == 0.0)
        and _trusted(noise, identical=largest == 0.0)
    )
    if not trusted:
        return None
    squares = signal, noise, quant_signal, (signal + quant_signal - noise) / 2
    return ErrorSums(count, *squares, absolute, largest, ref_sum, quant_sum, ref_min, ref_max, quant_min, quant_max)


def _fast_signal(ref: Tensor) -> float | None:
    """Sum of the squares by the float32 path; None if it cannot be trusted."""
    if not _is_fast(ref, ref):
        return None
    signal = _square_sum(ref)
    return signal if _trusted(signal, identical=signal == 0.0 and not ref.any()) else None


def _fast_noise(ref: Tensor, quant: Tensor) -> float | None:
    """Sum of the squared differences by the float32 path; None if it cannot be trusted."""
    if not _is_fast(ref, quant):
        return None
    difference = torch.sub(ref, quant, out=scratch(ref))
    noise = float(difference.square_().sum())
    return noise if _trusted(noise, identical=noise == 0.0 and torch.equal(ref, quant)) else None


def _exact_sums(ref: Tensor, quant: Tensor) -> ErrorSums:
    """The float64 path, which also handles NaN and infinities."""
    ref, quant = float64(ref), float64(quant)
    finite = ref.isfinite() & quant.isfinite()
    excluded = nonfinite = 0
    if not bool(finite.all()):
        same = (ref == quant) | (ref.isnan() & quant.isnan())
        excluded = int((~finite & same).sum())
        nonfinite = int((~finite & ~same).sum())
        ref, quant = ref[finite], quant[finite]
    if not ref.numel():
        return ErrorSums(excluded=excluded, nonfinite=nonfinite)
    difference = ref - quant
    pairs = (ref, ref), (difference, difference), (quant, quant), (ref, quant)
    signal, noise, quant_signal, product = (float(torch.dot(left, right)) for left, right in pairs)
    errors = float(difference.abs().sum()), float(difference.abs().max())
    means = float(ref.sum()), float(quant.sum())
    ranges = *value_range(ref), *value_range(quant)
    return ErrorSums(ref.numel(), signal, noise, quant_signal, product, *errors, *means, *ranges, excluded, nonfinite)
