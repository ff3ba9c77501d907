"""Error sums between a reference tensor and a quantized one, and the numbers made from them.

The sums are frozen accumulators with ``empty / update / merge / compute``: updating with chunks of a tensor, in any
split, or merging the sums of several batches gives what one update with everything gives.

Precision and speed.  A float32 dot product over millions of elements loses four digits, and a float64 copy of every
tensor costs more than the model.  So float32 tensors are reduced in float32 over blocks of 1,024 elements, one cache
full at a time, and the block sums are added in float64: 1e-8 relative to an all-float64 computation (4e-8 dB), at the
price of two or three reads.  Values whose squares leave the range of float32, infinities, NaN and every other dtype
take the exact route: float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

_BLOCK = 1024
"""Elements that are summed in float32 before float64 takes over."""
_CHUNK = 1 << 19
"""Elements of one pass: 2 MiB of float32, so that the difference stays in the cache."""
_SMALLEST_SQUARE_SUM = 1e-24
"""Below this a float32 sum of squares may have lost elements to underflow; it is recomputed in float64."""


@runtime_checkable
class Metric(Protocol):
    """What a user-written metric is: an accumulator whose instances are never changed.

    The instance given to ``compare_layers(metrics={"name": instance})`` is the empty state of every row.
    See ``docs/custom_metric.md`` for a worked example.
    """

    def update(self, reference: Tensor, quantized: Tensor) -> Metric:
        """The state after one more pair of tensors of equal shape."""
        ...

    def merge(self, other: Metric) -> Metric:
        """The state of both; ``a.merge(empty)`` equals ``a`` and the order does not matter."""
        ...

    def compute(self) -> float:
        """The number for the table; nan where nothing was seen."""
        ...


def sqnr(signal: float, noise: float) -> float:
    """Signal-to-quantization-noise ratio ``10 * log10(signal / noise)`` in dB, the reference being the signal.

    Args:
        signal: sum of the squared reference values.
        noise: sum of the squared differences.

    Returns:
        inf where nothing differs, nan where the reference is all zero (or nothing was seen) and something differs.

    >>> sqnr(100.0, 1.0)
    20.0
    >>> sqnr(1.0, 0.0)
    inf
    """
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if signal == 0.0:
        return math.nan
    if noise == 0.0:
        return math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


@dataclass(frozen=True, slots=True)
class ErrorSums:
    """Everything the layer table needs of a pair of tensors, as sums that add up over chunks, batches and ranks.

    Places where both tensors hold the same infinity, or both NaN, carry no error and no finite signal: they are left
    out and counted in ``excluded``.  Places where only one of them is finite, or they differ in kind, are counted in
    ``nonfinite``; a single one makes every error nan.

    >>> sums = ErrorSums().update(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.5]))
    >>> sums.signal, sums.noise, sums.l1, sums.atol
    (25.0, 0.25, 0.25, 0.5)
    >>> round(sums.sqnr, 3)
    20.0
    """

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0
    quant_signal: float = 0.0
    product: float = 0.0
    absolute: float = 0.0
    atol_seen: float = 0.0
    ref_sum: float = 0.0
    quant_sum: float = 0.0
    ref_min: float = math.inf
    ref_max: float = -math.inf
    quant_min: float = math.inf
    quant_max: float = -math.inf
    excluded: int = 0
    nonfinite: int = 0

    def update(self, reference: Tensor, quantized: Tensor) -> ErrorSums:
        """Adds a pair of tensors of equal shape and of any dtype.

        Raises:
            ValueError: the shapes differ.
        """
        return self.merge(error_sums(reference, quantized))

    def merge(self, other: ErrorSums) -> ErrorSums:
        """The sums over both."""
        return ErrorSums(
            self.count + other.count,
            self.signal + other.signal,
            self.noise + other.noise,
            self.quant_signal + other.quant_signal,
            self.product + other.product,
            self.absolute + other.absolute,
            max(self.atol_seen, other.atol_seen),
            self.ref_sum + other.ref_sum,
            self.quant_sum + other.quant_sum,
            min(self.ref_min, other.ref_min),
            max(self.ref_max, other.ref_max),
            min(self.quant_min, other.quant_min),
            max(self.quant_max, other.quant_max),
            self.excluded + other.excluded,
            self.nonfinite + other.nonfinite,
        )

    def _unless_broken(self, value: float) -> float:
        return math.nan if self.nonfinite or not self.count else value

    @property
    def sqnr(self) -> float:
        """dB; see :func:`sqnr`. Identical tensors give inf, also where the reference is all zero."""
        if self.count and not self.nonfinite and self.noise == 0.0:
            return math.inf
        return self._unless_broken(sqnr(self.signal, self.noise))

    @property
    def mse(self) -> float:
        """Mean of the squared differences."""
        return self._unless_broken(self.noise / max(self.count, 1))

    @property
    def l1(self) -> float:
        """Mean of the absolute differences."""
        return self._unless_broken(self.absolute / max(self.count, 1))

    @property
    def atol(self) -> float:
        """Largest absolute difference."""
        return self._unless_broken(self.atol_seen)

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two flattened tensors; nan where one of them is all zero."""
        scale = math.sqrt(self.signal) * math.sqrt(self.quant_signal)
        return self._unless_broken(min(1.0, max(-1.0, self.product / scale)) if scale else math.nan)

    @property
    def ref_mean(self) -> float:
        """Mean of the finite reference values."""
        return self.ref_sum / self.count if self.count else math.nan

    @property
    def quant_mean(self) -> float:
        """Mean of the quantized values at the places where both are finite."""
        return self.quant_sum / self.count if self.count else math.nan

    @property
    def reason(self) -> str:
        """Why a number is nan, or what was left out; empty where there is nothing to say."""
        reasons = []
        if not self.count and not self.nonfinite:
            reasons.append("nothing finite in it" if self.excluded else "no elements")
        if self.nonfinite:
            reasons.append(f"{self.nonfinite} values are NaN or infinite in one of the two only")
        if self.count and self.signal == 0.0 and self.noise != 0.0:
            reasons.append("the reference is all zero")
        if self.excluded:
            reasons.append(f"{self.excluded} equal NaN or infinite values left out")
        return "; ".join(reasons)


@dataclass(frozen=True, slots=True)
class NoiseSums:
    """The two sums of an SQNR alone: for error columns that share their reference with an :class:`ErrorSums`."""

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0

    def merge(self, other: NoiseSums) -> NoiseSums:
        """The sums over both."""
        return NoiseSums(self.signal + other.signal, self.noise + other.noise, self.count + other.count)

    @property
    def sqnr(self) -> float:
        """dB; see :func:`sqnr`. nan where nothing was seen."""
        return math.inf if self.count and self.noise == 0.0 else sqnr(self.signal, self.noise)


def error_sums(reference: Tensor, quantized: Tensor) -> ErrorSums:
    """The :class:`ErrorSums` of one pair of tensors of equal shape, any dtype, any strides.

    Raises:
        ValueError: the shapes differ.
    """
    _require_equal_shapes(reference, quantized)
    total = ErrorSums()
    for ref, quant in _chunks(reference, quantized):
        total = total.merge(_fast_sums(ref, quant) or _exact_sums(ref, quant))
    return total


def noise_sums(reference: Tensor, other: Tensor, signal: float | None = None) -> NoiseSums:
    """The :class:`NoiseSums` of one pair of tensors of equal shape.

    Args:
        reference: the signal.
        other: what is compared with it.
        signal: the sum of squares of ``reference``, where the caller has it already and all of it is finite.

    Raises:
        ValueError: the shapes differ.
    """
    _require_equal_shapes(reference, other)
    if other is reference:
        return NoiseSums(signal if signal is not None else error_sums(reference, reference).signal, 0.0, other.numel())
    noise, own_signal = 0.0, 0.0
    for ref, quant in _chunks(reference, other):
        fast = _fast_noise(ref, quant, with_signal=signal is None)
        if fast is None:
            exact = _exact_sums(ref, quant)
            fast = (exact.signal, math.nan if exact.nonfinite else exact.noise)
        own_signal += fast[0]
        noise += fast[1]
    return NoiseSums(own_signal if signal is None else signal, noise, reference.numel())


def _require_equal_shapes(reference: Tensor, quantized: Tensor) -> None:
    if reference.shape != quantized.shape:
        raise ValueError(f"cannot compare shape {tuple(quantized.shape)} with reference shape {tuple(reference.shape)}")


def _chunks(reference: Tensor, quantized: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Flat chunks of both tensors in one common order of elements, without a copy where the layouts agree."""
    if reference.is_complex() or quantized.is_complex():
        reference, quantized = (
            torch.view_as_real(t.to(torch.complex128).resolve_conj()) for t in (reference, quantized)
        )
    reference, quantized = reference.detach(), quantized.detach()
    if reference.stride() == quantized.stride() and not reference.is_contiguous():
        strides = reference.stride()
        order = sorted(range(reference.dim()), key=lambda axis: -strides[axis])
        reference, quantized = reference.permute(order), quantized.permute(order)
    return zip(
        reference.reshape(-1).split(_CHUNK) if reference.numel() else (),
        quantized.reshape(-1).split(_CHUNK) if quantized.numel() else (),
        strict=True,
    )


def _block_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot product of two flat float32 tensors: float32 within blocks, float64 across them. 0-d float64."""
    whole = a.numel() // _BLOCK * _BLOCK
    total: Tensor = torch.linalg.vecdot(a[:whole].view(-1, _BLOCK), b[:whole].view(-1, _BLOCK)).sum(dtype=torch.float64)
    if whole != a.numel():
        total = total + torch.dot(a[whole:], b[whole:])
    return total


def _trusted(square_sum: float, identical: bool) -> bool:
    return math.isfinite(square_sum) and (square_sum >= _SMALLEST_SQUARE_SUM or identical)


def _fast_sums(ref: Tensor, quant: Tensor) -> ErrorSums | None:
    """The float32 route; None where its result cannot be trusted."""
    if ref.dtype != torch.float32 or quant.dtype != torch.float32 or ref.numel() < _BLOCK:
        return None
    difference = ref - quant
    bounds = torch.stack((*torch.aminmax(ref), *torch.aminmax(quant), *torch.aminmax(difference))).tolist()
    squares = torch.stack(
        (
            _block_dot(ref, ref),
            _block_dot(quant, quant),
            _block_dot(ref, quant),
            _block_dot(difference, difference),
            ref.sum().double(),
            quant.sum().double(),
            difference.abs_().sum().double(),
        )
    ).tolist()
    signal, quant_signal, product, noise, ref_sum, quant_sum, absolute = squares
    trusted = (
        math.isfinite(product + ref_sum + quant_sum + absolute)
        and _trusted(signal, bounds[0] == bounds[1] == 0.0)
        and _trusted(quant_signal, bounds[2] == bounds[3] == 0.0)
        and _trusted(noise, bounds[4] == bounds[5] == 0.0)
    )
    if not trusted:
        return None
    return ErrorSums(
        count=ref.numel(),
        signal=signal,
        noise=noise,
        quant_signal=quant_signal,
        product=product,
        absolute=absolute,
        atol_seen=max(-bounds[4], bounds[5]),
        ref_sum=ref_sum,
        quant_sum=quant_sum,
        ref_min=bounds[0],
        ref_max=bounds[1],
        quant_min=bounds[2],
        quant_max=bounds[3],
    )


def _fast_noise(ref: Tensor, quant: Tensor, *, with_signal: bool) -> tuple[float, float] | None:
    if ref.dtype != torch.float32 or quant.dtype != torch.float32 or ref.numel() < _BLOCK:
        return None
    difference = ref - quant
    noise = float(_block_dot(difference, difference))
    signal = float(_block_dot(ref, ref)) if with_signal else 1.0
    if not (_trusted(noise, noise == 0.0 and torch.equal(ref, quant)) and _trusted(signal, False)):
        return None
    return signal, noise


def _exact_sums(ref: Tensor, quant: Tensor) -> ErrorSums:
    """The float64 route, which also sorts out NaN and infinities."""
    ref, quant = ref.double(), quant.double()
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
    return ErrorSums(
        count=ref.numel(),
        signal=float(torch.dot(ref, ref)),
        noise=float(torch.dot(difference, difference)),
        quant_signal=float(torch.dot(quant, quant)),
        product=float(torch.dot(ref, quant)),
        absolute=float(difference.abs().sum()),
        atol_seen=float(difference.abs().max()),
        ref_sum=float(ref.sum()),
        quant_sum=float(quant.sum()),
        ref_min=float(ref.min()),
        ref_max=float(ref.max()),
        quant_min=float(quant.min()),
        quant_max=float(quant.max()),
        excluded=excluded,
        nonfinite=nonfinite,
    )
