"""Rows of an annotation report: places, modules, types of op; and of the difference of two such reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from pt2qa._report.rows import EXTENDED

Role = Literal["input", "output", "weight", "bias"]
Basis = Literal["annotated and converted", "annotated", "converted"]
"""What an annotation report was read from: the quantizer's annotation, the converted model, or both."""

BASES: Final = ("annotated and converted", "annotated", "converted")


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """A place where an op makes or reads a value.

    A place that stays float has its float ``dtype`` and no other entry.  Where an op reads a rounded value and has not
    asked for it, the entries are those of the value, and ``annotated`` is False.

    Args:
        name: the op, e.g. ``layer1.0.conv1/conv2d``.
        module: its module path; empty at the top of the model.
        op: its kind, e.g. ``conv2d``; ``input`` for an input of the model, which has an output alone.
        role: what the value is to the op.
        argument: number of the argument; -1 for the output.
        of: who makes the value: an op, an input, or of a constant the qualified name of its attribute.
        dtype: of the quantized values, e.g. ``int8``; of a place that stays float its float type.
        scheme: ``per_tensor_affine`` and so on; of a graph from elsewhere ``per_tensor`` or ``per_channel``, for which
            symmetric and affine look alike.
        axis: channel axis; -1 where one scale serves the whole tensor.
        observer: class that finds the scale, e.g. ``HistogramObserver``; empty where it is fixed, derived or unknown.
        quant_min, quant_max: the integer range; 0 and 0 where there is none.
        dynamic: whether each batch sets its own scale.
        scale: real value of one integer step, of several channels the largest; nan before calibration and for dynamic.
        zero_point: the integer that stands for 0.0; nan where there is none, or channels differ.
        shares: the other values that have the same scale, because the quantizer lets them share one.
        annotated: whether the quantizer asks, at this very place, for a rounded value; False where it is not known.
        quantized: whether what is made or read here is rounded; before conversion, whether it will be.
        site: index in ``pair.sites``; -1 where there is none.
        note: what is special here.
    """

    name: str
    module: str
    op: str
    role: Role
    argument: int
    of: str
    dtype: str
    scheme: str
    axis: int
    observer: str
    quant_min: int
    quant_max: int
    dynamic: bool
    scale: float
    zero_point: float
    shares: str
    annotated: bool
    quantized: bool
    site: int = field(metadata=EXTENDED)
    note: str = field(metadata=EXTENDED)


@dataclass(frozen=True, slots=True)
class ModuleCalls:
    """A module of the model.

    Args:
        path: its path.
        type: its class name; empty where it is never called.
        calls: how often a forward calls it; 0 for a module that holds parameters and is never called.
        ops: ops inside it, those of its children included, in the graph that is quantized.
        quantized: how many of these read a rounded value or weight.
        note: what is special here.
    """

    path: str
    type: str
    calls: int
    ops: int
    quantized: int
    note: str


@dataclass(frozen=True, slots=True)
class AnnotationCoverage:
    """How much of one kind of op is quantized.

    Args:
        op: the kind, e.g. ``conv2d``.
        total: how many the model has.
        annotated: at how many the quantizer asks for a rounded value; -1 where it is not known.
        quantized: how many compute on quantized values: their weights are rounded, or, where they have none, all that
            they multiply; of ops that carry no arithmetic, how many read a rounded value.  An op that is fused with
            the one before it need not.
        floating: how many neither read nor make a rounded value.
    """

    op: str
    total: int
    annotated: int
    quantized: int
    floating: int


@dataclass(frozen=True, slots=True)
class AnnotationDiffRow:
    """A place where two annotations differ.

    Args:
        name: the op.
        role: what the value is to the op.
        argument: number of the argument; -1 for the output.
        of: who makes the value.
        status: ``only in a``: rounded, or there at all, in a alone; ``only in b``; ``changed``: rounded in both.
        what: what differs, ``dtype int8 -> uint8; observer HistogramObserver -> MinMaxObserver``.
    """

    name: str
    role: Role
    argument: int
    of: str
    status: Literal["only in a", "only in b", "changed"]
    what: str
