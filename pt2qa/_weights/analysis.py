"""Weight-by-weight comparison: the float value against what the quantized model reads."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pt2qa._ambient import torch_defaults
from pt2qa._decibels import decibels
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._metrics import ENDS
from pt2qa._quantize.pairing import QuantizedPair, check_pair, identity_of
from pt2qa._report.sums import Array
from pt2qa._simulator.products import WEIGHTED
from pt2qa._simulator.program import Constant, QuantParams
from pt2qa._simulator.simulator import Body
from pt2qa._weights.report import BINS, SIDES, UNQUANTIZED, WeightReport, WeightRow, span
from pt2qa._weights.sums import SumsOfWeights, WeightSums, histograms


@torch_defaults
def compare_weights(pair: QuantizedPair) -> WeightReport:
    """Compares every weight with its dequantized value; no data is needed.

    Args:
        pair: what :func:`pt2qa.quantize` or :func:`pt2qa.pair` returned; it is not changed.

    Returns:
        One row for each weight, bias and other parameter that an op reads.  Parameters that stay in float are rows too,
        with the note ``not quantized``.  A weight that one module reads repeatedly, as at each step of a recurrent op,
        is one row, named after its first reader.  A channel is dead if its float value is not zero but its dequantized
        value is.

    Raises:
        SelectionError: it is not a pair.

    >>> [(row.attr, row.dtype) for row in pt2qa.compare_weights(pair).rows]
    [('weight', 'int8'), ('bias', 'float32')]
    """
    check_pair(pair)
    known, rows, counts = SumsOfWeights(), list[WeightRow](), list[Array]()
    for constant, readers in _each_once(pair):
        row = _row(pair, constant, readers, known)
        rows.append(row)
        if row.quantized:
            counts.append(_counts(row, constant, known.of(constant, channel_axis(pair, constant))))
    lines = np.array(counts, dtype=np.int32).reshape(-1, len(SIDES), BINS)
    return WeightReport(
        rows=tuple(rows),
        unpaired=pair.pairing.unpaired,
        notes=tuple(dict.fromkeys((*pair.notes, *pair.program.notes))),
        **identity_of(pair),
        histograms={side: np.ascontiguousarray(lines[:, number]) for number, side in enumerate(SIDES)},
    )


def weight_rows(pair: QuantizedPair, known: SumsOfWeights) -> tuple[WeightRow, ...]:
    """The rows of :func:`compare_weights`, from sums that others read too."""
    return tuple(_row(pair, constant, readers, known) for constant, readers in _each_once(pair))


def _counts(row: WeightRow, constant: Constant, sums: WeightSums) -> Array:
    """The histograms of both sides; zeros where none is drawn."""
    covered = span(row)
    if covered is None:
        return np.zeros((len(SIDES), BINS))
    return histograms(constant.reference, constant.by_rows, covered, BINS, finite=sums.finite)


def _is_weight(constant: Constant) -> bool:
    value = constant.reference
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return constant.site is not None or constant.is_parameter


def _rounded_inside(pair: QuantizedPair, constant: Constant) -> Constant:
    """A constant that a nested graph rounds, as that graph reads it; any other one as it is."""
    if constant.nested_site is None:
        return constant
    site = pair.sites[constant.nested_site]
    body: Body = pair.simulator.on[site.source]
    simulator = body.simulator
    step = simulator.program.steps[simulator.program.producers[body.own(site).result]]
    with torch.no_grad():
        stored = simulator.site_function(step)(constant.reference)
    return replace(
        constant,
        stored=stored,
        site=site.index,
        reader=site.name,
        op=site.op,
        handle=site.handle,
        argument=1 if site.kind == "weight" else 2,
    )


def _each_once(pair: QuantizedPair) -> list[tuple[Constant, int]]:
    """The weights, each with how many ops of its module read it at the same argument with the same rounded values."""
    found: list[tuple[Constant, int]] = []
    places: dict[tuple[str, str, str, int], list[int]] = {}
    for constant in filter(_is_weight, (_rounded_inside(pair, each) for each in pair.program.constants)):
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


def _row(pair: QuantizedPair, constant: Constant, readers: int, known: SumsOfWeights) -> WeightRow:
    raise_if_interrupted()
    params, channels = params_of(pair, constant), channel_axis(pair, constant)
    by_channel = known.of(constant, channels)
    sums, axis = by_channel.total, params.axis if params is not None else None
    worst, worst_sqnr, dead = _worst(by_channel, channels)
    if params is None:
        special = UNQUANTIZED
    elif params.block:
        special = f"a scale for each block of {'x'.join(map(str, params.block))}"
    else:
        special = "" if channels is not None else "no channels to compare"
    notes = (special, f"read by {readers} ops" if readers > 1 else "", sums.reason)
    return WeightRow(
        handle=constant.handle,
        name=constant.reader,
        module=_module(pair, constant),
        op=constant.op,
        attr=_attribute(constant),
        dtype=params.dtype if params is not None else str(constant.reference.dtype).removeprefix("torch."),
        scale=params.largest_scale if params is not None else math.nan,
        axis=-1 if axis is None else axis,
        shape=tuple(constant.reference.shape),
        **{name: getattr(sums, name) for name in ("sqnr", "mse", "cosine", "l1", "atol", *ENDS)},
        worst_channel=worst,
        worst_channel_sqnr=worst_sqnr,
        dead_channels=dead,
        max_lsb=_max_lsb(params, constant, by_channel),
        note="; ".join(part for part in notes if part),
        quantized=params is not None,
    )


def params_of(pair: QuantizedPair, constant: Constant | None) -> QuantParams | None:
    return None if constant is None or constant.site is None else pair.sites[constant.site].params


def _attribute(constant: Constant) -> str:
    """``weight``, ``bias`` or the last part of the parameter's name, such as ``weight_hh_l0``."""
    role = {1: "weight", 2: "bias"}.get(constant.argument)
    own = constant.attribute.rpartition(".")[2]
    if role is not None and constant.op in WEIGHTED and not own.startswith((f"{role}_ih", f"{role}_hh")):
        return role
    return own or f"argument {constant.argument}"


def channel_axis(pair: QuantizedPair, constant: Constant) -> int | None:
    """The axis along which a weight is compared: that of its scales, or the op's output channels, if it has any."""
    params = params_of(pair, constant)
    if params is not None and params.axis is not None:
        return params.axis
    if constant.reference.dim() < 2 or constant.op not in WEIGHTED | {"embedding", "embedding_bag"}:
        return None
    return 1 if constant.op.startswith("conv_transpose") else 0


def _worst(sums: WeightSums, axis: int | None) -> tuple[int, float, int]:
    """Index and SQNR of the worst channel, and the number of dead channels.

    A channel that int8 rounds to zero has an SQNR of 0 dB: all of its signal is noise.  One that is NaN or infinite on
    one side only is worse than any number, and has none.
    """
    if axis is None or not sums.count:
        return -1, math.nan, 0
    signal, noise = sums.signal, sums.noise
    dead = int(((signal > 0) & sums.zero).sum())
    if bool(sums.nonfinite.any()):
        return int((sums.nonfinite > 0).int().argmax()), math.nan, dead
    ranking = torch.where(signal > 0, torch.where(noise > 0, signal / noise, math.inf), math.inf)
    worst = int(ranking.argmin())
    value = decibels(float(signal[worst]), float(noise[worst])) if signal[worst] > 0 else math.inf
    return worst, value, dead


def _max_lsb(params: QuantParams | None, constant: Constant, sums: WeightSums) -> float:
    """Largest error in integer steps, each channel or block in its own scale."""
    if params is None or params.scale is None or not sums.count:
        return math.nan
    if params.block:
        scale, _ = params.along(constant.reference)
        return float(((constant.quantized - constant.reference).detach().double() / scale).abs().max())
    scale = torch.as_tensor(params.scale, dtype=torch.float64, device="cpu")
    if scale.numel() > 1 and params.axis is None:
        return math.nan
    return float((sums.atol / scale).max())
