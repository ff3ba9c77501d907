"""Rows of a weight report: what rounding did to one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pt2qa._report.columns import column
from pt2qa._report.formats import cosine as five_digits
from pt2qa._report.formats import index
from pt2qa._report.rows import Row

UNQUANTIZED: Final = "not quantized"
"""The note of a :class:`WeightRow` whose weight stays in float."""


def _was_quantized(cells: Mapping[str, Any]) -> bool:
    """What files before schema 4 say in the note alone, in these words."""
    return not cells["note"].startswith("not quantized")


@dataclass(frozen=True, slots=True, eq=False)
class WeightRow(Row):
    """The error of one parameter: float against dequantized.  Formulas as in :class:`pt2qa.LayerRow`.

    A row of what :func:`pt2qa.compare_weights` returns.

    Args:
        handle: handle of the op that reads the weight.
        name: name of that op, e.g. ``layer1.0.conv1/conv2d``.
        module: its module path.
        op: the op, e.g. ``conv2d``.
        attr: which parameter: ``weight``, ``bias`` and so on.
        dtype: integer type; ``float32`` for a weight that is not quantized.
        scale: the largest of its channel scales; nan without one.
        axis: the channel axis of per-channel quantization, -1 for per-tensor.
        shape: the weight's shape.
        sqnr: dB over the whole weight.
        worst_channel: index of the channel with the smallest SQNR; -1 without channels.
        worst_channel_sqnr: that channel's SQNR in dB; 0 for a dead channel.
        dead_channels: number of channels that are non-zero in float but all zeros when quantized.
        mse, cosine, l1, atol, max_lsb: as for layers.
        ref_min, quant_min, ref_max, quant_max: of both sides.
        note: ``not quantized``, or anything special about the row.
        quantized: whether it is rounded; False for a weight that stays in float.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "attr", "dtype", "axis", "sqnr", "worst_channel_sqnr", "worst_channel", "dead_channels"),
        *("max_lsb", "cosine"),
    )

    handle: Annotated[int, column(worse="smaller")]
    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: str
    attr: Annotated[str, column(key=True, importance=7)]
    dtype: Annotated[str, column(importance=2)]
    scale: float
    axis: Annotated[int, column(show=index, importance=1)]
    shape: tuple[int, ...]
    sqnr: Annotated[float, column("SQNR\ndB", unit="dB", importance=8)]
    worst_channel: Annotated[int, column("worst\nch.", show=index, importance=5)]
    worst_channel_sqnr: Annotated[float, column("worst ch.\ndB", unit="dB", importance=0)]
    dead_channels: Annotated[int, column("dead\nch.", importance=6)]
    mse: float
    cosine: Annotated[float, column(show=five_digits, worse="smaller", importance=3)]
    l1: float
    atol: float
    max_lsb: Annotated[float, column("max err\nLSB", importance=4)]
    ref_min: float
    quant_min: float
    ref_max: float
    quant_max: float
    note: str = ""
    quantized: Annotated[bool, column(extended=True, since=4, earlier=_was_quantized)] = False
