"""The specs that edits change, as data for the quantizer of the printed flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec

from pt2qa._graph.internals.flow_quantizer import Place, named_nodes
from pt2qa._graph.internals.torchao import maker_of
from pt2qa.overrides.points import Derives, Point, Shares, Specs

_OBSERVER: Final = "observer_or_fake_quant_ctr"


def source_of_changes(annotated: GraphModule, before: Specs, after: Specs) -> str:
    """The source of the argument ``specs`` of :class:`pt2qa._graph.internals.flow_quantizer.Edited`.

    ``before`` are the specs of the annotated graph.
    """
    places = _places(annotated, dict.fromkeys((*before, *after)))
    changed = [point for point in places if before.get(point) != after.get(point)]
    own = {point: spec for point, spec in before.items() if not isinstance(spec, Shares)}
    # A spec after edits was made from one of the quantizer's, most likely from that at the same place.
    given = {point: {**({point: own[point]} if point in own else {}), **own} for point in changed}
    lines = (f"    {places[point]!r}: {_source(after.get(point), given[point], places)},\n" for point in changed)
    return f"{{\n{''.join(lines)}}}"


def _places(graph_module: GraphModule, points: Iterable[Point]) -> dict[Point, Place]:
    """Where points are, without those of values that their reader does not read: they change nothing."""
    names = {node.name: name for name, node in named_nodes(graph_module.graph).items()}
    inputs = {node.name: [source.name for source in node.all_input_nodes] for node in graph_module.graph.nodes}
    return {
        (source, reader): (names[reader], inputs[reader].index(source)) if reader else (names[source], None)
        for source, reader in points
        if not reader or source in inputs[reader]
    }


def _source(spec: Any, given: Mapping[Point, Any], places: Mapping[Point, Place]) -> str:
    """A spec after edits; ``given`` has what it may have been made from, at the most likely point first."""
    if spec is None:
        return "None"
    if isinstance(spec, Shares):
        return f"SharedQuantizationSpec({places[spec.point]!r})"
    made = {point: _changes(spec, other, places) for point, other in given.items() if point in places}
    known = {point: changes for point, changes in made.items() if changes is not None}
    if not known:
        assert isinstance(spec, FixedQParamsQuantizationSpec), "edits make no other spec anew"
        return repr(spec)
    # An observer is only written where an edit has set it; those of quantizers may hold anything.
    point = min(known, key=lambda point: (_OBSERVER in known[point], len(known[point])))
    changes = ", ".join(f"{name!r}: {value}" for name, value in known[point].items())
    return f"Original({places[point]!r}{f', {{{changes}}}' if changes else ''})"


def _changes(spec: Any, given: Any, places: Mapping[Point, Place]) -> dict[str, str] | None:
    """The source of each field in which a spec differs from another; None if it cannot be made from that."""
    if isinstance(spec, Derives) or isinstance(given, Derives):
        if type(spec) is not type(given) or spec.spec is not given.spec:
            return None
        return {} if spec == given else {"derived_from": repr([places[each] for each in spec.points])}
    if spec is given:
        return {}
    if type(spec) is not type(given) or isinstance(spec, FixedQParamsQuantizationSpec) or not is_dataclass(spec):
        return None
    names = [each.name for each in fields(spec)]
    return {name: _text(spec, name) for name in names if getattr(spec, name) != getattr(given, name)}


def _text(spec: Any, name: str) -> str:
    if name != _OBSERVER:
        return repr(getattr(spec, name))
    maker, keywords = maker_of(spec)
    return f"{maker.__name__}.with_args({', '.join(f'{key}={value!r}' for key, value in keywords.items())})"
