"""What rules look at: everything known about a model, computed when a rule first needs it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.changes import Change
from pt2qa._capture.exporting import export
from pt2qa._capture.normalise import PASSES, inline_regions, write_sources
from pt2qa._capture.program import Capture
from pt2qa._capture.program import capture as capture_model
from pt2qa._check.products import IntegerProduct, Product, integer_products, products_of
from pt2qa._graph.handles import OpName, assign_handles, copy_to_edit, handle_of, name_of, names_of, source_line, walk
from pt2qa._graph.internals.nodes import VALUE, calls_guards
from pt2qa._graph.internals.torch import calling_convention, pytree, sizes_of
from pt2qa._layers.analysis import compare_rounding
from pt2qa._layers.report import LayerReport
from pt2qa._quantize.calibration import find_observers
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.data import Data
from pt2qa._weights.analysis import weight_rows
from pt2qa._weights.report import WeightRow
from pt2qa._weights.sums import SumsOfWeights
from pt2qa.errors import Pt2qaError
from pt2qa.overrides import Annotations, annotations_of
from pt2qa.overrides.annotations import read_annotations
from pt2qa.overrides.broken_lines import BrokenLine, broken_lines, broken_weights
from pt2qa.overrides.edited import annotate
from pt2qa.plugins import DoesNotApplyError, QuantizerPlugin, resolve
from pt2qa.plugins.registry import spec_of

NO_INPUTS = "without example inputs: pt2qa.check(model, args)"
CAPTURED = "to programs that pt2qa.capture made"
_UNANNOTATED = "the quantizer could not annotate the graph"
NO_QUANTIZER = "without a quantizer: pass quantizer="

Kind = Literal["model", "program", "graph", "prepared", "capture", "pair"]

_Value = TypeVar("_Value")
_Exported = TypeVar("_Exported", ExportedProgram, GraphModule)


@dataclass(frozen=True, eq=False)
class CheckContext:
    """What is known about a model, for rules.

    The properties below raise :class:`DoesNotApplyError` if they are unavailable, saying what to pass or what failed;
    so a rule that lists one among its needs is reported as not applied.

    Attributes:
        given: the kind of ``value``; ``program`` and ``graph`` are as ``torch.export`` made them, ``prepared`` has
            observers.
        value: what the user gave.
        as_deployed: whether the pair is that of ``pair.as_deployed()``; ``value`` is then the one that is lowered.
        args, kwargs, dynamic_shapes: as :func:`pt2qa.check` takes them.
        quantizer: as ``pt2qa.quantize`` takes it; None without one.
        qat: whether it prepares for quantization-aware training.
        data: the batches for rules on values; None without any.
        cpu: features of the CPU that the model will run on, in lower case, such as ``avx512_vnni``.
        eager: the model that a capture, a graph or a pair was made from, if the user gave it too.
        errors: why ``capture``, ``quantizer``, ``annotations`` and so on are unavailable; filled along the way, for the
            rules that report it.
        sums: what the rules know of the values of weights, each of which is read once.
    """

    given: Kind
    value: Any
    as_deployed: bool = False
    args: Any = None
    kwargs: Mapping[str, Any] | None = None
    quantizer: Any = None
    qat: bool = False
    data: Data | None = None
    dynamic_shapes: Any = None
    cpu: frozenset[str] = frozenset()
    eager: nn.Module | None = None
    errors: dict[str, Pt2qaError] = field(default_factory=dict)
    sums: SumsOfWeights = field(default_factory=SumsOfWeights)

    @property
    def is_exported(self) -> bool:
        return self.given in ("program", "graph")

    @property
    def model(self) -> nn.Module:
        model = self.value if self.given == "model" else self.eager
        if model is None:  # an empty nn.Sequential is false
            raise DoesNotApplyError("without the eager model: pass it, or model=")
        return model

    @functools.cached_property
    def capture(self) -> Capture:
        """The capture: given, made from the model, or the pair's."""
        if self.given == "capture":
            return self.value  # type: ignore[no-any-return]  # ditto
        if self.given == "pair" and self.value.capture is not None:
            return self.value.capture  # type: ignore[no-any-return]
        require(self.given == "model", "without a capture")
        require(self.args is not None or self.kwargs is not None, NO_INPUTS)
        return self._attempt("capture", "the model could not be captured", self.captured)

    def captured(self, *, strict: bool = False) -> Capture:
        keywords = None if self.kwargs is None else dict(self.kwargs)
        return capture_model(self.model, self.args, keywords, dynamic_shapes=self.dynamic_shapes, strict=strict)

    @functools.cached_property
    def program(self) -> ExportedProgram:
        return _with_handles(self.value) if self.given == "program" else self.capture.program

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The float graph that ``prepare`` is given, with handles; never to be edited."""
        if self.given == "graph":
            return _with_handles(self.value)  # type: ignore[no-any-return]
        if self.given == "program":
            return self.program.module()
        require(self.given != "prepared", "to graphs with observers")
        if self.given == "pair" and self.value.float_graph is not None:
            return self.value.float_graph  # type: ignore[no-any-return]
        return self.capture.module()

    @functools.cached_property
    def names(self) -> Mapping[int, OpName]:
        """What to call each handle of the graph."""
        if self.given in ("graph", "prepared"):
            return names_of(self.graph if self.given == "graph" else self.value)
        return self.pair.names if self.given == "pair" else names_of(self.program)

    @functools.cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The ops and inputs of the float graph by name, in graph order."""
        found: dict[str, Node] = {}
        for node in self.graph.graph.nodes:
            if name := name_of(node, self.names):
                found.setdefault(name, node)
        return found

    @functools.cached_property
    def plugin(self) -> QuantizerPlugin:
        quantizer = self.quantizer
        if quantizer is None and self.given == "pair" and self.value.recipe is not None:
            quantizer = self.value.recipe.plugin
        require(quantizer is not None, NO_QUANTIZER)
        return self._attempt("quantizer", "the quantizer is refused", lambda: resolve(quantizer))

    @functools.cached_property
    def annotations(self) -> Annotations:
        """What the quantizer annotates in the graph, before any calibration."""
        plugin, recipe = self.plugin, self.value.recipe if self.given == "pair" else None
        if recipe is not None and (recipe.plugin, recipe.qat) == (plugin, self.qat):
            return recipe.annotations  # type: ignore[no-any-return]
        if self.is_exported:
            return self._attempt("annotations", _UNANNOTATED, lambda: self.annotate(self.graph, self.names))
        captured, edits = self.capture, () if recipe is None else recipe.edits
        return self._attempt("annotations", _UNANNOTATED, lambda: annotations_of(captured, plugin, edits, qat=self.qat))

    @functools.cached_property
    def broken_lines(self) -> tuple[BrokenLine, ...]:
        """The lines of the backend's spec that the annotations break; of a pair made elsewhere, its weights."""
        spec = require(spec_of(self.plugin), "to quantizers without a spec of what their backend takes")
        if self.given != "pair":
            return broken_lines(self.annotations, spec)
        recipe = self.pair.recipe
        return broken_weights(self.pair.sites, spec) if recipe is None else broken_lines(recipe.annotations, spec)

    @property
    def unshared(self) -> frozenset[str]:
        """The ops that the backend's spec wants one scale for, and that have several; empty without a spec."""
        return frozenset(line.name for line in self.known("broken_lines") or () if "sharing" in line.differs)

    @functools.cached_property
    def rewritten(self) -> Rewritten:
        """The program or graph that was given, as ``pt2qa.capture`` would have written it."""
        return rewrite(self._as_program, self.names)

    @functools.cached_property
    def _as_program(self) -> ExportedProgram:
        """What was given, as a program that passes can run on."""
        require(self.is_exported, CAPTURED)
        if self.given == "program":
            return self.program
        graph = self.graph
        return self._attempt("re-export", "the graph could not be exported again", lambda: as_program(graph))

    @functools.cached_property
    def changes(self) -> tuple[Change, ...]:
        """What ``pt2qa.capture`` changed, or would have changed in the program that was given."""
        return tuple(itertools.chain(*self.rewritten.changes.values())) if self.is_exported else self.capture.changes

    @functools.cached_property
    def normalised(self) -> Annotations:
        """What the quantizer would annotate if ``pt2qa.capture`` had made the program that was given."""
        rewritten = self.rewritten
        return self._attempt("normalised", _UNANNOTATED, lambda: self.annotate(rewritten.module(), rewritten.names))

    @functools.cached_property
    def fixing_passes(self) -> Mapping[Pass, tuple[Change, ...]]:
        """The passes of capture without which the quantizer fails; if any one will do, the first that suffices.

        Empty if it does not fail on the program that was given, or fails after capture too.
        """
        self.known("annotations")
        if "annotations" not in self.errors:
            return {}
        self.known("normalised")
        if "normalised" in self.errors:
            return {}
        made = self.rewritten
        tried = [run for run in EVERY_PASS if made.changes[run] or run is write_sources]
        others = {run: tuple(other for other in EVERY_PASS if other is not run) for run in tried}
        needed = [run for run in tried if self.annotated_after(*others[run]) is None]
        enough = (run for run in tried if self.annotated_after(run) is not None)
        return {run: made.changes[run] for run in needed or itertools.islice(enough, 1)}

    def annotated_after(self, *passes: Pass) -> Annotations | None:
        """What the quantizer annotates after some of capture's passes; None if it fails."""
        made = rewrite(self._as_program, self.names, passes)
        try:
            return self.annotate(made.module(), made.names)
        except Pt2qaError:
            return None

    @functools.cached_property
    def products(self) -> tuple[Product, ...]:
        """The ops that multiply matrices, and how much of each is quantized."""
        pair = self.value if self.given == "pair" else None
        known = pair is None or (pair.recipe is not None and pair.capture is not None)
        graph, annotations = (self.graph, self.annotations) if known else (self.value.reference, None)
        found = products_of(graph, self.names, annotations, None if pair is None else pair.program)
        return require(found, "to models without convolutions, linears or matrix products")

    @property
    def prepared(self) -> GraphModule:
        require(self.given == "prepared", "without a prepared graph")
        return self.value  # type: ignore[no-any-return]

    @property
    def pair(self) -> QuantizedPair:
        require(self.given == "pair", "without a quantized pair: pass what pt2qa.quantize returns")
        return self.value  # type: ignore[no-any-return]

    @functools.cached_property
    def layers(self) -> LayerReport:
        """What the data does at each site: range, saturation, rounding error; no isolated errors."""
        return compare_rounding(self.pair, require(self.data, "without data: pass batches="))

    @functools.cached_property
    def weights(self) -> tuple[WeightRow, ...]:
        return weight_rows(self.pair, self.sums)

    @functools.cached_property
    def integer_products(self) -> tuple[IntegerProduct, ...]:
        """The convolutions and linears of the pair with quantized weights; for rules of plug-ins, too."""
        return integer_products(self.pair, self.sums)

    def known(self, what: str) -> Any:
        """One of these properties by name; None if it is unavailable."""
        with contextlib.suppress(DoesNotApplyError):
            return getattr(self, what)
        return None

    def name_of(self, node: Node) -> str:
        """What to call a node: the op's name, an input's, or the qualified name of an attribute."""
        return name_of(node, self.names) or str(node.target if node.op == "get_attr" else node)

    def source_of(self, name: str) -> str:
        """The user's line that made an op, ``net.py:12``; empty if unknown."""
        node = (self.known("nodes") or {}).get(name)
        return "" if node is None else source_line(node)

    def annotate(self, graph: GraphModule, names: Mapping[int, OpName]) -> Annotations:
        """What the quantizer annotates in a copy of another graph, such as one with another spelling."""
        annotated = annotate(copy_to_edit(graph), self.plugin, (), names, qat=self.qat)
        return read_annotations(annotated, self.plugin, names, qat=self.qat)

    def _attempt(self, what: str, failed: str, make: Callable[[], _Value]) -> _Value:
        """Makes something; a failure is kept for the rule that reports it, and occurs only once."""
        if what not in self.errors:
            try:
                return make()
            except Pt2qaError as error:
                self.errors[what] = error
        raise DoesNotApplyError(failed)


def kind_of(value: Any) -> Kind | None:
    """The kind of a subject; None if it cannot be checked."""
    if isinstance(value, QuantizedPair):
        return "pair"
    if isinstance(value, Capture):
        return "capture"
    if isinstance(value, ExportedProgram):
        return "program"
    if isinstance(value, GraphModule):
        if find_observers(value):
            return "prepared"
        # A graph traced by torch.fx calls modules: it is a model like any other.
        calls = (node for node in value.graph.nodes if node.op in ("call_module", "call_method"))
        return "model" if any(not calls_guards(node) for node in calls) else "graph"
    return "model" if isinstance(value, nn.Module) else None


def require(found: _Value | None, otherwise: str) -> _Value:
    """What a rule looks at; if there is nothing, the rule does not apply, ``otherwise`` says to what."""
    if not found:
        raise DoesNotApplyError(otherwise)
    return found


def _with_handles(given: _Exported) -> _Exported:
    copied = copy_to_edit(given)
    if not names_of(copied):
        assign_handles(copied)
    return copied


Pass = Callable[[ExportedProgram], tuple[Change, ...]]

EVERY_PASS: tuple[Pass, ...] = (inline_regions, *PASSES, write_sources)
"""What capture does to every program, in its order."""

_GIVEN = "handle_as_given"


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A copy of a program after capture's passes, and what each changed.

    ``names`` are what the given program calls its ops, by handle; ops that a pass added have none.
    """

    program: ExportedProgram
    names: Mapping[int, OpName]
    changes: Mapping[Pass, tuple[Change, ...]] = field(repr=False)

    def module(self) -> GraphModule:
        return self.program.module(check_guards=False)


def rewrite(program: ExportedProgram, names: Mapping[int, OpName], passes: Sequence[Pass] = EVERY_PASS) -> Rewritten:
    """Runs passes of capture, in this order, on a copy of a program that has handles."""
    program = copy_to_edit(program)
    for placed in walk(program.graph_module):
        handle = handle_of(placed.node)
        # The passes renumber handles; what they copy keeps its metadata.
        placed.node.meta = {**placed.node.meta, _GIVEN: handle}
    changes = {run: run(program) for run in passes}
    assign_handles(program)
    given = {handle_of(placed.node): placed.node.meta.get(_GIVEN) for placed in walk(program.graph_module)}
    called = {new: names[old] for new, old in given.items() if new is not None and old is not None and old in names}
    return Rewritten(program, called, changes)


def as_program(graph: GraphModule) -> ExportedProgram:
    """Re-exports a graph of ops, for what only a program can tell.  Dynamic sizes become fixed."""
    graph = copy_to_edit(graph)
    inputs = []
    for node in list(graph.graph.nodes):
        if node.op == "placeholder":
            traced = node.meta.get(VALUE)
            inputs.append(pytree.tree_map_only(Tensor, lambda x: torch.zeros(sizes_of(x), dtype=x.dtype), traced))
        elif calls_guards(node):
            graph.graph.erase_node(node)
    graph.recompile()
    convention = calling_convention(graph)
    args, kwargs = (tuple(inputs), {}) if convention is None else pytree.tree_unflatten(inputs, convention.in_spec)
    return export(graph, args, kwargs, None, False)
