"""What is profiled: the graph of a pair, of a capture, or any other, with names for its ops."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.program import Capture
from pt2qa._graph.handles import OpName, handle_of, module_of, names_of, op_of, part_name, parts_of
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa._quantize.pairing import QuantizedPair, fingerprint
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import DataHealth, SetApart
from pt2qa._simulator import quant_ops
from pt2qa._simulator.batches import Batch, as_call, count_samples, flatten_batch
from pt2qa._simulator.input_ranges import input_ranges
from pt2qa._simulator.nonfinite import sample_of
from pt2qa._simulator.positions import Inside
from pt2qa._simulator.program import Program
from pt2qa.errors import CaptureError, SelectionError

Side = Literal["reference", "quantized", "deployed"]


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """A graph to profile, and what a report says about it.

    Attributes:
        values: maps a batch to the flat inputs of the graph; raises a BatchError if it does not fit.
        floats: the float graph that names the parameters of a quantized one; else the graph itself.
        program: the lowered pair, whose sites have the calibrated ranges; None for a graph.
    """

    graph: GraphModule
    names: Mapping[Node, OpName]
    values: Callable[[Batch], list[Any]]
    side: str
    floats: GraphModule
    quantizer: str
    model: str
    notes: tuple[str, ...]
    environment: Environment
    program: Program | None = None


def target_of(given: Any, side: Side | None) -> ProfileTarget:
    """The graph that a user means: a captured, prepared or converted one, or a side of a pair (None: its reference).

    Raises a CaptureError for anything else, and a SelectionError if there is no such side.
    """
    if side not in (None, "reference", "quantized", "deployed"):
        raise SelectionError(f"side: got {side!r}, expected 'reference', 'quantized' or 'deployed'")
    if isinstance(given, QuantizedPair):
        graph = given.reference if side in (None, "reference") else given.quantized
        return ProfileTarget(
            graph=graph,
            names=node_names(graph, given.names),
            values=given.values,
            side=side or "reference",
            floats=given.reference,
            quantizer=given.quantizer,
            model=given.model,
            notes=given.notes,
            environment=given.environment,
            program=given.program,
        )
    if side is not None:
        raise SelectionError(f"side: got {side!r}, but a {type(given).__name__} has no sides; give a QuantizedPair")
    notes: tuple[str, ...] = ()
    if isinstance(given, Capture):
        graph, names, kind, model = given.module(), given.names, "float", given.model
        values = _checked(given, graph)
        notes = (f"not profiled, inside nested graphs: {len(given.unanalysed)} ops",) if given.unanalysed else ()
    elif isinstance(given, (ExportedProgram, GraphModule)):
        refuse_subclasses(given)
        graph = given.module(check_guards=False) if isinstance(given, ExportedProgram) else given
        names, kind, model = names_of(graph), "graph", type(graph).__name__
        values = functools.partial(flatten_batch, graph)
    else:
        what = "an eager module" if isinstance(given, nn.Module) else "not a graph"
        raise CaptureError(
            f"got a {type(given).__name__}, which is {what}; expected a QuantizedPair, a Capture or a GraphModule. "
            "Capture a model first: pt2qa.profile(pt2qa.capture(model, example_inputs), batches)."
        )
    environment = Environment.here(fingerprint(graph))
    return ProfileTarget(graph, node_names(graph, names), values, kind, graph, "", model, notes, environment)


def _checked(capture: Capture, graph: GraphModule) -> Callable[[Batch], list[Any]]:
    def values(batch: Batch) -> list[Any]:
        capture.check_batch(*as_call(batch, graph))
        return flatten_batch(graph, batch)

    return values


def health_of(target: ProfileTarget, number: int, values: Sequence[Any], inside: Inside | None) -> DataHealth:
    """The health of one batch: whether an input has NaN, and for a pair, what lies outside the ranges of its sites.

    Integers have no NaN, so a quantized graph shows none behind its inputs.
    """
    nodes, samples = target.graph.graph.find_nodes(op="placeholder"), count_samples(list(values))
    faults = (
        SetApart(number, samples, sample_of(value.isnan(), samples), "batch", "NaN", target.names[node].name)
        for node, value in zip(nodes, values, strict=True)
        if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1 and bool(value.isnan().any())
    )
    apart = tuple(itertools.islice(faults, 1))
    if apart or target.program is None:
        return DataHealth(1, samples, apart)
    if inside is not None:
        values = [inside.of(node.name, value) for node, value in zip(nodes, values, strict=True)]
    return DataHealth(1, samples, (), input_ranges(target.program, values))


def node_names(graph: GraphModule, known: Mapping[int, OpName]) -> dict[Node, OpName]:
    """A name for every input and op of a graph: by its handle, and in the same style for nodes without one."""
    found: dict[Node, OpName] = {}
    parts = parts_of(graph.graph)
    taken = {name.name for name in known.values()}
    for node in graph.graph.nodes:
        if node.op in ("get_attr", "output") or quant_ops.is_quantization(node):
            continue
        handle = handle_of(node)
        if handle is not None and handle in known:
            name, number = known[handle], parts.get(node, 0)
            found[node] = replace(name, name=part_name(name.name, node, number)) if number else name
        else:
            found[node] = _unknown(node, found, taken)
            taken.add(found[node].name)
    return found


def _unknown(node: Node, found: Mapping[Node, OpName], taken: set[str]) -> OpName:
    module, kind = module_of(node)
    op = "input" if node.op == "placeholder" else op_of(node.target)
    stem = str(node.target) if node.op == "placeholder" else f"{module}/{op}" if module else op
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, Node) and source in found:
        stem, module, kind = f"{found[source].name}[{node.args[1]}]", found[source].module, found[source].module_type
    name, ordinal = stem, 0
    while name in taken:
        ordinal += 1
        name = f"{stem}_{ordinal}"
    return OpName(name, module, kind, op)
