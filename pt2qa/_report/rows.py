"""One line of a report: what was measured at one op, one weight, or why it could not be measured.

The rows hold numbers as they were computed, in float64.  Rounding, units and sorting belong to the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, Final, Literal

from pt2qa import __version__
from pt2qa._report.columns import since
from pt2qa.errors import ReportError

UNQUANTIZED: Final = "not quantized"
"""The note of a :class:`WeightRow` whose weight stays float."""

NONFINITE_ALONE: Final = "NaN or infinite when run by itself"
"""In the note of a :class:`LayerRow` whose isolated SQNR was measured and is nan."""

EXTENDED: Final[dict[str, Any]] = {"extended": True}
"""Field metadata of columns that ``to_pandas`` and ``to_csv`` give only with ``extended=True``."""

_SINCE_2: Final[dict[str, Any]] = EXTENDED | since(2)
"""Of columns that reports of the schema 1 do not have."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What made a report: package versions as pip states them, and the model's fingerprint.

    Args:
        torch, torchao, executorch, pt2qa: versions, or ``"not installed"``.
        fingerprint: identifies the float model (its graph and parameters); empty where nothing was fingerprinted.

    >>> Environment.here("3f2a").fingerprint
    '3f2a'
    """

    torch: str
    torchao: str
    executorch: str
    pt2qa: str
    fingerprint: str

    @classmethod
    def here(cls, fingerprint: str) -> Environment:
        """The versions here, read from package metadata: nothing is imported."""
        return cls(installed("torch"), installed("torchao"), installed("executorch"), __version__, fingerprint)


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A node of one graph that has no partner in the other, and why.

    Args:
        handle: the node's handle; -1 where it carries none.
        name: what people read, e.g. ``layer1.0.bn1/batch_norm``.
        side: the graph that holds it.
        reason: why it stands alone, e.g. ``folded into layer1.0.conv1``.
    """

    handle: int
    name: str
    side: Literal["reference", "quantized"]
    reason: str


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The error of one op's output (or a model output, or a module's output).

    With ``ref`` the reference's value and ``quant`` the quantized model's, sums over all elements of all batches in
    float64, the **reference is the signal**::

        sqnr = 10 * log10(sum(ref**2) / sum((ref - quant)**2))        dB; equal tensors: inf; zero reference: nan
        mse  = mean((ref - quant)**2)          l1   = mean(|ref - quant|)
        atol = max(|ref - quant|)              max_lsb = atol / scale
        cosine = sum(ref * quant) / sqrt(sum(ref**2) * sum(quant**2))

    ``nan`` means "not defined" or "not measured", and ``note`` says why.

    Args:
        handle: the op's handle, unique in the model and in graph order; -1 where there is none (outputs, modules).
        name: module path, op and ordinal, e.g. ``layer1.0.conv1/conv2d``.
        module: the module path alone; empty at the top of the model.
        op: the op, e.g. ``conv2d``; of a module row its class name.
        observed_at: what was compared: ``dq`` is the dequantized value that consumers read, ``raw`` is the op's own
            output where nothing quantizes it.
        dtype: the integer type it is quantized to, e.g. ``int8``; of a ``raw`` row the tensor's own type.
        scale: real value of one integer step; nan without one.
        zero_point: the integer that stands for 0.0, a whole number; nan without one.
        shape: shape of the first batch's value; ``()`` for a 0-d tensor.
        sqnr: cumulative, dB: the reference run against the quantized run, so upstream error is included.
        isolated_sqnr: dB: this op's region run quantized on the *reference's* inputs, so without
            error from further upstream.
        rounding_sqnr: dB: quantize-dequantize of the reference value against that value, the site's own rounding.
        mse, cosine, l1, atol: as above, cumulative, in the units of the value (``mse`` squared).
        max_lsb: largest error in integer steps.
        saturation: share of values, 0..1, that the clamp moved: outside the integer range after rounding.
        ref_min, quant_min, ref_max, quant_max, ref_mean, quant_mean: of the two sides, in the units of the value.
        range_use: share of the integer range, 0..1, that the reference values span.
        note: why a number is nan, or what is special here.
        part_of: for a part of a recurrent op that capture took apart, that op's name; else empty.
        step: which step of the sequence such a part computes, from 0; -1 where it is of none, or of all.
        answers_for: name of the op whose quantization is to blame for the isolated error: the row's own where the value
            is rounded; where it stays in float the convolution or the like in its region.  Empty where no op reads the
            value as it is (a convolution's, before the ReLU that is computed with it), and where its error is that of
            rounded values which an op in float reads.
        input_sqnr: dB: the smallest ``sqnr`` among the values that the op's region reads; inf where it reads the
            model's inputs alone, nan where one of them has no row or no number.
        excess_lsb: how far, in integer steps, the reference's values reach beyond what the integers hold; 0 where they
            stay within, nan where there is no single scale.
        custom: the user's own metrics by name; every row of one report has the same names.

    Raises:
        ReportError: ``zero_point`` is neither nan nor a whole number.

    Source:
        the definitions follow DESIGN's "Numbers" in ``docs/design.md``.
    """

    handle: int
    name: str
    module: str
    op: str
    observed_at: Literal["dq", "raw"]
    dtype: str
    scale: float
    zero_point: float
    shape: tuple[int, ...]
    sqnr: float
    isolated_sqnr: float
    rounding_sqnr: float
    mse: float
    cosine: float
    l1: float
    atol: float
    max_lsb: float
    saturation: float
    ref_min: float
    quant_min: float
    ref_max: float
    quant_max: float
    ref_mean: float
    quant_mean: float
    range_use: float = field(default=nan, metadata=EXTENDED)
    note: str = field(default="", metadata=EXTENDED)
    part_of: str = field(default="", metadata=EXTENDED)
    step: int = field(default=-1, metadata=EXTENDED)
    answers_for: str = field(default="", metadata=_SINCE_2)
    input_sqnr: float = field(default=nan, metadata=_SINCE_2)
    excess_lsb: float = field(default=nan, metadata=_SINCE_2)
    custom: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # to_pandas promises a nullable integer column, so a fractional zero point is refused where it is made.
        if not isnan(self.zero_point) and not float(self.zero_point).is_integer():
            raise ReportError(f"zero_point of {self.name!r}: got {self.zero_point}, expected a whole number or nan")


@dataclass(frozen=True, slots=True)
class WeightRow:
    """The error of one parameter: float against dequantized.  Formulas as in :class:`LayerRow`.

    Args:
        handle: handle of the op that reads the weight.
        name: name of that op, e.g. ``layer1.0.conv1/conv2d``.
        module: its module path.
        op: the op, e.g. ``conv2d``.
        attr: which parameter: ``weight``, ``bias`` and so on.
        dtype: integer type; ``float32`` for a weight that is not quantized.
        scale: the largest scale of its channels; nan without one.
        axis: the channel axis of per-channel quantization, -1 when it is per tensor.
        shape: the weight's shape.
        sqnr: dB over the whole weight.
        worst_channel: index of the channel with the smallest SQNR; -1 where there are no channels.
        worst_channel_sqnr: that channel's SQNR in dB; 0 for a dead channel.
        dead_channels: number of channels that hold something in float and nothing but zeros when quantized.
        mse, cosine, l1, atol, max_lsb: as for layers.
        ref_min, quant_min, ref_max, quant_max: of the two sides.
        note: ``not quantized``, or what is special here.
    """

    handle: int
    name: str
    module: str
    op: str
    attr: str
    dtype: str
    scale: float
    axis: int
    shape: tuple[int, ...]
    sqnr: float
    worst_channel: int
    worst_channel_sqnr: float
    dead_channels: int
    mse: float
    cosine: float
    l1: float
    atol: float
    max_lsb: float
    ref_min: float
    quant_min: float
    ref_max: float
    quant_max: float
    note: str = ""

    @property
    def quantized(self) -> bool:
        """False for a weight that stays float: its note starts with :data:`UNQUANTIZED`."""
        return not self.note.startswith(UNQUANTIZED)


def installed(package: str) -> str:
    """The installed version of a package, or ``"not installed"``; the package is not imported.

    >>> installed("surely-no-such-package")
    'not installed'
    """
    # Imported here because importlib.metadata pulls in email and zipfile, which reading a report does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
