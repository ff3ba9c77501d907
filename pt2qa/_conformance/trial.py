"""One quantizer on one model: what properties check, each part computed once, and annotations as text by place."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantizer import Quantizer

from pt2qa._capture.program import Capture, capture
from pt2qa._conformance.nets import MODULE, ConformanceModel, Inputs
from pt2qa._graph.handles import OpName, assign_handles
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._quantize.quantization import quantize
from pt2qa.errors import PluginError, Pt2qaError
from pt2qa.overrides import Annotations, Edit, OverridePlan
from pt2qa.overrides.annotations import read_annotations
from pt2qa.overrides.edited import annotate
from pt2qa.overrides.points import Point, is_quantized, root_of, spec_text
from pt2qa.plugins import BackendSpec, QuantizerPlugin, describe, resolve, spec_of

SHOWN = 3
"""Number of differences that a sentence names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class PlaceSpec:
    """How one place is quantized: dtype, scheme, range, observer, and the places (with itself) that share its scale."""

    spec: str
    group: frozenset[str]


Layout = dict[str, PlaceSpec]
"""How each place (``conv/conv2d → relu/relu``) is quantized; places in float are left out."""


def layout_of(annotations: Annotations) -> Layout:
    specs = annotations.specs
    found: dict[str, str] = {}
    groups: dict[Point | None, list[str]] = defaultdict(list)
    for point in specs:
        root, place = root_of(specs, point), place_of(annotations, point)
        if root is None:
            found[place] = "a scale that resolves to no spec"
        elif is_quantized(specs[root], annotations.graph.nodes[point[0]]):
            found[place] = spec_text(specs[root])
            groups[root].append(place)
    group_of = {place: frozenset(group) for group in groups.values() for place in group}
    return {place: PlaceSpec(spec, group_of.get(place, frozenset((place,)))) for place, spec in found.items()}


def place_of(annotations: Annotations, point: Point) -> str:
    """A point's readable name: ``conv/conv2d → relu/relu``, ``output of fc/linear``, ``argument 1 of fc/linear``."""
    nodes = annotations.graph.nodes
    source, reader = point
    name = nodes[source].name if source in nodes else source
    if not reader:
        return f"output of {name}"
    if source in nodes and nodes[source].constant and source in nodes[reader].inputs:
        # Constants are named differently in each spelling.
        return f"argument {nodes[reader].inputs[source]} of {nodes[reader].name}"
    return f"{name} → {nodes[reader].name}"


def differences(before: Layout, after: Layout) -> list[str]:
    """Each place where two annotations differ, in the order of the first.

    For places with equal specs, a change of the places that share the scale is reported only among places whose specs
    are equal too: a place that is gone is reported once.
    """
    places = list(dict.fromkeys((*before, *after)))
    changed = [place for place in places if _spec(before, place) != _spec(after, place)]
    found = [f"{place} is {_spec(after, place)}, not {_spec(before, place)}" for place in changed]
    for place in places:
        if place not in changed:
            old, new = before[place].group.difference(changed), after[place].group.difference(changed)
            if old != new:
                found.append(f"{place} shares its scale with {_others(new, place)}, not with {_others(old, place)}")
    return found


def some(found: Sequence[str]) -> str:
    """The first differences, worded as the end of a sentence."""
    more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _spec(layout: Layout, place: str) -> str:
    return layout[place].spec if place in layout else "float"


def _others(group: frozenset[str], place: str) -> str:
    return ", ".join(sorted(group - {place})) or "any other place"


@dataclass(frozen=True)
class Plain:
    """A graph as ``torch.export`` returned it, not normalised, with op names shared by the model's other graphs."""

    capture: Capture
    names: dict[int, OpName] = field(repr=False)


@functools.lru_cache(maxsize=64)
def captured(model: ConformanceModel) -> Capture:
    """The model as pt2qa captures it, once for all quantizers that are checked.

    The other graphs are as ``torch.export`` returns them, which users of a quantizer have: capture removes the
    differences that some properties test.
    """
    return capture(model.build(), model.batches()[0], dynamic_shapes=model.dynamic_shapes, decompose=model.decompose)


@functools.lru_cache(maxsize=512)
def exported(model: ConformanceModel, strict: bool, spelling: str = MODULE) -> Plain:
    return _plain(model, strict, _export(model, model.build(spelling), strict), strict or spelling != MODULE)


@functools.lru_cache(maxsize=128)
def re_exported(model: ConformanceModel, strict: bool) -> Plain:
    module = exported(model, strict).capture.program.module(check_guards=False)
    return _plain(model, strict, _export(model, module, strict))


@functools.lru_cache(maxsize=128)
def loaded(model: ConformanceModel, strict: bool) -> Plain:
    file = io.BytesIO()
    torch.export.save(exported(model, strict).capture.program, file)
    file.seek(0)
    return _plain(model, strict, torch.export.load(file))


def _export(model: ConformanceModel, module: torch.nn.Module, strict: bool) -> ExportedProgram:
    return torch.export.export(module, model.batches()[0], dynamic_shapes=model.dynamic_shapes, strict=strict)


def _plain(model: ConformanceModel, strict: bool, program: ExportedProgram, named: bool = True) -> Plain:
    """A graph, ``named`` like the model's first one."""
    assign_handles(program)
    made = Capture(program, model.batches()[0], {}, strict, model.name)
    return Plain(made, same_names(made.names, exported(model, False).names) if named else made.names)


def same_names(names: dict[int, OpName], wanted: dict[int, OpName]) -> dict[int, OpName]:
    """The names of a graph's ops in another graph of the same model, by handle.

    Ops are matched by graph order or, if the graphs differ in size, by kind and ordinal.
    """
    if len(names) == len(wanted):
        return dict(zip(names, wanted.values(), strict=True))
    known = dict(zip(_ordinals(wanted), wanted.values(), strict=True))
    return {
        handle: known.get(place, name) for (handle, name), place in zip(names.items(), _ordinals(names), strict=True)
    }


def _ordinals(names: dict[int, OpName]) -> list[tuple[str, int]]:
    counts: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [(name.op, next(counts[name.op])) for name in names.values()]


@dataclass(frozen=True)
class QuantizerUnderTest:
    """Anything :func:`pt2qa.quantize` takes, or a function without arguments that returns it."""

    quantizer: Any
    qat: bool = False
    given_spec: BackendSpec | None = None

    def plugin(self) -> QuantizerPlugin:
        """The quantizer as a plug-in: a new one if it can be made, else the given object."""
        return resolve(self.quantizer() if self._factory else self.quantizer)

    def build(self, graph: GraphModule) -> Any:
        return self.plugin().build(graph, qat=self.qat)

    @functools.cached_property
    def spec(self) -> BackendSpec | None:
        """What the backend takes: as given, else as the plug-in or the quantizer states it."""
        return spec_of(self.plugin()) if self.given_spec is None else self.given_spec

    @property
    def name(self) -> str:
        return describe(self.plugin()) + (" for QAT" if self.qat else "")

    @property
    def note(self) -> str:
        """How quantizers were made for the graphs."""
        if self._factory:
            made = getattr(self.quantizer, "__qualname__", type(self.quantizer).__name__)
            return f"each graph was annotated by a new quantizer from {made}()"
        if not isinstance(self.quantizer, Quantizer):
            return "each graph was annotated by a new quantizer from the plug-in"
        return "all graphs were annotated by the one object that was given; pass a function to have a new one for each"

    @property
    def _factory(self) -> bool:
        if isinstance(self.quantizer, type):
            return True
        return callable(self.quantizer) and not isinstance(self.quantizer, Quantizer | QuantizerPlugin)


Stage = Literal["prepare", "calibrated", "convert", "lower"]


@dataclass(frozen=True)
class Annotated:
    """A graph after a quantizer's ``annotate``, and its annotations."""

    graph: GraphModule = field(repr=False)
    annotations: Annotations

    @functools.cached_property
    def layout(self) -> Layout:
        return layout_of(self.annotations)


@dataclass(frozen=True)
class Failure:
    """A step that raised an error, and why."""

    stage: Stage
    why: str


class Calibration:
    """Calibration batches that record how far calibration got."""

    def __init__(self, batches: Sequence[Inputs]) -> None:
        self.batches, self.given, self.done = batches, 0, False

    def __iter__(self) -> Iterator[Inputs]:
        for batch in self.batches:
            self.given += 1
            yield batch
        self.done = True


@dataclass(frozen=True)
class Trial:
    """One quantizer on one model.

    Attributes:
        quantizer: the quantizer.
        model: the model.
        others: trials of other models, for properties about a quantizer's state.
    """

    quantizer: QuantizerUnderTest
    model: ConformanceModel
    others: Sequence[Trial] = field(default=(), repr=False)
    _exported: dict[bool, Annotated | Failure] = field(default_factory=dict, repr=False)

    @property
    def capture(self) -> Capture:
        return captured(self.model)

    @functools.cached_property
    def batches(self) -> tuple[Inputs, Inputs]:
        return self.model.batches()

    @functools.cached_property
    def annotated(self) -> Annotated | Failure:
        return self.annotate()

    def exported(self, *, strict: bool) -> Annotated | Failure:
        """The graph as ``torch.export`` returns it, annotated."""
        if strict not in self._exported:
            self._exported[strict] = self.annotate(exported(self.model, strict))
        return self._exported[strict]

    @functools.cached_property
    def pair(self) -> QuantizedPair | Failure:
        return self.quantize()

    def annotate(self, program: Plain | None = None, plugin: QuantizerPlugin | None = None) -> Annotated | Failure:
        """A copy of a graph, annotated.

        Args:
            program: the graph; None for the capture.
            plugin: the quantizer to annotate with; None for the one under test.
        """
        plugin = self.quantizer.plugin() if plugin is None else plugin
        capture = self.capture if program is None else program.capture
        names: dict[int, OpName] = capture.names if program is None else program.names
        graph, qat = copy.deepcopy(capture.module()), self.quantizer.qat
        try:
            graph = annotate(graph, plugin, (), names, qat=qat)
        except Pt2qaError as error:
            return Failure("prepare", str(error))
        return Annotated(graph, read_annotations(graph, plugin, names, qat=qat))

    def quantize(self, *edits: Edit) -> QuantizedPair | Failure:
        """The captured model, prepared, calibrated and converted.

        Args:
            edits: changes to what the quantizer annotates.
        """
        capture, calibration = self.capture, Calibration(self.batches)
        overrides, qat = OverridePlan(edits) if edits else None, self.quantizer.qat
        try:
            return quantize(capture, self.quantizer.plugin(), calibration, overrides=overrides, qat=qat, progress=False)
        except Exception as error:  # torchao's observers raise errors of any class; each is an outcome here
            said = str(error) if isinstance(error, Pt2qaError) else ""
            return Failure(_stage(error, calibration), said or f"{type(error).__name__}: {str(error) or 'no message'}")


def _stage(error: Exception, calibration: Calibration) -> Stage:
    """The step of :func:`pt2qa.quantize` that raised an error.

    Errors from prepare and convert wrap one from torchao, so they have a cause; pt2qa's own errors have none.
    """
    found_by_pt2qa = isinstance(error, Pt2qaError) and error.__cause__ is None
    if not calibration.given:
        return "calibrated" if found_by_pt2qa and not isinstance(error, PluginError) else "prepare"
    if not calibration.done or found_by_pt2qa:
        return "calibrated"
    return "lower" if isinstance(error.__cause__, Pt2qaError) else "convert"
