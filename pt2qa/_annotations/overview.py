"""What an annotation report shows before every single value: the ways of rounding, and every op on a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Annotated

from pt2qa._annotations.rows import AnnotationCoverage, AnnotationRow, ModuleCalls, blank
from pt2qa._report.columns import column
from pt2qa._report.formats import index
from pt2qa._report.prose import counted, few


@dataclass(frozen=True, slots=True)
class Way:
    """One way of rounding, and how many values are rounded so."""

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
class Op:
    """An op with all its values."""

    name: Annotated[str, column("op", importance=0, shrinks_to=24)]
    reads: Annotated[str, column(importance=9)]
    weight: Annotated[str, column(importance=8)]
    makes: Annotated[str, column(importance=9)]
    observer: Annotated[str, column(importance=2, shrinks_to=16, optional=True)]
    scale: Annotated[float, column(show=blank, importance=6, optional=True)]
    zero_point: Annotated[float, column("zero\npoint", show=blank, importance=5, optional=True)]
    shares: Annotated[str, column("shares its scale with", importance=3, shrinks_to=24, optional=True)]


def ways_of(rows: Iterable[AnnotationRow]) -> list[Way]:
    """The ways of rounding, the most frequent first; values that stay float are one way for each role and dtype."""
    found: dict[tuple[str, str, str, int, str, str, str], list[str]] = {}
    for row in rows:
        bounds = f"{row.quant_min}..{row.quant_max}" if row.quant_min != row.quant_max else ""
        scales = "" if not row.quantized else "dynamic" if row.dynamic else "static"
        observer = row.observer if row.quantized else ""
        key = (row.role, row.dtype, row.scheme, row.axis, bounds, scales, observer)
        found.setdefault(key, []).append(row.name)
    ways = [Way(len(names), *key, names[0]) for key, names in found.items()]
    order = ("input", "output", "weight", "bias")
    return sorted(ways, key=lambda way: (order.index(way.role), not way.scales, -way.places))


def ops_of(rows: Sequence[AnnotationRow]) -> list[Op]:
    """The ops of the graph that is quantized, each on a line."""
    by_name: dict[str, list[AnnotationRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    missing = {name for name, _ in missing_from(rows)}
    return [_op(name, places) for name, places in by_name.items() if name not in missing]


def missing_from(rows: Sequence[AnnotationRow]) -> list[tuple[str, str]]:
    """Ops that are not in the graph that is quantized, with the reason: they have an output and a reason alone."""
    places = Counter(row.name for row in rows)
    folded = [row for row in rows if row.role == "output" and not row.quantized and row.note]
    return [(row.name, _kind_of_reason(row.note)) for row in folded if places[row.name] == 1]


def named(row: AnnotationRow) -> str:
    """A value of an op, in words."""
    return f"{row.name}, output" if row.role == "output" else f"{row.name}, {row.role} {row.argument} ({row.of})"


def about_ops(rows: Sequence[AnnotationRow], coverage: Sequence[AnnotationCoverage], basis: str) -> str:
    """How much is quantized."""
    total = sum(kind.total for kind in coverage)
    done = sum(kind.quantized for kind in coverage)
    asked = sum(max(kind.annotated, 0) for kind in coverage)
    annotated = f"{asked} annotated, " if basis != "converted" else ""
    sites = {
        "weight": {row.site for row in rows if row.role in {"weight", "bias"}} - {-1},
        "value": {row.site for row in rows if row.role in {"input", "output"}} - {-1},
    }
    rounded = ", ".join(counted(len(found), noun) for noun, found in reversed(sites.items()))
    if basis == "annotated":
        return f"{counted(total, 'op')}: {annotated}{done} will read rounded values."
    return f"{counted(total, 'op')}: {annotated}{done} read rounded values; {rounded} rounded."


def about_float(coverage: Sequence[AnnotationCoverage]) -> str:
    """What stays float."""
    kinds = [f"{kind.op} ({kind.floating} of {kind.total})" for kind in coverage if kind.floating]
    return f"All float: {few(kinds)}." if kinds else "No op is all float."


def about_modules(modules: Sequence[ModuleCalls]) -> list[str]:
    """Which modules are shared or never called."""
    shared = [module.path for module in modules if module.calls > 1]
    idle = [module.path for module in modules if module.calls == 0]
    once = len(modules) - len(shared) - len(idle)
    sentences = [f"{counted(once, 'module')} called once."]
    sentences += [f"Called more than once: {few(shared)}."] if shared else []
    sentences += [f"Never called: {few(idle)}."] if idle else []
    return sentences


def _op(name: str, places: Sequence[AnnotationRow]) -> Op:
    inputs = [row for row in places if row.role == "input"]
    output = next((row for row in places if row.role == "output"), None)
    weights = [row for row in places if row.role == "weight"]
    return Op(
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


def _kind_of_reason(note: str) -> str:
    return "folded into the op before it" if note.startswith("folded into ") else note
