"""A reference and a quantized graph, paired handle by handle."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._ambient import call_under_way, torch_defaults
from pt2qa._capture.program import Capture, export_quantized
from pt2qa._exclusion import exports
from pt2qa._graph.agreement import difference
from pt2qa._graph.annotation import annotated_ops, specs_of
from pt2qa._graph.handles import (
    OpName,
    attribute_of,
    computed_from,
    copy_nodes,
    handle_of,
    input_handles,
    is_decomposed,
    name_of,
    names_of,
    op_of,
    remove_handles,
    walk,
)
from pt2qa._graph.internals.torchao import is_logger, is_observer
from pt2qa._graph.matching import with_common_handles
from pt2qa._graph.subclasses import refuse_subclasses, subclasses_in, with_tensors
from pt2qa._quantize.calibration import without
from pt2qa._quantize.deployed import deployed_note, sliced_inputs, with_slices
from pt2qa._report.notes import notes_without
from pt2qa._report.rows import Environment, Unpaired
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, as_call, flatten_batch
from pt2qa._simulator.contents import Contents
from pt2qa._simulator.data import Data
from pt2qa._simulator.lower import lower
from pt2qa._simulator.products import PRODUCTS, is_quantized, reads_of
from pt2qa._simulator.program import Constant, Program, Region, Site
from pt2qa._simulator.quant_ops import serves_quantization
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.stored import WEIGHT_CACHE
from pt2qa._simulator.verification import Graphs, Verification, add_state, digest_of, simulated
from pt2qa.errors import PairingError, SelectionError
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.parameters import with_folded_norms
from pt2qa.plugins import QuantizerPlugin, available, resolve

T = TypeVar("T")

WEIGHT_MATCH_DB = 3.0
"""How well a quantized weight must match its float value: 2-bit weights reach 6 dB, zeros 0 dB."""


@dataclass(frozen=True, slots=True)
class Paired:
    """One handle, its readable name, and the fx names of the nodes that carry it in both graphs."""

    handle: int
    name: str
    reference: tuple[str, ...]
    quantized: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Every handle of both graphs: with its partners, or the reason why it has none.

    ``unexplained`` are those unpaired ops that no rule of prepare or convert explains.
    """

    pairs: tuple[Paired, ...]
    unpaired: tuple[Unpaired, ...]
    unexplained: tuple[Unpaired, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.pairs)} ops paired, {len(self.unpaired)} not"]
        return "\n".join([*lines, *(f"  {u.name} ({u.side}): {u.reason}" for u in self.unpaired)])


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """How much of one kind of op is quantized.

    Attributes:
        op: kind, such as ``conv2d``.
        total: how many the model has.
        annotated: at how many the quantizer asks for a rounded value; -1 where the graphs came without annotations.
        quantized: how many compute on quantized values: their weights are rounded, or, where they have none, all that
            they multiply; of ops that carry no arithmetic, how many read a rounded value.
    """

    op: str
    total: int
    annotated: int
    quantized: int

    @property
    def carries_arithmetic(self) -> bool:
        """Whether such an op left in float is worth a note."""
        return self.op in PRODUCTS


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a pair was quantized, so that it can be quantized again with other settings.

    ``data`` are the calibration batches; None if they came from an iterator, which is exhausted.  ``annotations`` is
    what the quantizer asked for, edits included.  ``before_convert`` edited the calibrated graph for the backend.
    """

    plugin: Any
    annotations: Annotations = field(repr=False)
    data: Data | None
    qat: bool = False
    train: Callable[[GraphModule], None] | None = None
    edits: tuple[Any, ...] = ()
    before_convert: Callable[[GraphModule], Any] | None = None


class of_live_graphs(functools.cached_property[T]):
    """A cached property of a pair.  It is made anew in the next call of a public function once a graph has changed."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> T:  # type: ignore[override]  # on a pair alone
        if instance is not None:
            _forget_what_changed(instance)
        made: T = super().__get__(instance, owner)
        return made

    def __set__(self, instance: object, value: T) -> None:
        # With a setter, Python asks __get__ each time, and not the instance's dict first.
        raise AttributeError(f"a pair's {self.attrname} cannot be set")


@dataclass(frozen=True, slots=True)
class Origin:
    """The pair whose graph is deployed; ``names`` has, by the name of a node that both graphs have, its name there."""

    pair: QuantizedPair
    names: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class QuantizedPair:
    """What every analysis takes: a reference, its quantized graph, and how their parts belong together.

    What :func:`pt2qa.quantize` and :func:`pt2qa.pair` return.  The graphs may change afterwards, as by
    ``load_state_dict``: every analysis describes them as they are when it is called.

    Attributes:
        reference: the float graph after the rewriting that ``prepare`` did (batch norms folded), observers off.
        quantized: what ``convert_pt2e`` returned.
        names: the name of each handle of the captured model.
        quantizer: the quantizer's name in reports.
        model: the model's name in reports.
        float_graph: the captured graph before ``prepare``, if known; it explains what is unpaired.
        capture: the capture that it was made from, if pt2qa made it; it checks batches.
        notes: what a reader of any report about this pair must know.
        recipe: how it was quantized, if pt2qa did it.
        origin: the pair of the converted graph, which is deployed, where this one is made by :meth:`as_deployed`.
        plugin: whose backend runs it, if there is no recipe; and whose kernels :meth:`as_deployed` takes.
        weight_cache: bytes of quantized weights, 128 MiB unless set otherwise, whose float values are kept; others are
            made from their integers whenever their op runs.  ``dataclasses.replace(pair, weight_cache=...)`` sets it.
    """

    reference: GraphModule
    quantized: GraphModule
    names: Mapping[int, OpName]
    quantizer: str = "unknown quantizer"
    model: str = "model"
    float_graph: GraphModule | None = None
    capture: Capture | None = None
    notes: tuple[str, ...] = ()
    recipe: Recipe | None = None
    origin: Origin | None = None
    plugin: QuantizerPlugin | None = None
    weight_cache: int = WEIGHT_CACHE

    def __repr__(self) -> str:
        sites = f"{len(self.sites)} sites in {len(self.regions)} regions"
        return f"<QuantizedPair of {self.model} by {self.quantizer}: {sites}>"

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes of its own graphs what this pair has made of its."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @of_live_graphs
    def program(self) -> Program:
        """The lowered graph that the simulator runs."""
        return lower(self.quantized, self.reference, self.names, self.weight_cache)

    @of_live_graphs
    def simulator(self) -> Simulator:
        """Runs reference and quantized model, together or with any choice of sites."""
        return Simulator(self.program)

    @property
    def converted(self) -> GraphModule:
        """What ``convert_pt2e`` returned, which is lowered; :attr:`quantized` but for :meth:`as_deployed`."""
        return self.quantized if self.origin is None else self.origin.pair.quantized

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every place where a value is quantized."""
        return self.program.sites

    @property
    def regions(self) -> tuple[Region, ...]:
        """The ops that are quantized as one unit, each with the sites around it."""
        return self.program.regions

    @of_live_graphs
    def pairing(self) -> Pairing:
        """Reference ↔ quantized by handle, with everything unpaired and why."""
        return _pair_handles(self)

    @of_live_graphs
    def coverage(self) -> tuple[OpCoverage, ...]:
        """By kind of op, how many the quantizer annotated and how many are quantized."""
        return _coverage(self)

    @of_live_graphs
    def environment(self) -> Environment:
        """Versions and the model's fingerprint, for reports."""
        return Environment.here(fingerprint(self.reference if self.float_graph is None else self.float_graph))

    @of_live_graphs
    def quantization(self) -> str:
        """Identifies how it rounds: a digest of scale, zero point, range and place of every site."""
        values = [(site.kind, site.name, *astuple(site.params)) for site in self.sites]
        return digest_of([value for site in values for value in site])[:16]

    @torch_defaults
    def as_deployed(self, quantizer: Any = None) -> QuantizedPair:
        """This pair with the dynamic scales of the backend's kernels in place of the converted graph's.

        ``convert_pt2e`` computes one scale for the whole input of a dynamic linear or convolution.  Kernels may scale
        each row, pixel or image: ``scale = (max(x, 0) - min(x, 0)) / 255`` of that slice, as XNNPACK's do.  Every
        analysis takes the result, and verifies its simulation against ``result.quantized``, the converted graph with
        these ops in it.  That graph is for analyses only: deploy the pair's own, ``result.converted``.  ``diagnose``,
        ``repair`` and ``reconfigure`` quantize again and measure each result as deployed.

        Args:
            quantizer: the plug-in that knows the kernels, as :func:`pt2qa.quantize` takes it; None for the one that
                made this pair.

        Returns:
            A new pair, or this one where the plug-in declares no such difference, or nothing in it is dynamic.

        Raises:
            PairingError: the pair was made by :func:`pt2qa.pair`, and no quantizer was given.
            PluginError: there is no such quantizer.

        >>> rows = torch.randn(4, 8) * torch.tensor([[0.01], [1.0], [1.0], [100.0]])
        >>> capture = pt2qa.capture(torch.nn.Linear(8, 2).eval(), rows)
        >>> pair = pt2qa.quantize(capture, "xnnpack:mode=dynamic", [rows], progress=False)
        >>> pt2qa.compare_layers(pair.as_deployed(), [rows], progress=False).quantizer
        'xnnpack:mode=dynamic, as deployed'
        """
        if quantizer is None and self.recipe is None:
            raise PairingError(
                f"this pair by {self.quantizer} was made by pt2qa.pair, which does not know the backend: "
                "pass the quantizer of its backend: pair.as_deployed(quantizer)"
            )
        plugin = resolve(quantizer) if quantizer is not None else self.recipe.plugin if self.recipe else None
        inputs = sliced_inputs(self.quantized, plugin)
        if not inputs:
            return self
        quantized, names = with_slices(self.quantized, plugin)
        return replace(
            self,
            quantized=quantized,
            origin=Origin(self, names),
            quantizer=f"{self.quantizer}, as deployed",
            notes=(*notes_without("kernels", self.notes), deployed_note(inputs)),
            plugin=plugin,
        )

    def values(self, batch: Batch) -> list[Any]:
        """A batch as the flat inputs of the simulator.

        Raises:
            BatchError: the batch does not fit what was captured.
        """
        if self.capture is not None:
            self.capture.check_batch(*as_call(batch, self.quantized))
        return flatten_batch(self.quantized, batch)

    @of_live_graphs
    def graphs(self) -> Graphs:
        """Both graphs and the simulator of them, for :class:`~pt2qa._simulator.verification.Verification`."""
        return Graphs(self.quantized, self.reference, self.simulator)

    @torch_defaults
    def verify(self, batch: Batch) -> tuple[str, ...]:
        """Checks on a batch that the simulator computes what the graphs compute.

        With every site on, the outputs must equal those of the converted graph bit for bit.  If the fused ops
        do not, the converted ops replace them.  With every site off, the outputs must equal the reference graph's, to
        rounding if the reference was made elsewhere.

        Returns:
            Notes for the report.

        Raises:
            SimulationError: the outputs differ; the message names the first op where they do.
        """
        check, values = Verification(self.graphs), self.values(batch)
        check.run(functools.partial(simulated, self.simulator, values), values)
        return tuple(check.notes)


@torch_defaults
@exports
def pair(
    reference: GraphModule | ExportedProgram | Capture,
    quantized: GraphModule | ExportedProgram | nn.Module,
    *,
    quantizer: str = "unknown quantizer",
    model: str | None = None,
) -> QuantizedPair:
    """Pairs two graphs that were prepared and converted elsewhere, or a capture and a model of torchao's ``quantize_``.

    Ops are matched by their handles (:func:`pt2qa.capture`, :func:`pt2qa.with_handles`).  Where one of the graphs has
    none, they are matched by what torch notes of where each node comes from (``node.meta["from_node"]``), and where no
    two ops have that in common, by module path, kind of op and ordinal.  ``pair.pairing.unpaired`` lists what has no
    counterpart.

    Args:
        reference: the float graph: the exported program, its ``module()`` or the capture that was quantized, or another
            export of the model.  Batch norms that the quantized graph has folded are folded in a copy.  A prepared
            graph will do: its observers are left out, as torchao's loggers are in both graphs.
        quantized: what ``convert_pt2e`` returned, or a copy or another export of it.  Of torchao's ``quantize_``, the
            model itself, if ``reference`` is the capture of its float model, or its exported program.
        quantizer: the quantizer's name in reports; that of an installed plug-in also says which backend runs the model.
        model: the model's name in reports; None: the capture's, else ``model``.

    Returns:
        The pair, which every analysis takes.

    Raises:
        CaptureError: a model that ``quantize_`` made cannot be exported as the capture was.
        PairingError: the graphs have no op in common, the reference alone was decomposed, nothing is quantized, or
            constants are from another model.

    >>> from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    >>> prepared = prepare_pt2e(capture.module(), pt2qa.OverridePlan(()).apply_to("xnnpack"))
    >>> calibrated = prepared(x)
    >>> pair = pt2qa.pair(capture.module(), convert_pt2e(prepared), quantizer="xnnpack")
    >>> [op.name for op in pair.pairing.pairs]
    ['input', '0/linear']
    """
    float_graph = as_graph_module("reference", reference)
    quantized_graph = _without_foreign_handles(float_graph, as_graph_module("quantized", quantized, reference))
    float_graph, quantized_graph = common_handles("reference", float_graph, "quantized", quantized_graph)
    _check_decomposed(float_graph, quantized_graph)
    _check_is_float(float_graph)
    _check_dequantizes(quantized_graph)
    result = QuantizedPair(
        reference=_as_prepare_leaves_it(float_graph, quantized_graph),
        quantized=quantized_graph,
        names=names_of(float_graph),
        quantizer=quantizer,
        model=model or (reference.model if isinstance(reference, Capture) else "model"),
        float_graph=float_graph,
        plugin=available().get(quantizer.partition(":")[0]),
    )
    _check_constants(result)
    return result


def _forget_what_changed(pair: QuantizedPair) -> None:
    """Drops what was made from graphs that have changed since; the graphs are looked at once in a call."""
    call, made = call_under_way(), vars(pair)
    known, calls = made.get("_looked_at", (None, weakref.WeakSet()))
    if known is not None and (call is None or call in calls):
        return
    deployed = None if pair.origin is None else pair.converted
    graphs = pair.quantized, pair.reference, pair.float_graph, deployed
    now = Contents.of(graph for graph in graphs if graph is not None)
    if known is None or not now.equal(known):
        for name, each in vars(QuantizedPair).items():
            if isinstance(each, of_live_graphs):
                made.pop(name, None)
        known, calls = now, weakref.WeakSet()
    if call is not None:
        calls.add(call)
    made["_looked_at"] = known, calls


def _check_constants(pair: QuantizedPair) -> None:
    """Constants unrelated to the float graph's come from another model."""
    for constant in pair.program.constants:
        # Buffers that the graph writes to, such as counters, differ if one graph ran more often.
        known = isinstance(constant.reference, Tensor) and not constant.mutated
        found = _constant_difference(constant) if known else None
        if found is None or (constant.site is not None and _is_rounded(constant, pair.sites[constant.site])):
            continue
        remedy = "Pass a reference and a quantized graph made from one model."
        what = f"{constant.attribute or 'the constant'} that {constant.reader} reads"
        if constant.site is not None:
            site = pair.sites[constant.site]
            what = f"the quantized {site.kind} of {constant.reader}"
            if site.params.largest_scale == 1.0:
                remedy = (
                    "Its scale is 1.0, as of an observer that saw no value: run batches through the prepared graph "
                    "before convert_pt2e."
                )
        raise PairingError(f"{what} {found}, compared with its float value. {remedy}")


def _is_rounded(constant: Constant, site: Site) -> bool:
    """Whether each value is within half a step of its float value, as a number far below the step is, which becomes 0.

    Of a scale of 1, which observers have that saw no value, that says nothing.
    """
    step = site.params.largest_scale
    off = (constant.quantized.to(constant.reference.dtype) - constant.reference).abs()
    return step != 1.0 and bool((off <= step / 2 * (1 + 1e-5)).all())


def _constant_difference(constant: Constant) -> str | None:
    """How a constant differs from its float value by more than quantization can explain; None if it does not.

    Integers, booleans and the places of NaN and infinities are the same in both graphs.  A constant left in float may
    differ: a bias is corrected, or trained.
    """
    expected = constant.reference
    actual = constant.quantized.to(expected.dtype)
    if constant.site is None and expected.is_floating_point():
        count = int((expected.isfinite() != actual.isfinite()).sum())
        return f"is NaN or infinite at {count} other places" if count else None
    return difference(expected, actual, WEIGHT_MATCH_DB)


def fingerprint(graph_module: GraphModule) -> str:
    """Identifies a float model: SHA-256 over its ops and parameters, the first 16 hex digits."""
    digest = hashlib.sha256()
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            digest.update(str(node.target).encode())
    add_state(digest.update, graph_module)
    return digest.hexdigest()[:16]


def identity_of(pair: QuantizedPair) -> dict[str, Any]:
    """The fields by which a report says what it is about."""
    return {"model": pair.model, "quantizer": pair.quantizer, "environment": pair.environment}


def check_pair(given: Any) -> None:
    if isinstance(given, QuantizedPair):
        return
    if isinstance(given, Capture):
        how = "pair = pt2qa.quantize(capture, quantizer, batches)"
    elif isinstance(given, (GraphModule, ExportedProgram)):
        how = "pair = pt2qa.pair(reference, quantized), of both graphs"
    else:
        how = "pair = pt2qa.quantize(pt2qa.capture(model, example_inputs), quantizer, batches)"
    raise SelectionError(f"got {type(given).__name__}, expected a QuantizedPair. Make one: {how}.")


def as_graph_module(side: str, graph: Any, other: Any = None) -> GraphModule:
    """A user's graph without torchao's loggers; anything else is a PairingError, which calls it by its side.

    A model that ``quantize_`` made is exported like the ``other`` side, if that is a capture.
    """
    if isinstance(graph, ExportedProgram) and other is not None:
        graph = with_tensors(graph)
    elif isinstance(other, Capture) and not isinstance(graph, GraphModule) and subclasses_in(graph):
        graph = export_quantized(other, graph)
    if isinstance(graph, (Capture, ExportedProgram)):
        graph = graph.module()
    refuse_subclasses(graph, PairingError)
    if isinstance(graph, GraphModule):
        return without(graph, is_logger)
    raise PairingError(
        f"the {side} graph is of type {type(graph).__name__}; expected a GraphModule or an ExportedProgram."
        + (" Capture an eager model: pt2qa.capture(model, example_inputs)." if isinstance(graph, nn.Module) else "")
    )


def _without_foreign_handles(reference: GraphModule, quantized: GraphModule) -> GraphModule:
    """The quantized graph, without the handles that it was given when it was quantized already, by quantize_."""
    if any(map(quant_ops.is_quantization, _ops(reference))):
        return quantized  # the model quantizes by itself
    if not any(quant_ops.is_quantization(node) and handle_of(node) is not None for node in _ops(quantized)):
        return quantized
    quantized = copy_nodes(quantized)
    remove_handles(quantized)
    return quantized


def common_handles(
    side: str, known: GraphModule, other_side: str, other: GraphModule
) -> tuple[GraphModule, GraphModule]:
    """Two graphs of one model with the same handles, in copies where they do not have them."""
    graphs = with_common_handles(known, other)
    found, others = ([handle_of(node) for node in _ops(graph)] for graph in graphs)
    if {*found} & {*others} <= {None}:
        raise PairingError(
            f"the {side} and the {other_side} graph have no op in common: none with the same handle, none that goes "
            "back to the same node of an exported program, and none of the same kind in the same module. Expected "
            "graphs of one model."
        )
    return graphs


def _check_decomposed(reference: GraphModule, quantized: GraphModule) -> None:
    """A reference in other ops than the graph that was quantized: its constants would be compared with others."""
    counts = Counter(op_of(node.target) for node in reference.graph.nodes if is_decomposed(node))
    if counts and not any(map(is_decomposed, quantized.graph.nodes)):
        listed = ", ".join(f"{count} {op}" for op, count in counts.items())
        raise PairingError(
            f"the reference graph was decomposed ({listed}), and the quantized graph was not. Pass the program as it "
            "was before run_decompositions() or to_edge(): export, prepare, convert, pair, and decompose after that."
        )


def _check_is_float(reference: GraphModule) -> None:
    """The ops that convert puts in carry no handles, unlike those of a captured model that quantizes by itself."""
    added = [node for node in _ops(reference) if quant_ops.is_quantization(node) and handle_of(node) is None]
    if added:
        raise PairingError(
            f"the reference graph is quantized itself: convert_pt2e put {len(added)} ops into it, {added[0]} first. "
            "Pass the float graph first. Two graphs of which neither is the float one are compared by "
            "pt2qa.compare_graphs(a, b, batches)."
        )


def _check_dequantizes(quantized: GraphModule) -> None:
    """In a reference representation, plain ops read the integers of the weights, and nothing says what they round."""
    for node in _ops(quantized):
        if handle_of(node) is not None or quant_ops.is_quantization(node):
            continue
        for source in node.all_input_nodes:
            value = attribute_of(quantized, source)
            if isinstance(value, Tensor) and value.dtype == torch.int8:
                raise PairingError(
                    f"the quantized graph is a reference representation: {op_of(node.target)} reads the int8 constant "
                    f"{source.target}, not a dequantize op. Pair what convert_pt2e returns without "
                    "use_reference_representation, or what quantize_ makes with a config whose weights are dequantized "
                    "(Intx...); compare any two models with pt2qa.compare_graphs(a, b, batches)."
                )


def nodes_by_handle(graph_module: GraphModule) -> dict[int, list[Node]]:
    """The inputs and ops of a graph, without its quantization; a decomposed op has several nodes."""
    found = {handle: [node] for node, handle in input_handles(graph_module).items()}
    for node in _ops(graph_module):
        handle = handle_of(node)
        if handle is not None and not quant_ops.is_quantization(node):
            found.setdefault(handle, []).append(node)
    return found


def _as_prepare_leaves_it(reference: GraphModule, quantized: GraphModule) -> GraphModule:
    """The reference without observers, and with the batch norms folded that the quantized graph has folded."""
    graph_module = without(reference, is_observer)
    known = nodes_by_handle(quantized)
    folded = any(op_of(node.target) in BATCH_NORMS and handle_of(node) not in known for node in _ops(graph_module))
    return with_folded_norms(graph_module) if folded else graph_module


def _ops(graph_module: GraphModule) -> Iterable[Node]:
    return (node for node in graph_module.graph.nodes if node.op == "call_function")


def _pair_handles(pair: QuantizedPair) -> Pairing:
    reference, quantized = nodes_by_handle(pair.reference), nodes_by_handle(pair.quantized)
    pairs = tuple(
        Paired(
            handle,
            pair.names[handle].name,
            tuple(node.name for node in reference[handle]),
            tuple(node.name for node in quantized[handle]),
        )
        for handle in sorted(reference.keys() & quantized.keys() & set(pair.names))
    )
    float_graph = pair.reference if pair.float_graph is None else pair.float_graph
    original = nodes_by_handle(float_graph)
    unpaired, unexplained = [], []
    for handle, name in sorted(pair.names.items()):
        if handle not in quantized or handle not in reference:
            why = reason_of_absence(original.get(handle, ()), pair.names, quantized, "the quantized graph")
            reason = why or "removed by the quantizer, prepare or convert"
            unpaired.append(Unpaired(handle, name.name, "reference", reason))
            unexplained += unpaired[-1:] if why is None else []
    numberless = [node for node in _ops(float_graph) if handle_of(node) is None and not serves_quantization(node)]
    unpaired += [_nameless(node, "reference", "carries no handle") for node in numberless]
    for node in _ops(pair.quantized):
        if handle_of(node) not in pair.names and not serves_quantization(node):
            alike = bool(numberless) and handle_of(node) is None
            reason = (
                "has no handle, like ops of the reference: it cannot be matched with one of them"
                if alike
                else "put in by the quantizer, prepare or convert: the captured model has no such op"
            )
            unpaired.append(_nameless(node, "quantized", reason))
            unexplained += [] if alike else unpaired[-1:]
    return Pairing(pairs, tuple(unpaired), tuple(unexplained))


def _nameless(node: Node, side: Literal["reference", "quantized"], reason: str) -> Unpaired:
    handle = handle_of(node)
    return Unpaired(-1 if handle is None else handle, f"{op_of(node.target)} ({node.name})", side, reason)


def reason_of_absence(
    nodes: Sequence[Node], names: Mapping[int, OpName], there: Collection[int], other: str
) -> str | None:
    """Why the nodes of a handle are not in the graph ``other``, which has the handles ``there``; None if unknown."""
    if not nodes:
        # Inputs, top-level ops and ops in nested graphs have names; only the first two have nodes.
        return "inside a nested graph: it has no row"
    node = nodes[0]
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    if op_of(node.target) in BATCH_NORMS and source is not None and handle_of(source) in there:
        return f"folded into {name_of(source, names)}, which is compared after it"
    if node.op == "placeholder":
        return f"an input that {other} does not have"
    if not node.users:
        return "nothing reads it"
    if all(source.op != "placeholder" for source in computed_from([node])):
        return "computed from constants alone, once"
    return None


def _coverage(pair: QuantizedPair) -> tuple[OpCoverage, ...]:
    """By kind of op, the most frequent first; ops that the captured model lacks are left out."""
    # An op that was decomposed has several steps and one handle.
    quantizes: dict[int, bool] = {}
    for step, reads in reads_of(pair.program, nested=True):
        if step.handle in pair.names:
            quantizes[step.handle] = quantizes.get(step.handle, False) or is_quantized(step.op, reads)
    ops = (each.node for each in walk(pair.quantized) if each.node.op == "call_function")
    nodes = [(node, handle) for node in ops if (handle := handle_of(node)) in quantizes]
    asked = {handle for node, handle in nodes if annotated_ops([node])}
    known = any(specs_of(node) for node, _ in nodes)
    totals, quantized, annotated = (
        Counter(pair.names[handle].op for handle in handles)
        for handles in (quantizes, (handle for handle, done in quantizes.items() if done), asked)
    )
    return tuple(
        OpCoverage(op, total, annotated[op] if known else -1, quantized[op]) for op, total in totals.most_common()
    )
