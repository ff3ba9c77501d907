"""What the rows of weights need to know of a weight, from one pass over its float and its dequantized values.

A block of channels is read at a time, so that what is computed from it stays in cache.  Values are reduced in float32
within a channel, by torch's pairwise sum, and in float64 across channels.  Channels with values that are NaN or
infinite, or whose squares leave the range of float32, are read again in float64, as are weights of all other dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2qa._metrics import ErrorSums, float64
from pt2qa._simulator.program import Constant

BLOCK = 1 << 16
"""Values that are read at a time: both sides and their difference fit a cache of 1 MiB."""

_ROW = 1 << 12
"""Values of a weight without channels that are reduced in float32."""

_SMALLEST_SQUARES = 1e-24
"""Below this a float32 sum of squares may have lost values to underflow."""


@dataclass(frozen=True, slots=True)
class WeightSums:
    """A weight's sums over each of its channels, or over pieces of a weight that has none.

    Where one of the two values alone is NaN or infinite, or both are in different ways, the element counts in
    ``nonfinite`` and the channel's ``atol`` is nan; where both are alike, in ``excluded``.  All else is summed over the
    other elements.

    Args:
        count: elements in all.
        signal, noise, quant_signal, absolute: sums of the squares of the float values, of the errors and of the
            dequantized values, and of the absolute errors: float64 of shape (channels,), like all that follow.
        atol: largest absolute error.
        ref_min, ref_max, quant_min, quant_max: of both sides.
        excluded, nonfinite: elements that are left out.
    """

    count: int
    signal: Tensor
    noise: Tensor
    quant_signal: Tensor
    absolute: Tensor
    atol: Tensor
    ref_min: Tensor
    ref_max: Tensor
    quant_min: Tensor
    quant_max: Tensor
    excluded: Tensor
    nonfinite: Tensor

    @property
    def finite(self) -> bool:
        """Whether every value of both sides is finite."""
        return not bool((self.excluded + self.nonfinite).any())

    @property
    def zero(self) -> Tensor:
        """Whether all dequantized values of a channel are zero: booleans of shape (channels,)."""
        return (self.quant_min == 0) & (self.quant_max == 0)

    @property
    def largest(self) -> Tensor:
        """The largest absolute float value of each channel."""
        return torch.maximum(-self.ref_min, self.ref_max)

    @property
    def total(self) -> ErrorSums:
        """The sums over the whole weight; the means, which no row shows, are nan."""
        if not self.count:
            return ErrorSums()
        signal, noise, quant_signal = (float(each.sum()) for each in (self.signal, self.noise, self.quant_signal))
        excluded, nonfinite = int(self.excluded.sum()), int(self.nonfinite.sum())
        return ErrorSums(
            count=self.count - excluded - nonfinite,
            signal=signal,
            noise=noise,
            quant_signal=quant_signal,
            product=(signal + quant_signal - noise) / 2,
            absolute=float(self.absolute.sum()),
            atol_seen=float(self.atol.max()),
            ref_sum=math.nan,
            quant_sum=math.nan,
            ref_min=float(self.ref_min.min()),
            ref_max=float(self.ref_max.max()),
            quant_min=float(self.quant_min.min()),
            quant_max=float(self.quant_max.max()),
            excluded=excluded,
            nonfinite=nonfinite,
        )


class SumsOfWeights:
    """The sums of the weights of a model, each read when it is first asked for, and once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int | None], WeightSums] = {}

    def of(self, constant: Constant, axis: int | None, quantized: Callable[[], Tensor] | None = None) -> WeightSums:
        """The sums over the channels along an axis; over pieces of any size if it is None.

        ``quantized`` gives the dequantized values, where they are made for something else, too.
        """
        key = constant.slot, axis
        if key not in self._known:
            made = constant.quantized if quantized is None else quantized()
            self._known[key] = weight_sums(constant.reference.detach(), made.detach(), axis)
        return self._known[key]


def weight_sums(reference: Tensor, quantized: Tensor, axis: int | None) -> WeightSums:
    """The sums of one weight.

    Args:
        reference: its float values, of any shape and any floating-point dtype.
        quantized: its dequantized values, of the same shape.
        axis: its channel axis; None without.
    """
    parts = [_columns(ref, quant) for ref, quant in _by_channel(reference, quantized, axis)]
    return WeightSums(reference.numel(), *torch.cat([*parts, torch.empty(11, 0, dtype=torch.float64)], 1))


def _by_channel(reference: Tensor, quantized: Tensor, axis: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Both sides with the channels first; a weight without any in rows, and what is left of it."""
    if axis is not None:
        yield reference.movedim(axis, 0), quantized.movedim(axis, 0)
        return
    whole = reference.numel() // _ROW * _ROW
    (rows, rest), (quant_rows, quant_rest) = (value.flatten().tensor_split([whole]) for value in (reference, quantized))
    yield rows.view(-1, _ROW), quant_rows.view(-1, _ROW)
    yield rest[None], quant_rest[None]


def _columns(reference: Tensor, quantized: Tensor) -> Tensor:
    """The columns of :class:`WeightSums` for channels: float64 of shape (11, channels)."""
    if not reference.numel():
        return torch.empty(11, 0, dtype=torch.float64)
    values = reference[0].numel()
    channels = max(1, BLOCK // values)
    if not reference.dtype == quantized.dtype == torch.float32:
        return torch.cat([_exact(*block) for block in _blocks(reference, quantized, channels)], 1)
    scratch = torch.empty(min(channels, len(reference)), values, device=reference.device)
    sums = torch.cat([_fast(*block, scratch) for block in _blocks(reference, quantized, channels)], 1).cpu().double()
    again = _untrusted(sums).nonzero().flatten()
    for some in again.split(channels):
        sums[:, some] = _exact(reference[some].reshape(-1, values), quantized[some].reshape(-1, values))
    return sums


def _blocks(reference: Tensor, quantized: Tensor, channels: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many channels at a time, flat; they are copied only where they are not the first axis of the weight."""
    for ref, quant in zip(reference.split(channels), quantized.split(channels), strict=True):
        yield ref.reshape(len(ref), -1), quant.reshape(len(ref), -1)


def _fast(ref: Tensor, quant: Tensor, scratch: Tensor) -> Tensor:
    """The columns of a block of float32; those of a channel with a NaN or an infinity are not all finite."""
    memory = scratch[: len(ref)]
    error = torch.sub(ref, quant, out=memory).abs_()
    atol, absolute, noise = error.amax(1), error.sum(1), error.square_().sum(1)
    signal, quant_signal = torch.mul(ref, ref, out=memory).sum(1), torch.mul(quant, quant, out=memory).sum(1)
    ends = ref.amin(1), ref.amax(1), quant.amin(1), quant.amax(1)
    none = torch.zeros_like(atol)
    return torch.stack((signal, noise, quant_signal, absolute, atol, *ends, none, none))


def _untrusted(sums: Tensor) -> Tensor:
    """The channels whose sums in float32 are not finite, or may have lost values."""
    signal, noise, quant_signal, _, atol, ref_min, ref_max, quant_min, quant_max, *_ = sums
    sides = ((signal, ref_min, ref_max), (quant_signal, quant_min, quant_max), (noise, atol, atol))
    lost = [(squares < _SMALLEST_SQUARES) & ((low != 0) | (high != 0)) for squares, low, high in sides]
    untrusted: Tensor = ~sums.isfinite().all(0) | lost[0] | lost[1] | lost[2]
    return untrusted


def _exact(ref: Tensor, quant: Tensor) -> Tensor:
    """The columns in float64, over the elements that are finite on both sides."""
    ref, quant = float64(ref), float64(quant)
    finite = ref.isfinite() & quant.isfinite()
    alike = (ref == quant) | (ref.isnan() & quant.isnan())
    excluded, nonfinite = (~finite & alike).sum(1).double(), (~finite & ~alike).sum(1).double()
    ends = [value.where(finite, end) for value in (ref, quant) for end in (math.inf, -math.inf)]
    ref, quant = ref.where(finite, 0.0), quant.where(finite, 0.0)
    error = (ref - quant).abs_()
    squares = ((value * value).sum(1) for value in (ref, error, quant))
    atol = error.amax(1).where(nonfinite == 0, math.nan)
    lows_and_highs = ends[0].amin(1), ends[1].amax(1), ends[2].amin(1), ends[3].amax(1)
    return torch.stack((*squares, error.sum(1), atol, *lows_and_highs, excluded, nonfinite)).cpu()
