"""The reports of what a quantizer annotates and what the converted model does, place by place; how two differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import Annotated, Any, ClassVar, Final, Literal

from pt2qa._grouping import grouped
from pt2qa._report.base import Block, Listing, ModelReport, Table
from pt2qa._report.prose import blank, by_reason, counted, few, index
from pt2qa._report.rows import Count, Row, column, derived, shown_columns
from pt2qa._report.storage import register
from pt2qa._report.table import table
from pt2qa.errors import ReportError

Role = Literal["input", "output", "weight", "bias"]
BASES: Final = ("annotated and converted", "annotated", "converted")
"""What an annotation report was read from: the quantizer's annotation, the converted model, or both."""


UNKNOWN: Final = "unknown"
"""What a file does not say, because its schema is older."""


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


@dataclass(frozen=True, slots=True)
class _Way:
    """One way of rounding, and how many values use it."""

    places: Annotated[int, column(importance=0)]
    role: Annotated[str, column(importance=0)]
    dtype: Annotated[str, column(importance=0)]
    scheme: Annotated[str, column(importance=5)]
    axis: Annotated[int, column(show=index, importance=4)]
    bounds: Annotated[str, column("range", importance=3)]
    scales: Annotated[str, column("scale", importance=2)]
    observer: Annotated[str, column(importance=6, shrinks_to=16, optional=True)]
    example: Annotated[str, column("such as", importance=1, shrinks_to=20)]


@dataclass(frozen=True, slots=True)
class _Op:
    """An op with all its values."""

    name: Annotated[str, column("op", importance=0, shrinks_to=24)]
    reads: Annotated[str, column(importance=9)]
    weight: Annotated[str, column(importance=8)]
    makes: Annotated[str, column(importance=9)]
    observer: Annotated[str, column(importance=2, shrinks_to=16, optional=True)]
    scale: Annotated[float, column(show=blank, importance=6, optional=True)]
    zero_point: Annotated[float, column("zero\npoint", show=blank, importance=5, optional=True)]
    shares: Annotated[str, column("shares its scale with", importance=3, shrinks_to=24, optional=True)]


@register("annotations", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationReport(ModelReport):
    """How each op's inputs, weights and output are quantized: dtype, scheme, axis, observer, scale.

    ``print`` shows one op per line; :meth:`table` one place per line.

    What :func:`pt2qa.annotations` returns.  Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: one for each place where a value is made or read, in graph order, those that stay float included.
        modules: how often each module is called, in call order, those never called last.
        coverage: by kind of op, how many are annotated and quantized.
        basis: ``annotated and converted``; ``annotated``: nothing is converted yet, so there are no scales, and
            ``quantized`` is what will be; ``converted``: a graph from elsewhere, whose annotations are unknown.

    Raises:
        ReportError: ``basis`` is none of these.
    """

    instead_of_merging: ClassVar[str] = "Annotations do not depend on batches: run it once."
    usual_measures: ClassVar[tuple[str, ...]] = ("spec",)
    ties: ClassVar[str] = "name"

    rows: tuple[AnnotationRow, ...]
    modules: tuple[ModuleCalls, ...]
    coverage: tuple[AnnotationCoverage, ...]
    basis: str

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ReportError(f"basis: got {self.basis!r}, expected one of {', '.join(BASES)}")

    def of(self, name: str) -> tuple[AnnotationRow, ...]:
        """The places of one op, in the order of its arguments, the output last."""
        return tuple(row for row in self.rows if row.name == name)

    def _headline(self) -> str:
        rounded = sum(row.quantized for row in self.rows)
        what = f"{len(self.rows)} places, {rounded} quantized, {self.basis}"
        return f"<AnnotationReport of {self.model}, {self.quantizer}: {what}>"

    def _title(self, sort: str) -> str:
        how = {
            "annotated and converted": f"annotated and converted by {self.quantizer}",
            "annotated": f"annotated by {self.quantizer}, not converted yet",
            "converted": f"converted by {self.quantizer}; its annotations are unknown",
        }[self.basis]
        return f"{self.model}, {how}: {counted(len(self.rows), 'place')}, {self._how(sort, 'in graph order')}"

    def _worst_by(self) -> None:
        return None

    def _before(self) -> Iterator[Block]:
        yield Table(shown_columns(_Way), _ways_of(self.rows))
        if self.coverage:
            yield Table(self.shown("coverage"), self.coverage)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        """One op per line or, in another order, one value per line."""
        if sort not in ("worst", "graph"):
            return self._table(sort, limit, width)
        return table(shown_columns(_Op), _ops_of(self.rows), None, limit, width)

    def _after(self, limit: int | None) -> Iterator[Block]:
        if unusual := [module for module in self.modules if module.calls != 1]:
            yield Table(self.shown("modules"), unusual, "Modules that are not called once", limit=limit)
        unmet = [row for row in self.rows if row.annotated and not row.quantized]
        where = ("output" if row.role == "output" else f"{row.role} {row.argument} ({row.of})" for row in unmet)
        told = [f"{row.name}, {place}: {row.note}" for row, place in zip(unmet, where, strict=True)]
        yield Listing("Annotated but not rounded", told)
        yield Listing("Not in the graph that is quantized", by_reason(_missing_from(self.rows)))
        yield from self._notes()

    def _summary(self) -> Sequence[str]:
        kinds = [f"{kind.op} ({kind.floating} of {kind.total})" for kind in self.coverage if kind.floating]
        shared = [module.path for module in self.modules if module.calls > 1]
        idle = [module.path for module in self.modules if module.calls == 0]
        sentences = [self._about_ops(), f"All float: {few(kinds)}." if kinds else "No op is all float."]
        sentences += [f"{counted(len(self.modules) - len(shared) - len(idle), 'module')} called once."]
        sentences += [f"Called more than once: {few(shared)}."] if shared else []
        return [*sentences, *([f"Never called: {few(idle)}."] if idle else [])]

    def _about_ops(self) -> str:
        total, done = (sum(getattr(kind, name) for kind in self.coverage) for name in ("total", "quantized"))
        asked = sum(max(kind.annotated, 0) for kind in self.coverage)
        annotated = f"{asked} annotated, " if self.basis != "converted" else ""
        if self.basis == "annotated":
            return f"{counted(total, 'op')}: {annotated}{done} will read rounded values."
        values, weights = (
            len({row.site for row in self.rows if row.role in roles} - {-1})
            for roles in (("input", "output"), ("weight", "bias"))
        )
        rounded = f"{counted(values, 'value')}, {counted(weights, 'weight')} rounded"
        return f"{counted(total, 'op')}: {annotated}{done} read rounded values; {rounded}."


def _ways_of(rows: Iterable[AnnotationRow]) -> list[_Way]:
    """The ways of rounding, the most frequent first; values that stay float are one way for each role and dtype."""
    found: dict[tuple[str, str, str, int, str, str, str], list[str]] = {}
    for row in rows:
        facts, observer = row.facts, row.observer if row.quantized else ""
        key = (row.role, row.dtype, row.scheme, row.axis, facts["range"], facts["scale"], observer)
        found.setdefault(key, []).append(row.name)
    ways = [_Way(len(names), *key, names[0]) for key, names in found.items()]
    order = ("input", "output", "weight", "bias")
    return sorted(ways, key=lambda way: (order.index(way.role), not way.scales, -way.places))


def _ops_of(rows: Sequence[AnnotationRow]) -> list[_Op]:
    missing = {name for name, _ in _missing_from(rows)}
    by_name = grouped((row.name, row) for row in rows if row.name not in missing)
    return [_op(name, places) for name, places in by_name.items()]


def _missing_from(rows: Sequence[AnnotationRow]) -> list[tuple[str, str]]:
    """Ops that are not in the quantized graph, with the reason: they have only an output and a reason."""
    places = Counter(row.name for row in rows)
    folded = [row for row in rows if row.role == "output" and not row.quantized and row.note]
    return [(row.name, row.note) for row in folded if places[row.name] == 1]


def _op(name: str, places: Sequence[AnnotationRow]) -> _Op:
    inputs, outputs, weights = ([row for row in places if row.role == role] for role in ("input", "output", "weight"))
    made: Any = ("", nan, nan, "")
    for output in outputs[:1]:
        made = output.observer if output.quantized else "", output.scale, output.zero_point, output.shares
    return _Op(name, _dtypes(inputs), _dtypes(weights), _dtypes(outputs[:1]), *made)


def _dtypes(rows: Sequence[AnnotationRow]) -> str:
    """``int8 x2``, ``int8, float32``; ``int8/0`` has an axis of channels, ``int8*`` takes its scale from each batch."""
    texts = (row.dtype + (f"/{row.axis}" if row.axis >= 0 else "") + "*" * row.dynamic for row in rows)
    counts = Counter(texts)
    return ", ".join(f"{text} x{count}" if count > 1 else text for text, count in counts.items())


@register("annotation-diff", schema=2, oldest=1)
@dataclass(frozen=True, slots=True, repr=False)
class AnnotationDiff(ModelReport):
    """Where two annotations differ; true if they do.

    >>> from pt2qa.report import Environment
    >>> bool(AnnotationDiff((), "x86", "x86", 4, 2, notes=(), model="Net", environment=Environment.here("")))
    False

    Its other fields are those of :class:`pt2qa.report.ModelReport`.

    Args:
        rows: the places that differ, in graph order, those only in b last.
        a, b: what the two sides are.
        equal_quantized: places that both sides quantize alike.
        equal_float: places that both leave in float.
    """

    heading: ClassVar[str] = "Two annotations"
    ties: ClassVar[str] = "name"
    quantizer: ClassVar[str] = ""  # type: ignore[misc]  # each side has its own

    rows: tuple[AnnotationDiffRow, ...]
    a: str
    b: str
    equal_quantized: Count
    equal_float: Count

    @derived(judged=True)
    def differing(self) -> int:
        """How many places differ."""
        return len(self.rows)

    @property
    def equal(self) -> bool:
        """Whether no place differs."""
        return not self.rows

    def __bool__(self) -> bool:
        return not self.equal

    def _headline(self) -> str:
        return f"<AnnotationDiff of {self.model}, {self.a} and {self.b}: {len(self.rows)} places differ>"

    def _title(self, sort: str) -> str:
        return f"{self.model}: annotations of a, {self.a}, and b, {self.b}"

    def _before(self) -> Iterator[Block]:
        # Fact by fact; all of it as one where the row does not tell the facts apart.
        kinds = ((row, row.kind.split("\n") if row.kind else [f"{row.status}: {row.what}"]) for row in self.rows)
        alike = by_reason((f"{row.name}, {row.role}", kind) for row, own in kinds for kind in own)
        yield Listing(f"Differences by kind ({len(alike)})", alike)

    def _body(self, sort: str, limit: int | None, width: int) -> str:
        return self._table(sort, limit, width) if self.rows else ""

    def _summary(self) -> Sequence[str]:
        same = f"{counted(self.equal_quantized + self.equal_float, 'place')} alike, {self.equal_quantized} quantized"
        if self.equal:
            return [f"No difference: {same}."]
        counts = {status: sum(row.status == status for row in self.rows) for status in ("only in a", "only in b")}
        changed = len(self.rows) - sum(counts.values())
        shown = ", ".join(f"{count} {status}" for status, count in counts.items())
        return [f"{counted(len(self.rows), 'place')} differ: {changed} changed, {shown}; {same}."]
