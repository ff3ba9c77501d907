"""What a fault is planted in, and what comes of it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer, SharedQuantizationSpec

import pt2qa
from pt2qa._graph.handles import handle_of
from pt2qa.overrides import Edit, OverridePlan
from pt2qa.plugins import resolve
from tests.diagnosis.models import Link, Net, model_of, net_of

QUANTIZERS = ("xnnpack", "x86")


@dataclass(frozen=True)
class Planted:
    """A pair with a fault, and what is right to say of it.

    Attributes:
        pair: the pair to diagnose.
        calibration, evaluation: batches.
        places: names of ops and modules that are right to name; None if the fault is in the model as a whole, or in the
            data.
        deployed: the backend whose kernels alone show it; False if the converted graph does.
        against: the float model to compare with, where that is not what was captured.
    """

    pair: pt2qa.QuantizedPair
    calibration: Sequence[Any]
    evaluation: Sequence[Any]
    places: tuple[str, ...] | None = None
    deployed: Any = False
    against: nn.Module | None = None

    def is_place(self, name: str) -> bool:
        """Whether a name is one of the places: the op, or its module."""
        return self.places is None or any(name in (place, place.rpartition("/")[0] or place) for place in self.places)


@functools.cache
def _capture(name: str) -> pt2qa.Capture:
    net = net_of(name)
    return pt2qa.capture(model_of(name), (net.calibration()[0],), decompose=net.decompose)


@dataclass
class Subject:
    """A healthy model with a quantizer and data; faults edit a copy of the model, the data or the quantizer.

    Attributes:
        net: which model.
        quantizer: ``xnnpack`` or ``x86``, or what is planted in its place.
        calibration, evaluation: batches.
        overrides: edits that the healthy model has.
    """

    net: Net
    quantizer: Any
    calibration: list[Tensor]
    evaluation: list[Tensor]
    overrides: OverridePlan | None = None
    _model: nn.Module | None = field(default=None, repr=False)
    _captured: tuple[bytes, Any] = field(default=(b"", None), repr=False)

    @classmethod
    def healthy(cls, net: str, quantizer: str) -> Subject:
        """As it is before anything is planted."""
        found = net_of(net)
        fuses = found.fuse if quantizer == "xnnpack" else ()
        plan = OverridePlan(tuple(Edit("fuse", pair) for pair in fuses)) if fuses else None
        return cls(found, quantizer, found.calibration(), found.evaluation(), plan)

    @property
    def backend(self) -> str:
        """Which of the two it is; ask before the quantizer is planted."""
        assert isinstance(self.quantizer, str)
        return self.quantizer.partition(":")[0]

    def model(self) -> nn.Module:
        """A copy of the model of its own, which later captures see."""
        if self._model is None:
            self._model = copy.deepcopy(model_of(self.net.name))
        return self._model

    def replace_model(self, model: nn.Module) -> None:
        """Takes another model in its place."""
        self._model = model

    def nested_overrides(self, path: str) -> OverridePlan | None:
        """The edits of the healthy model, where it is a part of another one."""
        if self.overrides is None:
            return None
        return OverridePlan(
            tuple(Edit(edit.kind, tuple(f"{path}.{op}" for op in edit.ops)) for edit in self.overrides.edits)
        )

    def capture(self) -> pt2qa.Capture:
        """Of the model; untouched models share one."""
        if self._model is None:
            return _capture(self.net.name)
        # A fault asks for it again and again: as long as the model stays as it is, once, of a copy that nobody edits.
        model = pickle.dumps((self._model, self.calibration[0]))
        if model != self._captured[0]:
            own = copy.deepcopy(self._model)
            self._captured = model, pt2qa.capture(own, (self.calibration[0],), decompose=self.net.decompose)
        return self._captured[1]

    def pair(self) -> pt2qa.QuantizedPair:
        """Captured and quantized as it stands."""
        return pt2qa.quantize(
            self.capture(), self.quantizer, self.calibration, overrides=self.overrides, progress=False
        )

    def planted(self, places: Sequence[str] | None = None, **rest: Any) -> Planted:
        """The pair as it stands, with the places at which something is wrong."""
        return Planted(
            self.pair(), self.calibration, self.evaluation, None if places is None else tuple(places), **rest
        )

    def altered(self, edit: Callable[[Graph], None]) -> None:
        """Edits what the quantizer annotates."""
        self.quantizer = Altered(self.quantizer, self.capture(), edit)

    def places_at(self, link: Link) -> tuple[str, ...]:
        """Names of the ops at both ends of a link, and of those between."""
        ops = {name.module: name.name for name in self.capture().names.values() if name.op in ("conv2d", "linear")}
        return (ops[link.product], *link.between, ops[link.reader])

    def op_at(self, module: str) -> str:
        """Name of the product of a module."""
        return next(
            name.name
            for name in self.capture().names.values()
            if name.module == module and name.op in ("conv2d", "linear")
        )


# -- annotations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """An annotated graph, with the names of its ops."""

    module: GraphModule
    names: Any

    def name(self, node: Node) -> str:
        """The op's name; empty for what is no op of the captured model."""
        handle = handle_of(node)
        return self.names[handle].name if handle in self.names else ""

    def op(self, name: str) -> Node:
        """The last node of an op, of which decomposition, folding and the like may make several; or an input."""
        made = ("call_function", "placeholder")
        return [node for node in self.module.graph.nodes if self.name(node) == name and node.op in made][-1]

    def annotated(self) -> Iterator[tuple[Node, QuantizationAnnotation]]:
        """Nodes with an annotation."""
        for node in self.module.graph.nodes:
            annotation = node.meta.get("quantization_annotation")
            if annotation is not None:
                yield node, annotation

    def input_of(self, name: str) -> Node:
        """The activation that a product reads."""
        return self.op(name).all_input_nodes[0]

    def weight_of(self, name: str) -> Node:
        """The weight that a product reads."""
        return self.op(name).all_input_nodes[1]

    def at_value(self, value: Node, change: Callable[[Any], Any]) -> None:
        """Changes each spec of a value that is no reference to another one: its own, and where it is read."""
        own = value.meta.get("quantization_annotation")
        if own is not None and _is_own(own.output_qspec):
            own.output_qspec = change(own.output_qspec)
        for reader in value.users:
            annotation = reader.meta.get("quantization_annotation")
            if annotation is not None and _is_own(annotation.input_qspec_map.get(value)):
                annotation.input_qspec_map[value] = change(annotation.input_qspec_map[value])

    def round_at(self, value: Node, spec: Any = None) -> None:
        """Rounds the output of an op, by a spec or as other activations are."""
        chosen = self.activation() if spec is None else spec
        annotation = value.meta.setdefault("quantization_annotation", QuantizationAnnotation(_annotated=True))
        annotation.output_qspec = chosen
        self.at_value(value, lambda own: chosen)

    def activation(self) -> Any:
        """The spec that the quantizer has for activations."""
        return next(
            spec
            for _, annotation in self.annotated()
            for source, spec in annotation.input_qspec_map.items()
            if source.op != "get_attr" and _is_own(spec)
        )

    def everywhere(self, change: Callable[[Any], Any], weights: bool) -> None:
        """Changes the specs of all weights, or of all activations."""
        for _, annotation in self.annotated():
            for source, spec in annotation.input_qspec_map.items():
                if _is_own(spec) and (source.op == "get_attr") is weights:
                    annotation.input_qspec_map[source] = change(spec)
            if not weights and _is_own(annotation.output_qspec):
                annotation.output_qspec = change(annotation.output_qspec)


def _is_own(spec: Any) -> bool:
    return spec is not None and not isinstance(spec, SharedQuantizationSpec)


def changed(**fields: Any) -> Callable[[Any], Any]:
    """A change of a spec's fields."""
    return lambda spec: replace(spec, **fields)


class Altered(Quantizer):  # type: ignore[misc]  # torchao is not typed
    """A quantizer of somebody's own: it annotates as another one, and then does something about it."""

    def __init__(self, quantizer: str, capture: pt2qa.Capture, edit: Callable[[Graph], None]) -> None:
        super().__init__()
        self._inner = resolve(quantizer).build(capture.module(), qat=False)
        self._names, self._edit = capture.names, edit

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        transformed: GraphModule = self._inner.transform_for_annotation(model)
        return transformed

    def annotate(self, model: GraphModule) -> GraphModule:
        self._inner.annotate(model)
        self._edit(Graph(model, self._names))
        return model

    def validate(self, model: GraphModule) -> None:
        self._inner.validate(model)
