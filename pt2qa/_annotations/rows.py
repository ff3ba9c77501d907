"""Rows of an annotation report: places, modules, types of op; and of the difference of two such reports."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Annotated, ClassVar, Final, Literal

from pt2qa._report.columns import column, derived
from pt2qa._report.prose import index, number
from pt2qa._report.rows import Row

Role = Literal["input", "output", "weight", "bias"]
BASES: Final = ("annotated and converted", "annotated", "converted")
"""What an annotation report was read from: the quantizer's annotation, the converted model, or both."""


UNKNOWN: Final = "unknown"
"""What a file does not say, because its schema is older."""


def blank(value: float) -> str:
    """A number; empty if there is none, as for most values."""
    return "" if isnan(value) else number(value)


@dataclass(frozen=True, slots=True, eq=False)
class AnnotationRow(Row):
    """A place where an op produces or reads a value.

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
            symmetric and affine look alike; ``per_slice`` where a kernel scales each row or image.
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
        options: of the observer, ``eps=1e-05``; or the fixed scale and zero point, or what derives the scale.
        group: the first of the values that have the same scale; empty where it is this one.  It and the options are
            :data:`UNKNOWN` in files of schema 1.
    """

    shown: ClassVar[tuple[str, ...]] = (
        *("name", "role", "argument", "of", "dtype", "scheme", "axis", "observer", "scale", "zero_point", "annotated"),
    )

    name: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    module: str
    op: str
    role: Annotated[Role, column(key=True, importance=9)]
    argument: Annotated[int, column("arg", key=True, show=index, importance=1)]
    of: Annotated[str, column("value of", importance=3, shrinks_to=16)]
    dtype: Annotated[str, column(importance=9)]
    scheme: Annotated[str, column(importance=6)]
    axis: Annotated[int, column(show=index, importance=7)]
    observer: Annotated[str, column(importance=8, shrinks_to=16, optional=True)]
    quant_min: int
    quant_max: int
    dynamic: bool
    scale: Annotated[float, column(show=blank, importance=4, optional=True)]
    zero_point: Annotated[float, column("zero\npoint", show=blank, importance=2, optional=True)]
    shares: str
    annotated: Annotated[bool, column(show=lambda annotated: "yes" if annotated else "", importance=5, optional=True)]
    quantized: bool
    site: Annotated[int, column(extended=True)]
    note: Annotated[str, column(extended=True)]
    options: Annotated[str, column(extended=True, since=2)] = UNKNOWN
    group: Annotated[str, column(extended=True, since=2)] = UNKNOWN

    @property
    def facts(self) -> dict[str, str]:
        """All that two annotations can differ in, but for scales, which depend on the calibration.

        What a value shares its scale with counts once, at its output; a constant may have another name in a graph that
        is prepared for training.
        """
        return {
            "value": self.of if self.role == "input" else "",
            "dtype": self.dtype,
            "scheme": self.scheme,
            "axis": str(self.axis) if self.axis >= 0 else "",
            "range": f"{self.quant_min}..{self.quant_max}" if self.quant_min != self.quant_max else "",
            "observer": self.observer,
            "options": self.options,
            "scale": ("dynamic" if self.dynamic else "static") if self.quantized else "",
            "shares": self.group if self.role != "input" else "",
            "asked": "yes" if self.annotated else "no",
        }

    @derived(extended=True)
    def spec(self) -> str:
        """How the value is rounded, and by whose order: the facts that :func:`pt2qa.diff` compares."""
        facts = {name: text for name, text in self.facts.items() if text not in ("", UNKNOWN)}
        worded = {"axis": "axis {}", "options": "({})", "shares": "with the scale of {}"}
        told = ("dtype", "scheme", "axis", "range", "observer", "options", "scale", "shares")
        words = [worded.get(name, "{}").format(facts[name]) for name in told if name in facts]
        return " ".join([*words, *(["asked for"] if self.annotated else [])])


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

    path: Annotated[str, column("module", key=True, importance=0, shrinks_to=24)]
    type: Annotated[str, column(importance=1)]
    calls: Annotated[int, column(importance=0)]
    ops: Annotated[int, column(importance=2)]
    quantized: Annotated[int, column(importance=2)]
    note: Annotated[str, column(importance=3, shrinks_to=24, optional=True)]


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

    op: Annotated[str, column(key=True, importance=0, shrinks_to=24)]
    total: Annotated[int, column("ops", importance=0)]
    annotated: Annotated[int, column(show=lambda count: str(count) if count >= 0 else "unknown", importance=1)]
    quantized: Annotated[int, column("read rounded\nvalues", importance=2)]
    floating: Annotated[int, column("all\nfloat", importance=0)]


@dataclass(frozen=True, slots=True, eq=False)
class AnnotationDiffRow(Row):
    """A place where two annotations differ.

    Args:
        name: the op.
        role: what the value is to the op.
        argument: number of the argument; -1 for the output.
        of: who makes the value.
        status: ``only in a``: rounded, or there at all, in a alone; ``only in b``; ``changed``: rounded in both.
        what: what differs, ``dtype int8 -> uint8; observer HistogramObserver -> MinMaxObserver``.
        kind: of a change, the facts that differ, one a line, without what is another at each place; empty in files of
            schema 1.
    """

    name: Annotated[str, column(key=True, importance=0, shrinks_to=20)]
    role: Annotated[Role, column(key=True, importance=9)]
    argument: Annotated[int, column("arg", key=True, show=index, importance=2)]
    of: Annotated[str, column("value of", importance=1, shrinks_to=16)]
    status: Annotated[Literal["only in a", "only in b", "changed"], column(importance=8)]
    what: Annotated[str, column("what differs (a -> b)", importance=0, shrinks_to=44)]
    kind: Annotated[str, column(extended=True, since=2)] = ""
