"""The specs that edits change, as data for the quantizer of the printed flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, QuantizationSpec

from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import OpName
from pt2qa._graph.internals.flow_quantizer import Place, named_nodes
from pt2qa._graph.internals.torchao import maker_of
from pt2qa.overrides.annotations import read_annotations
from pt2qa.overrides.edited import annotate
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import Derives, Point, Shares
from pt2qa.plugins import QuantizerPlugin


def changed_specs(
    graph: GraphModule, plugin: QuantizerPlugin, edits: tuple[Edit, ...], names: Mapping[int, OpName], *, qat: bool
) -> str:
    """The source of the argument ``specs`` of :class:`pt2qa._graph.internals.flow_quantizer.Edited`.

    ``graph`` is the captured graph, and is not changed.
    """
    annotated = annotate(copy_to_edit(graph), plugin, (), names, qat=qat)
    annotations = read_annotations(annotated, plugin, names, qat=qat)
    before, after = annotations.specs, annotations.with_edits(edits).specs
    places = _places(annotated, {*before, *after})
    changed = [point for point in dict.fromkeys((*before, *after)) if before.get(point) != after.get(point)]
    own = {point: spec for point, spec in before.items() if not isinstance(spec, Shares)}
    # A spec after edits was made from one of the quantizer's, most likely from that at the same place.
    given = {point: {**({point: own[point]} if point in own else {}), **own} for point in changed}
    lines = (f"    {places[point]!r}: {_source(after.get(point), given[point], places)},\n" for point in changed)
    return f"{{\n{''.join(lines)}}}"


def _places(graph_module: GraphModule, points: set[Point]) -> dict[Point, Place]:
    nodes = {node.name: node for node in graph_module.graph.nodes}
    names = {node: name for name, node in named_nodes(graph_module.graph).items()}
    return {
        (source, reader): (names[nodes[reader]], nodes[reader].all_input_nodes.index(nodes[source]))
        if reader
        else (names[nodes[source]], None)
        for source, reader in points
    }


def _source(spec: Any, given: Mapping[Point, Any], places: Mapping[Point, Place]) -> str:
    """A spec after edits; ``given`` has what it may have been made from, at the most likely point first."""
    if spec is None:
        return "None"
    if isinstance(spec, Shares):
        return f"SharedQuantizationSpec({places[spec.point]!r})"
    known = {point: changes for point, other in given.items() if (changes := _changes(spec, other, places)) is not None}
    if not known:
        assert isinstance(spec, FixedQParamsQuantizationSpec), "edits make no other spec anew"
        return repr(spec)
    point = min(known, key=lambda point: len(known[point]))
    fields = ", ".join(f"{name!r}: {value}" for name, value in known[point].items())
    return f"Original({places[point]!r}{f', {{{fields}}}' if fields else ''})"


def _changes(spec: Any, given: Any, places: Mapping[Point, Place]) -> dict[str, str] | None:
    """The source of each field in which a spec differs from another; None if it cannot be made from that."""
    if isinstance(spec, Derives) or isinstance(given, Derives):
        if type(spec) is not type(given) or spec.spec is not given.spec:
            return None
        return {} if spec == given else {"derived_from": repr([places[each] for each in spec.points])}
    if spec is given:
        return {}
    if type(spec) is not type(given) or not isinstance(spec, QuantizationSpec):
        return None
    fields = [each.name for each in dataclasses.fields(spec)]
    return {name: _text(spec, name) for name in fields if getattr(spec, name) != getattr(given, name)}


def _text(spec: Any, name: str) -> str:
    if name != "observer_or_fake_quant_ctr":
        return repr(getattr(spec, name))
    maker, keywords = maker_of(spec)
    return f"{maker.__name__}.with_args({', '.join(f'{key}={value!r}' for key, value in keywords.items())})"
