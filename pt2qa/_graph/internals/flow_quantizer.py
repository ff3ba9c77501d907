"""The quantizer of the printed flow, which changes the specs of another one: see :mod:`.flow_runtime`.

It is apart from that because torchao takes a second to import.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer, SharedQuantizationSpec

from pt2qa._graph.internals.flow_runtime import Change, change_parameters, ops_by_name
from pt2qa._graph.internals.nodes import ANNOTATION

Place = tuple[str, int | None]
"""An op, and the number of its input, among all nodes that it reads; None for its output."""


class Original(NamedTuple):  # a dataclass would look for its module, which code that is executed may not have
    """The spec that the quantizer itself gave to a place, with other values in some fields."""

    place: Place
    changes: Mapping[str, Any] = {}


class Edited(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Another quantizer, with other specs at some places of a model, and other parameters."""

    def __init__(self, quantizer: Quantizer, specs: Mapping[Place, Any], changes: Collection[Change] = ()) -> None:
        self.quantizer, self.specs, self.changes = quantizer, specs, changes
        self.bodies = set[object]()

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Changes parameters, then does what the quantizer does."""
        if model not in self.bodies and self.changes:
            change_parameters(model, ops_by_name(model.graph), self.changes)
        return self.quantizer.transform_for_annotation(model)  # type: ignore[no-any-return]  # ditto

    def annotate(self, model: GraphModule) -> GraphModule:
        """Lets the quantizer annotate, then changes specs; not in the bodies of loops, with which prepare goes on."""
        model = self.quantizer.annotate(model) or model
        if model not in self.bodies:
            self.bodies = {*model.modules()} - {model}
            edit_specs(model.graph, self.specs)
        return model

    def validate(self, model: GraphModule) -> None:
        """Does what the quantizer does."""
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Does what the quantizer does."""
        self.quantizer.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)


def edit_specs(graph: Graph, specs: Mapping[Place, Any]) -> None:
    """Gives places other specs, which refer to places where torchao's refer to nodes; None removes one."""
    nodes = named_nodes(graph)

    def edge(place: Place) -> Any:
        name, number = place
        return nodes[name] if number is None else (nodes[name].all_input_nodes[number], nodes[name])

    def own(spec: Any) -> Any:
        if isinstance(spec, SharedQuantizationSpec):
            return SharedQuantizationSpec(edge(spec.edge_or_node))
        if not isinstance(spec, Original):
            return spec
        changes = {
            name: [edge(each) for each in value] if name == "derived_from" else value
            for name, value in spec.changes.items()
        }
        original = spec_at(edge(spec.place))
        while isinstance(original, SharedQuantizationSpec):  # as in a graph that was exported in another way
            original = spec_at(original.edge_or_node)
        return replace(original, **changes)

    write_specs({edge(place): own(spec) for place, spec in specs.items()})


def named_nodes(graph: Graph) -> dict[str, Node]:
    """The ops, inputs and output of a graph by name, and the parameters and buffers that it reads."""
    constants, read = dict[str, Node](), Counter[str]()
    for node in graph.find_nodes(op="get_attr"):
        constants[f"self.{node.target}{'#' * read[node.target]}"] = node
        read[node.target] += 1
    return ops_by_name(graph) | constants


def spec_at(edge: Any) -> Any:
    """What a quantizer wants for the output of a node, or for what the second of two nodes reads of the first."""
    source, reader = edge if isinstance(edge, tuple) else (None, edge)
    annotation = reader.meta[ANNOTATION]
    return annotation.output_qspec if source is None else annotation.input_qspec_map[source]


def write_specs(specs: Mapping[Any, Any]) -> None:
    """Sets the specs of nodes, and of pairs of a node and its reader; None removes one.

    A node that is left without specs loses its annotation, because QAT's prepare rejects an empty one.
    """
    for edge, spec in specs.items():
        source, node = edge if isinstance(edge, tuple) else (None, edge)
        # A quantizer may give several nodes one annotation.
        annotation = copy.copy(node.meta.get(ANNOTATION) or QuantizationAnnotation(_annotated=True))
        inputs = annotation.input_qspec_map = dict(annotation.input_qspec_map or {})
        if source is None:
            annotation.output_qspec = spec
        elif spec is None:
            inputs.pop(source, None)
        else:
            inputs[source] = spec
        node.meta[ANNOTATION] = annotation
        if annotation.output_qspec is None and not any(inputs.values()):
            del node.meta[ANNOTATION]
