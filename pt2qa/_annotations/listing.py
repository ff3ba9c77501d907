"""From a pair, or a capture and a quantizer, to an annotation report."""

# No `from __future__ import annotations` here: the function below has its name.
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

from torch.fx import GraphModule

from pt2qa._annotations.asking import Asking
from pt2qa._annotations.modules import module_calls
from pt2qa._annotations.places import Place, missing_places, places_in_graph, places_in_program, value_dtypes
from pt2qa._annotations.report import AnnotationReport
from pt2qa._annotations.rows import AnnotationCoverage, AnnotationRow, Basis
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.handles import OpName
from pt2qa._quantize.pairing import QuantizedPair, fingerprint
from pt2qa._report.rows import Environment
from pt2qa._simulator.products import Read, is_quantized
from pt2qa.errors import SelectionError
from pt2qa.overrides import OverridePlan
from pt2qa.overrides.annotations import Annotations, annotations_of
from pt2qa.plugins import describe, resolve


@exports
def annotations(
    subject: QuantizedPair | Capture,
    quantizer: Any = None,
    *,
    qat: bool = False,
    overrides: OverridePlan | None = None,
) -> AnnotationReport:
    """Lists every place of a model with what its quantizer asks for there, and what the converted model does.

    Args:
        subject: a pair of :func:`pt2qa.quantize`, which its quantizer annotates once more; one of :func:`pt2qa.pair`,
            of which the converted graph alone is known; or a capture, before any calibration.
        quantizer: with a capture, as :func:`pt2qa.quantize` takes it.
        qat: with a capture, as ``prepare_qat_pt2e`` annotates it.
        overrides: with a capture, edits to what the quantizer annotates.

    Returns:
        A row for each op's inputs, weights and output, those that stay float included; the calls of each module; and
        how many ops of each type are quantized.

    Raises:
        SelectionError: a capture without a quantizer, or a pair with one.
        QuantizeError: the quantizer failed, or an edit changes nothing or cannot be made.
        PluginError: there is no such quantizer, or the backend does not have what an edit asks for.

    >>> import torch, pt2qa
    >>> capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.zeros(1, 4))
    >>> [(row.role, row.dtype) for row in annotations(capture, "xnnpack").rows]
    [('output', 'int8'), ('input', 'int8'), ('weight', 'int8'), ('bias', 'float32'), ('output', 'int8')]
    """
    if isinstance(subject, QuantizedPair):
        if quantizer is not None or qat or overrides is not None:
            raise SelectionError(
                "quantizer, qat and overrides go with a capture; the pair was made by "
                f"{subject.quantizer}. Pass pt2qa.annotations(pair), or a capture and a quantizer."
            )
        return _of_pair(subject)
    if not isinstance(subject, Capture):
        raise SelectionError(
            f"got a {type(subject).__name__}, expected what pt2qa.quantize or pt2qa.pair returned, or a capture and a "
            "quantizer"
        )
    if quantizer is None:
        raise SelectionError(
            "a capture is not annotated by itself. Pass a quantizer, too: pt2qa.annotations(capture, quantizer)."
        )
    return _of_capture(subject, quantizer, qat, overrides)


@dataclass(frozen=True, slots=True)
class _Model:
    """What the rows of a report are about.

    Attributes:
        graph: as it was captured.
        names: what to call each handle.
        places: every place of the graph that is quantized.
        annotations: what the quantizer asks for; None where it is not known.
        converted: the pair; None before conversion.
    """

    graph: GraphModule
    names: Mapping[int, OpName]
    places: tuple[Place, ...]
    annotations: Annotations | None
    converted: QuantizedPair | None


def _of_pair(pair: QuantizedPair) -> AnnotationReport:
    recipe, capture = pair.recipe, pair.capture
    known = None
    notes = list(pair.notes)
    if recipe is not None and capture is not None:
        known = annotations_of(capture, recipe.plugin, recipe.edits, qat=recipe.qat)
    else:
        notes.append(
            "the pair was not made by pt2qa.quantize: what its quantizer asked for, observers and shared scales are "
            "not known"
        )
    graph = pair.reference if pair.float_graph is None else pair.float_graph
    dtypes = {**value_dtypes(pair.reference, pair.names), **value_dtypes(graph, pair.names)}
    model = _Model(graph, pair.names, tuple(places_in_program(pair.program, pair.names, dtypes)), known, pair)
    return _report(model, tuple(notes), pair.quantizer, pair.model, pair.environment)


def _of_capture(capture: Capture, quantizer: Any, qat: bool, overrides: OverridePlan | None) -> AnnotationReport:
    plugin = resolve(quantizer)
    edits = () if overrides is None else overrides.edits
    known = annotations_of(capture, plugin, edits, qat=qat)
    graph = capture.module()
    model = _Model(graph, capture.names, tuple(places_in_graph(known.ground.nodes)), known, None)
    name = describe(plugin) + (" for QAT" if qat else "")
    return _report(model, (), name, capture.model, Environment.here(fingerprint(graph)))


def _report(
    model: _Model, notes: tuple[str, ...], quantizer: str, called: str, environment: Environment
) -> AnnotationReport:
    owners = {place.name: place.owner for place in model.places}
    missing = missing_places(model.graph, model.names, owners.values())
    placed = _in_order(model, missing)
    rows = tuple(row for _, row in placed)
    quantized = {row.name for row in rows if row.quantized and row.role != "output"}
    basis: Basis = "annotated and converted"
    if model.converted is None or model.annotations is None:
        basis = "annotated" if model.converted is None else "converted"
    return AnnotationReport(
        rows=rows,
        modules=module_calls(model.graph, model.names, set(owners.values()), {owners[name] for name in quantized}),
        coverage=_coverage(placed, set(missing), model.annotations is not None),
        basis=basis,
        notes=tuple(dict.fromkeys(notes)),
        quantizer=quantizer,
        model=called,
        environment=environment,
    )


def _in_order(model: _Model, missing: Mapping[str, Place]) -> list[tuple[Place, AnnotationRow]]:
    """The places in the order of the captured graph; ops that it does not have follow what stands before them."""
    handles = {name.name: handle for handle, name in model.names.items()}
    known = {name.name: name for name in model.names.values()}
    asking = Asking(model.annotations, model.converted.sites if model.converted is not None else None)
    found: list[tuple[int, Place, AnnotationRow]] = []
    last = -1
    for place in (*model.places, *missing.values()):
        last = handles.get(place.owner, last)
        module = known[place.owner].module if place.owner in known else ""
        note = place.note if place.owner else "put in by the quantizer, prepare or convert"
        found.append((last, place, _row(place, module, note, asking)))
    return [(place, row) for _, place, row in sorted(found, key=lambda item: item[0])]


def _row(place: Place, module: str, note: str, asking: Asking) -> AnnotationRow:
    answer = asking.about(place)
    params = place.site.params if place.site is not None else None
    return AnnotationRow(
        name=place.name,
        module=module,
        op=place.op,
        role=place.role,
        argument=place.argument,
        of=place.of,
        dtype=answer.dtype,
        scheme=answer.scheme,
        axis=answer.axis,
        observer=answer.observer,
        quant_min=answer.quant_min,
        quant_max=answer.quant_max,
        dynamic=answer.dynamic,
        scale=nan if params is None else params.largest_scale,
        zero_point=nan if params is None else params.single_zero_point,
        shares=answer.shares,
        annotated=answer.annotated,
        quantized=answer.quantized,
        site=-1 if place.site is None else place.site.index,
        note="; ".join(filter(None, (note, answer.note))),
    )


def _coverage(
    placed: Iterable[tuple[Place, AnnotationRow]], missing: Collection[str], known: bool
) -> tuple[AnnotationCoverage, ...]:
    """By kind of op, the most frequent first; as ``pair.coverage`` counts."""
    ops: dict[str, dict[str, list[tuple[Place, AnnotationRow]]]] = {}
    for place, row in placed:
        if place.owner and row.op != "input" and row.name not in missing:
            ops.setdefault(row.op, {}).setdefault(row.name, []).append((place, row))
    found = []
    for op, places in sorted(ops.items(), key=lambda item: -len(item[1])):
        asked = sum(any(row.annotated for _, row in own) for own in places.values())
        done = sum(
            is_quantized(
                op, [Read(row.argument, place.constant, row.quantized) for place, row in own if row.argument >= 0]
            )
            for own in places.values()
        )
        floating = sum(not any(row.quantized for _, row in own) for own in places.values())
        found.append(AnnotationCoverage(op, len(places), asked if known else -1, done, floating))
    return tuple(found)


def _reads(placed: Iterable[tuple[Place, AnnotationRow]]) -> list[Read]:
    return [Read(row.argument, place.constant, row.quantized) for place, row in placed if row.role != "output"]
