"""What the rows of weights need to know of a weight, from one pass over its float and its dequantized values.

A block of channels is read at a time, so that what is computed from it stays in cache, and so does its dequantized
value.  Values are reduced in float32 within a channel, squares in pieces of :data:`_PIECE` values, and in float64
beyond.  Channels with values that are NaN or infinite, or whose squares leave the range of float32, are read again in
float64, as are weights of all other dtypes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._metrics import SMALLEST_SQUARES, ErrorSums
from pt2qa._simulator.program import Constant
from pt2qa._simulator.stored import Integers
from pt2qa._weights.report import SIDES

BLOCK = 1 << 19
"""Values that are read at a time.  Larger blocks leave the cache, and smaller ones spend their time in calls."""

_PIECE = 1 << 9
"""Values whose squares are added in float32, one after the other."""


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

    def of(self, constant: Constant, axis: int | None) -> WeightSums:
        """The sums over the channels along an axis; over pieces of any size if it is None."""
        key = constant.slot, axis
        if key not in self._known:
            self._known[key] = weight_sums(constant.reference, constant.by_rows, axis)
        return self._known[key]


def weight_sums(reference: Tensor, quantized: Tensor | Integers, axis: int | None) -> WeightSums:
    """The sums of one weight.

    Args:
        reference: its float values, of any shape and any floating-point dtype.
        quantized: its dequantized values, of the same shape, or what they are made from.
        axis: its channel axis; None without.
    """
    both = Sides.of(reference, quantized, axis)
    sums = _sums(both) if reference.numel() else torch.empty(11, 0, dtype=torch.float64)
    return WeightSums(reference.numel(), *sums)


@dataclass(frozen=True, slots=True)
class Sides:
    """Both values of a weight, some channels at a time.

    Args:
        reference, quantized: as :func:`weight_sums` takes them, the channels first.
        step: how many channels are read at a time.
        memory: for so many values in float32; the block that was read last may be in it.
    """

    reference: Tensor
    quantized: Tensor | Integers
    step: int
    memory: Tensor

    @classmethod
    def of(cls, reference: Tensor, quantized: Tensor | Integers, axis: int | None = None) -> Sides:
        """By channels, or by whatever is first where there are none."""
        reference = reference.detach()
        if isinstance(quantized, Integers) and axis:
            quantized = quantized.value()
        if isinstance(quantized, Tensor):
            quantized = quantized.detach()
            if axis is None and reference.dim() < 2:
                reference, quantized = reference.reshape(1, -1), quantized.reshape(1, -1)
            reference, quantized = reference.movedim(axis or 0, 0), quantized.movedim(axis or 0, 0)
        values = max(1, reference[:1].numel())
        step = max(1, min(BLOCK // values, len(reference)))
        return cls(reference, quantized, step, torch.empty(step * values, device=reference.device))

    @property
    def starts(self) -> range:
        """The first channel of each block."""
        return range(0, len(self.reference), self.step)

    def block(self, start: int) -> tuple[Tensor, Tensor]:
        """Both sides of some channels, each of shape (channels, values) and on the CPU."""
        end = start + self.step
        ref = self.reference[start:end]
        if isinstance(self.quantized, Tensor):
            quant = self.quantized[start:end]
        else:
            quant = self.quantized.rows(start, end, self.memory[: ref.numel()].view(ref.shape))
        return ref.cpu().reshape(len(ref), -1), quant.cpu().reshape(len(ref), -1)


def _sums(both: Sides) -> Tensor:
    """The columns of :class:`WeightSums`: float64 of shape (11, channels)."""
    if both.reference.dtype != torch.float32 or getattr(both.quantized, "dtype", torch.float32) != torch.float32:
        return torch.cat([_exact(*both.block(start)) for start in both.starts], 1)
    found = zip(*(_fast(*both.block(start), both.memory.cpu()) for start in both.starts), strict=True)
    columns = [torch.cat(column).double() for column in found]
    sums = torch.stack([*columns, *torch.zeros(2, len(columns[0]), dtype=torch.float64)])
    untrusted = _untrusted(sums)
    for start in both.starts:
        if (again := untrusted[start : start + both.step]).any():
            ref, quant = both.block(start)
            sums[:, start : start + both.step][:, again] = _exact(ref[again], quant[again])
    return sums


def _fast(ref: Tensor, quant: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
    """The columns of a block of float32 but the last two.

    Those of a channel with NaN or infinities are not all finite.
    """
    ends = ref.amin(1), ref.amax(1), quant.amin(1), quant.amax(1)
    signal, quant_signal = _squares(ref), _squares(quant)
    error = torch.sub(ref, quant, out=memory[: ref.numel()].view(ref.shape))
    noise = _squares(error)
    error.abs_()
    return signal, noise, quant_signal, error.sum(1), error.amax(1), *ends


def _squares(values: Tensor) -> Tensor:
    """The sum of the squares of each channel: shape (channels,)."""
    whole = values.shape[1] // _PIECE
    pieces = values[:, : whole * _PIECE].unflatten(1, (whole, _PIECE)).numpy()
    rest = values[:, whole * _PIECE :].numpy()
    # NumPy takes half of torch's time for it.
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.vecdot(pieces, pieces).sum(1, dtype=np.float64) + np.vecdot(rest, rest))


def _untrusted(sums: Tensor) -> Tensor:
    """The channels whose sums in float32 are not finite, or may have lost values."""
    signal, noise, quant_signal, _, atol, ref_min, ref_max, quant_min, quant_max, *_ = sums
    sides = ((signal, ref_min, ref_max), (quant_signal, quant_min, quant_max), (noise, atol, atol))
    lost = [(squares < SMALLEST_SQUARES) & ((low != 0) | (high != 0)) for squares, low, high in sides]
    untrusted: Tensor = ~sums.isfinite().all(0) | lost[0] | lost[1] | lost[2]
    return untrusted


def _exact(ref: Tensor, quant: Tensor) -> Tensor:
    """The columns in float64, over the elements that are finite on both sides."""
    ref, quant = ref.double(), quant.double()
    finite = ref.isfinite() & quant.isfinite()
    alike = (ref == quant) | (ref.isnan() & quant.isnan())
    excluded, nonfinite = (~finite & alike).sum(1).double(), (~finite & ~alike).sum(1).double()
    ends = [value.where(finite, end) for value in (ref, quant) for end in (math.inf, -math.inf)]
    ref, quant = ref.where(finite, 0.0), quant.where(finite, 0.0)
    error = (ref - quant).abs_()
    squares = ((value * value).sum(1) for value in (ref, error, quant))
    atol = error.amax(1).where(nonfinite == 0, math.nan)
    lows_and_highs = ends[0].amin(1), ends[1].amax(1), ends[2].amin(1), ends[3].amax(1)
    return torch.stack((*squares, error.sum(1), atol, *lows_and_highs, excluded, nonfinite))


# -- histograms --------------------------------------------------------------------------------------------------------

_ON_EDGE = 1e-12
"""In bins: rounding in float64 moves a value by less, and other float32 values are further from an edge."""

_FARTHEST = 1e3
"""In bins, from zero to the range: further away, rounding moves values by more than :data:`_ON_EDGE`."""


def histograms(
    reference: Tensor, quantized: Tensor | Integers, covered: tuple[float, float], bins: int, *, finite: bool
) -> npt.NDArray[np.int64]:
    """Counts of the finite values of both sides in equally wide bins; the last one holds its upper end, too.

    Args:
        reference: float values of any shape and floating-point dtype, within ``covered`` where they are finite.
        quantized: the dequantized ones, or what they are made from.
        covered: where the first bin begins and the last one ends.
        bins: number of bins, at most 41.
        finite: whether every value is.

    Returns:
        Shape (2, bins).
    """
    both = Sides.of(reference, quantized)
    bins_per_unit = bins / (covered[1] - covered[0])
    near = finite and abs(covered[0]) * bins_per_unit < _FARTHEST
    # A value on an edge, such as 0 in a range around it, belongs to the bin above, wherever rounding leaves it.
    first = torch.tensor([_ON_EDGE - covered[0] * bins_per_unit], dtype=torch.float64)
    # Written again and again: fresh memory takes longer than what is done in it.
    memory = torch.empty(len(both.memory), dtype=torch.float64)
    # Two values are counted at a time, so each line begins at an even place.
    numbers = torch.empty(len(SIDES), len(both.memory) + len(both.memory) % 2, dtype=torch.int8)
    counts = np.zeros((len(SIDES), bins), dtype=np.int64)
    for start in both.starts:
        blocks = [block.flatten() for block in both.block(start)]
        if not near:
            counts += [torch.histc(block.double(), bins, *covered).long().numpy() for block in blocks]
            continue
        for number, block in zip(numbers, blocks, strict=True):
            places = memory[: len(block)].copy_(block)
            number[: len(block)].copy_(torch.add(first, places, alpha=bins_per_unit, out=places))
        found = _frequencies(numbers[:, : len(blocks[0])], bins + 1)
        # Only the end of the range is beyond the last bin.
        found[:, bins - 1] += found[:, bins]
        counts += found[:, :bins]
    return counts


def _frequencies(numbers: Tensor, kinds: int) -> npt.NDArray[np.int64]:
    """How often each number from 0 to ``kinds`` - 1 is in either line of bytes; the first line is overwritten."""
    first, second = numbers
    moved = second - first
    if moved.amin() < -1 or moved.amax() > 1:
        return np.stack([_counts(line, kinds) for line in numbers])
    # Rounding moves a value by one bin at most, so that counting the moves with the numbers counts both lines.
    moves = _counts(first.add_(moved.add_(1), alpha=kinds), 3 * kinds).reshape(3, kinds)
    return np.stack((moves.sum(0), np.roll(moves[0], -1) + moves[1] + np.roll(moves[2], 1)))


def _counts(numbers: Tensor, kinds: int) -> npt.NDArray[np.int64]:
    """How often each number from 0 to ``kinds`` - 1 is among bytes."""
    pairs, last = numbers.tensor_split([len(numbers) // 2 * 2])
    # Two values are counted at a time, which takes half as long: one gives the row of a table, the other the column.
    table = torch.bincount(pairs.view(torch.int16), minlength=kinds << 8).view(kinds, 1 << 8)
    counts: npt.NDArray[np.int64] = (
        table.sum(1) + table.sum(0)[:kinds] + torch.bincount(last, minlength=kinds)
    ).numpy()
    return counts
