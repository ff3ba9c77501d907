"""A quantizer that edits: parameters before it annotates, and annotations before ``prepare`` reads them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from traceback import walk_tb
from typing import Any, Final

from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec, Quantizer

from pt2qa._ambient import torch_defaults
from pt2qa._capture.program import Capture
from pt2qa._exclusion import exports
from pt2qa._graph.annotation import annotated_ops
from pt2qa._graph.handles import OpName, assign_handles, copy_to_edit, names_of, remove_handles
from pt2qa._graph.internals.flow_quantizer import Place, named_nodes
from pt2qa._graph.internals.shortcuts import shortcuts
from pt2qa._graph.internals.torchao import fold_batch_norms, maker_of
from pt2qa.errors import Pt2qaError, QuantizeError
from pt2qa.overrides.annotations import Annotations, fusions_in, read_annotations
from pt2qa.overrides.parameters import edit_parameters
from pt2qa.overrides.plan import Edit
from pt2qa.overrides.points import Derives, Point, Shares, Specs, write_specs
from pt2qa.plugins import resolve


@dataclass(eq=False, repr=False)
class EditedQuantizer(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Annotates as another quantizer does, and edits the annotations: of any number of models, one after the other.

    ``names`` are those of the ops of the only model, and ``built`` its quantizer.  Without them, names are read from
    each graph, which has handles while it is annotated, and a quantizer is built for each.

    ``annotations`` are those of the model, edits included, None before that; ``annotated`` has, by op type, how many
    ops the quantizer annotated before any edit.
    """

    plugin: Any
    edits: tuple[Edit, ...]
    names: Mapping[int, OpName] | None = None
    built: Any = None
    qat: bool = field(kw_only=True)
    annotations: Annotations | None = field(default=None, init=False)
    annotated: Counter[str] = field(default_factory=Counter, init=False)
    _quantizer: Any = field(default=None, init=False)
    _names: Mapping[int, OpName] = field(default_factory=dict, init=False)
    _numbered: bool = field(default=False, init=False)
    _bodies: weakref.WeakSet[GraphModule] = field(default_factory=weakref.WeakSet, init=False)

    def __post_init__(self) -> None:
        self.plugin = resolve(self.plugin)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Changes parameters, and applies the quantizer's own rewriting of the graph before annotation."""
        if not self._is_body(model):
            self._begin(model)
            edit_parameters(model, self.edits, self._names)
        with self._blamed():
            return self._quantizer.transform_for_annotation(model)  # type: ignore[no-any-return]  # ditto

    def annotate(self, model: GraphModule) -> GraphModule:
        """Lets the quantizer annotate, then edits the annotations; changes ``model`` in place, as torchao expects."""
        known = self.names is not None or names_of(model)
        begun = self._quantizer is not None and self.annotations is None and known
        if not begun and not self._is_body(model):
            self._begin(model)
        with self._blamed():
            model = self._quantizer.annotate(model) or model
        if self.annotations is None:
            self.annotated = annotated_ops(model.graph.nodes)
            self.annotations = read_annotations(model, self.plugin, self._names, qat=self.qat)
            if self.edits:
                write_specs(model, self.annotations.specs, self.annotations.with_edits(self.edits).specs)
                self.annotations = read_annotations(model, self.plugin, self._names, qat=self.qat)
        # prepare goes on with the bodies of the model's loops, which no edit reaches.
        self._bodies.update(part for part in model.modules() if isinstance(part, GraphModule) and part is not model)
        if self._numbered:
            remove_handles(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Runs the quantizer's own checks of an annotated graph."""
        with self._blamed():
            self._quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: Any) -> None:
        """Lets the quantizer change its observers before they are inserted."""
        with self._blamed():
            self._quantizer.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    def changed_specs(self, graph: GraphModule) -> str:
        """See :func:`source_of_changes`; ``graph`` has handles, and is not changed."""
        names = names_of(graph)
        annotated = annotate(copy_to_edit(graph), self.plugin, (), names, qat=self.qat)
        annotations = read_annotations(annotated, self.plugin, names, qat=self.qat)
        return source_of_changes(annotated, annotations.specs, annotations.with_edits(self.edits).specs)

    def _is_body(self, model: GraphModule) -> bool:
        return model in self._bodies or (self.built is not None and self.annotations is not None)

    def _begin(self, model: GraphModule) -> None:
        """Takes up a new model; numbers its ops, in place, if nothing names them."""
        self.annotations = None
        self._quantizer = self.plugin.build(model, qat=self.qat) if self.built is None else self.built
        names = names_of(model) if self.names is None else self.names
        self._numbered = self.names is None and not names
        if self._numbered:
            assign_handles(model)
            names = names_of(model)
        self._names = {**_folded(model, names), **names} if self.names is None else names

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Makes what the quantizer itself raises an error that says so."""
        try:
            yield
        except Pt2qaError:
            raise
        except Exception as error:
            raise QuantizeError(
                f"{self.plugin.name} could not annotate the model: {type(error).__name__}: "
                f"{str(error) or 'no message'}."
            ) from error


def _folded(model: GraphModule, names: Mapping[int, OpName]) -> dict[int, OpName]:
    """The names of the batch norms that prepare folded before any quantizer saw the graph, under negative numbers.

    Their statistics are still in the model.
    """
    known = {name.name for name in names.values()}
    buffers = [name.rpartition(".") for name, _ in model.named_buffers(remove_duplicate=False)]
    modules = [module for module, _, buffer in buffers if buffer == "running_mean"]
    found = [OpName(f"{module}/batch_norm", module, "", "batch_norm") for module in modules]
    return {-number: name for number, name in enumerate(found, start=1) if name.name not in known}


def is_ours(error: Exception) -> bool:
    """Whether an error that ``prepare`` raised comes from pt2qa, neither from a quantizer nor from torchao.

    Of the errors that pass through :class:`EditedQuantizer`, those of the quantizer are a :class:`Pt2qaError`.
    """
    return any(frame.f_globals.get("__name__") == __name__ for frame, _ in walk_tb(error.__traceback__))


def annotate(
    graph: GraphModule, plugin: Any, edits: tuple[Edit, ...], names: Mapping[int, OpName], *, qat: bool
) -> GraphModule:
    """Does what ``prepare`` does before it inserts observers; changes ``graph`` in place."""
    edited = EditedQuantizer(plugin, edits, names, plugin.build(graph, qat=qat), qat=qat)
    with shortcuts():
        if not qat:
            fold_batch_norms(graph)
        graph = edited.transform_for_annotation(graph)
        edited.annotate(graph)
        edited.validate(graph)
    return graph


@torch_defaults
@exports
def annotations_of(capture: Capture, quantizer: Any, edits: Iterable[Edit] = (), *, qat: bool = False) -> Annotations:
    """Annotates a copy of a captured graph as ``prepare`` does, without observers and calibration.

    Args:
        capture: what :func:`pt2qa.capture` returned; it is not changed.
        quantizer: as :func:`pt2qa.quantize` takes it.
        edits: edits to apply, in order.
        qat: annotate as ``prepare_qat_pt2e`` does, which does not fold batch norms first.

    Raises:
        QuantizeError: the quantizer failed, or an edit changes nothing or cannot be made.
        SelectionError: an edit names an op that the model does not have.
        PluginError: there is no such quantizer, or the backend does not support an edit.

    >>> sorted({edge.kind for edge in annotations_of(capture, "xnnpack").edges})
    ['activation', 'weight']
    """
    plugin = resolve(quantizer)
    graph = annotate(copy_to_edit(capture.module()), plugin, tuple(edits), capture.names, qat=qat)
    return read_annotations(graph, plugin, capture.names, qat=qat)


def fusions(capture: Capture, quantizer: Any) -> tuple[Edit, ...]:
    """The ``fuse`` edits that are possible in a model, in graph order.

    The backend runs their ops as one kernel, although its quantizer rounds between them.

    Args:
        capture: the captured model.
        quantizer: as :func:`pt2qa.quantize` takes it; a plug-in that declares no pairs to fuse yields none.

    Raises:
        QuantizeError: the quantizer cannot annotate the model.
        PluginError: there is no such quantizer.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU6()).eval()
    >>> capture = pt2qa.capture(model, torch.zeros(1, 1, 4, 4))
    >>> [edit.ops for edit in fusions(capture, "xnnpack")]
    [('0/conv2d', '1/hardtanh')]
    """
    return fusions_in(annotations_of(capture, quantizer))


_OBSERVER: Final = "observer_or_fake_quant_ctr"


def source_of_changes(annotated: GraphModule, before: Specs, after: Specs) -> str:
    """The source of ``specs`` of ``flow_quantizer.Edited``; ``before`` are the specs of the annotated graph."""
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
        return repr(spec) if isinstance(spec, FixedQParamsQuantizationSpec) else _whole(spec)
    # An observer is only written where an edit has set it; those of quantizers may hold anything.
    point = min(known, key=lambda point: (_OBSERVER in known[point], len(known[point])))
    changes = ", ".join(f"{name!r}: {value}" for name, value in known[point].items())
    return f"Original({places[point]!r}{f', {{{changes}}}' if changes else ''})"


def _whole(spec: Any) -> str:
    """A spec that no other one resembles, field by field."""
    return f"QuantizationSpec({', '.join(f'{each.name}={_text(spec, each.name)}' for each in fields(spec))})"


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
