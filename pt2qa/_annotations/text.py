"""An annotation report as text: how values are rounded, how much of each type of op, and every op on a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Final

from pt2qa._annotations.rows import AnnotationRow
from pt2qa._report.formats import index, number, whole
from pt2qa._report.prose import by_reason, counted, few, listed, sections, wrap
from pt2qa._report.ranking import ranked
from pt2qa._report.table import View, table, with_column

if TYPE_CHECKING:
    from pt2qa._annotations.report import AnnotationReport


def _blank(value: float) -> str:
    """A number; empty where there is none: most places have none."""
    return "" if isnan(value) else number(value)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way of rounding, and how many places go it."""

    role: str
    dtype: str
    scheme: str
    axis: int
    bounds: str
    observer: str
    scales: str
    places: int
    example: str


@dataclass(frozen=True, slots=True)
class _Op:
    """An op with all its places."""

    name: str
    reads: str
    weight: str
    makes: str
    observer: str
    scale: float
    zero_point: float
    shares: str


_PLACES: Final = (
    View("name", "name", str, 0, shrinks_to=24),
    View("role", "role", str, 9),
    View("argument", "arg", index, 1),
    View("of", "value of", str, 3, shrinks_to=16),
    View("dtype", "dtype", str, 9),
    View("scheme", "scheme", str, 6),
    View("axis", "axis", index, 7),
    View("observer", "observer", str, 8, shrinks_to=16),
    View("scale", "scale", _blank, 4),
    View("zero_point", "zero\npoint", _blank, 2),
    View("annotated", "asked", lambda asked: "yes" if asked else "", 5),
)
_WAYS: Final = (
    View("places", "places", whole, 0),
    View("role", "role", str, 0),
    View("dtype", "dtype", str, 0),
    View("scheme", "scheme", str, 5),
    View("axis", "axis", index, 4),
    View("bounds", "range", str, 3),
    View("scales", "scale", str, 2),
    View("observer", "observer", str, 6, shrinks_to=16),
    View("example", "such as", str, 1, shrinks_to=20),
)
_COVERAGE: Final = (
    View("op", "op", str, 0, shrinks_to=24),
    View("total", "ops", whole, 0),
    View("annotated", "annotated", lambda count: str(count) if count >= 0 else "unknown", 1),
    View("quantized", "read rounded\nvalues", whole, 2),
    View("floating", "all\nfloat", whole, 0),
)
_OPS: Final = (
    View("name", "op", str, 0, shrinks_to=24),
    View("reads", "reads", str, 9),
    View("weight", "weight", str, 8),
    View("makes", "makes", str, 9),
    View("observer", "observer", str, 2, shrinks_to=16),
    View("scale", "scale", _blank, 6),
    View("zero_point", "zero\npoint", _blank, 5),
    View("shares", "shares its scale with", str, 3, shrinks_to=24),
)
_MODULES: Final = (
    View("path", "module", str, 0, shrinks_to=24),
    View("type", "type", str, 1),
    View("calls", "calls", whole, 0),
    View("ops", "ops", whole, 2),
    View("quantized", "quantized", whole, 2),
    View("note", "note", str, 3, shrinks_to=24),
)


def _known_of(views: tuple[View, ...], report: AnnotationReport) -> tuple[View, ...]:
    """The views of what is known: no scale before calibration, nothing that was asked for of a graph from elsewhere."""
    unknown = {"annotated": {"scale", "zero_point"}, "converted": {"observer", "shares", "annotated"}}
    return tuple(view for view in views if view.column not in unknown.get(report.basis, ()))


def annotation_text(report: AnnotationReport, sort: str, limit: int | None, width: int) -> str:
    """The whole report, every line at most ``width`` wide."""
    return sections(
        [
            wrap(_title(report, sort), width, indent="  "),
            table(_known_of(_WAYS, report), _ways(report.rows), None, None, width),
            table(_COVERAGE, report.coverage, None, None, width) if report.coverage else "",
            _ops_table(report, sort, limit, width),
            _modules_table(report, limit, width),
            listed("Asked for, and not rounded", [f"{_place(row)}: {row.note}" for row in _unmet(report)], width),
            listed("Not in the graph that is quantized", by_reason(_missing(report.rows)), width),
            listed(f"Notes ({len(report.notes)})", report.notes, width),
            "\n".join(wrap(line, width, indent="  ") for line in annotation_summary(report)),
        ]
    )


def annotation_table(report: AnnotationReport, sort: str, limit: int | None, width: int) -> str:
    """The places as a table, and below it what it leaves out; ``worst`` is graph order, as no place is worse."""
    in_order = sort in {"worst", "graph"}
    rows = report.rows if in_order else ranked(AnnotationRow, report.rows, sort, ties="name")
    views = _known_of(_PLACES, report)
    views = views if in_order or sort == "name" else with_column(AnnotationRow, views, sort)
    return table(views, rows, None if in_order else sort, limit, width)


def annotation_summary(report: AnnotationReport) -> list[str]:
    """How much is quantized, what stays float, which modules are shared or idle."""
    return [sentence for sentence in (_about_ops(report), _about_float(report), *_about_modules(report)) if sentence]


# -- how values are rounded --------------------------------------------------------------------------------------------


def _ways(rows: Iterable[AnnotationRow]) -> list[_Way]:
    """The ways of rounding, the most frequent first; places that stay float are one way for each role and dtype."""
    found: dict[tuple[str, str, str, int, str, str, str], list[str]] = {}
    for row in rows:
        bounds = f"{row.quant_min}..{row.quant_max}" if row.quant_min != row.quant_max else ""
        scales = "" if not row.quantized else "dynamic" if row.dynamic else "static"
        key = (row.role, row.dtype, row.scheme, row.axis, bounds, row.observer if row.quantized else "", scales)
        found.setdefault(key, []).append(row.name)
    ways = [_Way(*key, len(names), names[0]) for key, names in found.items()]
    order = ("input", "output", "weight", "bias")
    return sorted(ways, key=lambda way: (order.index(way.role), not way.scales, -way.places))


# -- an op a line ------------------------------------------------------------------------------------------------------


def _modules_table(report: AnnotationReport, limit: int | None, width: int) -> str:
    unusual = [module for module in report.modules if module.calls != 1]
    noted = any(module.note for module in unusual)
    views = tuple(view for view in _MODULES if noted or view.column != "note")
    return "Modules that are not called once:\n" + table(views, unusual, None, limit, width) if unusual else ""


def _ops_table(report: AnnotationReport, sort: str, limit: int | None, width: int) -> str:
    if sort not in {"worst", "graph"}:
        return annotation_table(report, sort, limit, width)
    return table(_known_of(_OPS, report), _ops(report.rows), None, limit, width)


def _ops(rows: Sequence[AnnotationRow]) -> list[_Op]:
    by_name: dict[str, list[AnnotationRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    missing = {name for name, _ in _missing(rows)}
    return [_op(name, places) for name, places in by_name.items() if name not in missing]


def _op(name: str, places: Sequence[AnnotationRow]) -> _Op:
    inputs = [row for row in places if row.role == "input"]
    output = next((row for row in places if row.role == "output"), None)
    weights = [row for row in places if row.role == "weight"]
    return _Op(
        name=name,
        reads=_dtypes(inputs),
        weight=_dtypes(weights),
        makes=_dtypes([output]) if output is not None else "",
        observer=output.observer if output is not None and output.quantized else "",
        scale=output.scale if output is not None else nan,
        zero_point=output.zero_point if output is not None else nan,
        shares=output.shares if output is not None else "",
    )


def _dtypes(rows: Sequence[AnnotationRow]) -> str:
    """``int8 x2``, ``int8, float32``; ``int8/0`` has an axis of channels, ``int8*`` takes its scale from each batch."""
    counts: dict[str, int] = {}
    for row in rows:
        text = row.dtype + (f"/{row.axis}" if row.axis >= 0 else "") + ("*" if row.dynamic else "")
        counts[text] = counts.get(text, 0) + 1
    return ", ".join(f"{text} x{count}" if count > 1 else text for text, count in counts.items())


# -- sentences ---------------------------------------------------------------------------------------------------------


def _title(report: AnnotationReport, sort: str) -> str:
    how = {
        "annotated and converted": f"annotated and converted by {report.quantizer}",
        "annotated": f"annotated by {report.quantizer}, not converted yet",
        "converted": f"converted by {report.quantizer}; what was asked for is unknown",
    }[report.basis]
    order = "in graph order" if sort in {"worst", "graph"} else f"by {sort}"
    return f"{report.model}, {how}: {counted(len(report.rows), 'place')}, {order}"


def _place(row: AnnotationRow) -> str:
    return f"{row.name}, output" if row.role == "output" else f"{row.name}, {row.role} {row.argument} ({row.of})"


def _unmet(report: AnnotationReport) -> list[AnnotationRow]:
    return [row for row in report.rows if row.annotated and not row.quantized]


def _missing(rows: Sequence[AnnotationRow]) -> list[tuple[str, str]]:
    """Ops that have an output and a reason alone."""
    places = Counter(row.name for row in rows)
    folded = [row for row in rows if row.role == "output" and not row.quantized and row.note]
    return [(row.name, _kind_of_reason(row.note)) for row in folded if places[row.name] == 1]


def _kind_of_reason(note: str) -> str:
    return "folded into the op before it" if note.startswith("folded into ") else note


def _about_ops(report: AnnotationReport) -> str:
    total = sum(kind.total for kind in report.coverage)
    done = sum(kind.quantized for kind in report.coverage)
    asked = sum(max(kind.annotated, 0) for kind in report.coverage)
    annotated = f"{asked} annotated, " if report.basis != "converted" else ""
    sites = {
        "weight": {row.site for row in report.rows if row.role in {"weight", "bias"}} - {-1},
        "value": {row.site for row in report.rows if row.role in {"input", "output"}} - {-1},
    }
    rounded = ", ".join(counted(len(found), noun) for noun, found in reversed(sites.items()))
    if report.basis == "annotated":
        return f"{counted(total, 'op')}: {annotated}{done} will read rounded values."
    return f"{counted(total, 'op')}: {annotated}{done} read rounded values; {rounded} rounded."


def _about_float(report: AnnotationReport) -> str:
    kinds = [f"{kind.op} ({kind.floating} of {kind.total})" for kind in report.coverage if kind.floating]
    return f"All float: {few(kinds)}." if kinds else "No op is all float."


def _about_modules(report: AnnotationReport) -> list[str]:
    shared = [module.path for module in report.modules if module.calls > 1]
    idle = [module.path for module in report.modules if module.calls == 0]
    once = len(report.modules) - len(shared) - len(idle)
    sentences = [f"{counted(once, 'module')} called once."]
    sentences += [f"Called more than once: {few(shared)}."] if shared else []
    sentences += [f"Never called: {few(idle)}."] if idle else []
    return sentences
