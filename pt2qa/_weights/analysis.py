"""Weight-by-weight comparison: the float value against what the quantized model reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pt2qa._decibels import decibels
from pt2qa._metrics import error_sums
from pt2qa._other_tools import explains_arguments
from pt2qa._quantize.pairing import QuantizedPair, check_pair
from pt2qa._simulator.products import WEIGHTED
from pt2qa._simulator.program import Constant, QuantParams
from pt2qa._weights.report import BINS, SIDES, WeightReport, span
from pt2qa._weights.rows import UNQUANTIZED, WeightRow

BLOCK = 1 << 17
"""Elements that are read at a time: their float64 copies, 1 MiB each, stay in cache."""


@explains_arguments
def compare_weights(pair: QuantizedPair) -> WeightReport:
    """Compares every weight with its dequantized value; no data is needed.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.

    Returns:
        One row for each weight, bias and other parameter that an op reads.  Parameters that stay in float are rows too,
        with the note ``not quantized``.  A weight that one module reads repeatedly, as at each step of a recurrent op,
        is one row, named after its first reader.  A channel is dead if its float value is not zero but its dequantized
        value is.
    """
    check_pair(pair)
    constants = _each_once(pair)
    rows = [_row(pair, constant, readers) for constant, readers in constants]
    return WeightReport(
        rows=tuple(rows),
        unpaired=pair.pairing.unpaired,
        notes=tuple(dict.fromkeys((*pair.notes, *pair.program.notes))),
        quantizer=pair.quantizer,
        model=pair.model,
        environment=pair.environment,
        histograms=_histograms(
            [(row, constant) for row, (constant, _) in zip(rows, constants, strict=True) if row.quantized]
        ),
    )


def _is_weight(constant: Constant) -> bool:
    value = constant.quantized
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return constant.site is not None or constant.is_parameter


def _each_once(pair: QuantizedPair) -> list[tuple[Constant, int]]:
    """The weights, each with how many ops of its module read it at the same argument with the same rounded values."""
    found: list[tuple[Constant, int]] = []
    places: dict[tuple[str, str, str, int], list[int]] = {}
    for constant in filter(_is_weight, pair.program.constants):
        key = (constant.attribute, _module(pair, constant), constant.op, constant.argument)
        like = places.setdefault(key, [])
        same = (at for at in like if torch.equal(found[at][0].quantized, constant.quantized))
        at = next(same, None) if constant.attribute else None
        if at is None:
            like.append(len(found))
            found.append((constant, 1))
        else:
            found[at] = (found[at][0], found[at][1] + 1)
    return found


def _module(pair: QuantizedPair, constant: Constant) -> str:
    known = pair.names.get(constant.handle)
    return known.module if known is not None else ""


def _row(pair: QuantizedPair, constant: Constant, readers: int) -> WeightRow:
    float_value, dequantized = constant.reference.detach(), constant.quantized.detach()
    params = pair.sites[constant.site].params if constant.site is not None else None
    sums = error_sums(float_value, dequantized.to(float_value.dtype))
    axis = params.axis if params is not None else None
    channel_axis = axis if axis is not None else _channel_axis(constant)
    channels = _Channels.of(float_value, dequantized, channel_axis) if float_value.numel() else None
    worst, worst_sqnr, dead = _worst(float_value, dequantized, channel_axis, channels)
    scales = params.largest_scale if params is not None else math.nan
    notes = (UNQUANTIZED if params is None else "", f"read by {readers} ops" if readers > 1 else "", sums.reason)
    return WeightRow(
        handle=constant.handle,
        name=constant.reader,
        module=_module(pair, constant),
        op=constant.op,
        attr=_attribute(constant),
        dtype=params.dtype if params is not None else str(float_value.dtype).removeprefix("torch."),
        scale=scales,
        axis=-1 if axis is None else axis,
        shape=tuple(float_value.shape),
        sqnr=sums.sqnr,
        worst_channel=worst,
        worst_channel_sqnr=worst_sqnr,
        dead_channels=dead,
        mse=sums.mse,
        cosine=sums.cosine,
        l1=sums.l1,
        atol=sums.atol,
        max_lsb=_max_lsb(params, channels),
        ref_min=sums.ref_min,
        quant_min=sums.quant_min,
        ref_max=sums.ref_max,
        quant_max=sums.quant_max,
        note="; ".join(part for part in notes if part),
    )


def _histograms(weights: Sequence[tuple[WeightRow, Constant]]) -> dict[str, npt.NDArray[Any]]:
    """Counts of the values of quantized weights, by side."""
    counts = [[_counts(value, span(row)) for value in (each.reference, each.quantized)] for row, each in weights]
    lines = np.array(counts, dtype=np.int32).reshape(-1, len(SIDES), BINS)
    return {side: np.ascontiguousarray(lines[:, number]) for number, side in enumerate(SIDES)}


def _counts(value: Tensor, covered: tuple[float, float] | None) -> list[float]:
    if covered is None:
        return [0.0] * BINS
    blocks = value.detach().flatten().split(BLOCK)
    found: list[float] = torch.stack([torch.histc(block.double(), BINS, *covered) for block in blocks]).sum(0).tolist()
    return found


def _attribute(constant: Constant) -> str:
    """``weight``, ``bias`` or the last part of the parameter's name, such as ``weight_hh_l0``."""
    role = {1: "weight", 2: "bias"}.get(constant.argument)
    own = constant.attribute.rpartition(".")[2]
    if role is not None and constant.op in WEIGHTED and not own.startswith((f"{role}_ih", f"{role}_hh")):
        return role
    return own or f"argument {constant.argument}"


def _channel_axis(constant: Constant) -> int | None:
    """The output channel axis, if the op has one."""
    if constant.reference.dim() < 2 or constant.op not in WEIGHTED | {"embedding", "embedding_bag"}:
        return None
    return 1 if constant.op.startswith("conv_transpose") else 0


class _Channels(NamedTuple):
    """Sums over each channel of a weight, in float64; one channel where the op has none."""

    signal: Tensor
    noise: Tensor
    largest: Tensor
    zero: Tensor

    @classmethod
    def of(cls, float_value: Tensor, dequantized: Tensor, axis: int | None) -> _Channels:
        """Reads a weight a block of channels at a time: float64 copies stay in cache, and none is kept."""
        ref, quant = (
            value.reshape(1, -1) if axis is None else value.movedim(axis, 0).flatten(1)
            for value in (float_value, dequantized)
        )
        rows = max(1, BLOCK // max(1, ref.shape[1]))
        blocks = [cls._of(*block) for block in zip(ref.split(rows), quant.split(rows), strict=True)]
        return cls(*map(torch.cat, zip(*blocks, strict=True)))

    @classmethod
    def _of(cls, ref: Tensor, quant: Tensor) -> _Channels:
        zero = (quant == 0).all(1)
        ref = ref.double()
        error = ref - quant
        return cls(ref.square_().sum(1), error.square().sum(1), error.abs_().amax(1), zero)


def _worst(
    float_value: Tensor, dequantized: Tensor, axis: int | None, channels: _Channels | None
) -> tuple[int, float, int]:
    """Index and SQNR of the worst channel, and the number of dead channels.

    A channel that int8 rounds to zero has an SQNR of 0 dB: all of its signal is noise.  One that is NaN or infinite on
    one side only is worse than any number, and has none.
    """
    if axis is None or channels is None:
        return -1, math.nan, 0
    signal, noise, _, zero = channels
    if not bool(signal.isfinite().all() and noise.isfinite().all()):
        ref, quant = (value.double().movedim(axis, 0).flatten(1) for value in (float_value, dequantized))
        finite = ref.isfinite() & quant.isfinite()
        nonfinite = (~finite & ~((ref == quant) | (ref.isnan() & quant.isnan()))).any(1)
        ref, quant = (value.where(finite, 0.0) for value in (ref, quant))
        signal, noise, zero = (ref * ref).sum(1), ((ref - quant) ** 2).sum(1), (quant == 0).all(1)
        if bool(nonfinite.any()):
            return int(nonfinite.int().argmax()), math.nan, int(((signal > 0) & zero).sum())
    ranking = torch.where(signal > 0, torch.where(noise > 0, signal / noise, math.inf), math.inf)
    worst = int(ranking.argmin())
    value = decibels(float(signal[worst]), float(noise[worst])) if signal[worst] > 0 else math.inf
    return worst, value, int(((signal > 0) & zero).sum())


def _max_lsb(params: QuantParams | None, channels: _Channels | None) -> float:
    """Largest error in integer steps, each channel in its own scale."""
    if params is None or params.scale is None or channels is None:
        return math.nan
    scale = torch.as_tensor(params.scale, dtype=torch.float64)
    if scale.numel() > 1 and params.axis is None:
        return math.nan
    return float((channels.largest / scale).max())
