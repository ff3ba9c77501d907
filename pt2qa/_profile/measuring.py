"""What is profiled, with names for its ops, and the statistics of its values over all batches."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.program import Capture
from pt2qa._graph.handles import OpName, handle_of, module_of, names_of, op_of, part_name, parts_of
from pt2qa._graph.subclasses import refuse_subclasses
from pt2qa._profile.plan import Plan
from pt2qa._profile.report import Profile, ProfileRow
from pt2qa._profile.values import ValueStatistics, Wanted, described_by, numbers_of, packed_values
from pt2qa._quantize.pairing import QuantizedPair, fingerprint, identity_of
from pt2qa._report.prose import counted, few
from pt2qa._report.rows import Environment
from pt2qa._report.set_apart import DataHealth, SetApart, as_fields
from pt2qa._report.sums import EACH, MERGED, Mergeable
from pt2qa._simulator import quant_ops
from pt2qa._simulator.accumulate import empty_batch, input_ranges, is_empty, refuse_empty, sample_of
from pt2qa._simulator.batches import Batch, as_call, count_samples, flatten_batch, has_no_element
from pt2qa._simulator.data import Axes, Inside, Mask, without_axes
from pt2qa._simulator.lifetimes import UNWRITTEN
from pt2qa._simulator.program import Program
from pt2qa.errors import CaptureError, SelectionError

Side = Literal["reference", "quantized", "deployed"]


@dataclass(frozen=True, slots=True)
class ProfileTarget:
    """A graph to profile, and what a report says about it.

    Attributes:
        values: maps a batch to the flat inputs of the graph; raises a BatchError if it does not fit.
        floats: the float graph that names the parameters of a quantized one; else the graph itself.
        facts: the side, quantizer, model and environment, as fields of the report.
        program: the lowered pair, whose sites have the calibrated ranges; None for a graph.
    """

    graph: GraphModule
    names: Mapping[Node, OpName]
    values: Callable[[Batch], list[Any]]
    floats: GraphModule
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    program: Program | None = None


def target_of(given: Any, side: Side | None) -> ProfileTarget:
    """The graph that a user means: a captured, prepared or converted one, or a side of a pair (None: its reference).

    Raises a CaptureError for anything else, and a SelectionError if there is no such side.
    """
    if side not in (None, "reference", "quantized", "deployed"):
        raise SelectionError(f"side: got {side!r}, expected 'reference', 'quantized' or 'deployed'")
    if isinstance(given, QuantizedPair):
        graph = given.reference if side in (None, "reference") else given.quantized
        names, facts = node_names(graph, given.names), {"side": side or "reference", **identity_of(given)}
        return ProfileTarget(graph, names, given.values, given.reference, given.notes, facts, given.program)
    if side is not None:
        raise SelectionError(f"side: got {side!r}, but {type(given).__name__} has no sides; give a QuantizedPair")
    notes: tuple[str, ...] = ()
    if isinstance(given, Capture):
        graph, known, kind, model = given.module(), given.names, "float", given.model
        values = _checked(given, graph)
        notes = (f"not profiled, inside nested graphs: {len(given.unanalysed)} ops",) if given.unanalysed else ()
    elif isinstance(given, (ExportedProgram, GraphModule)):
        refuse_subclasses(given)
        graph = given.module(check_guards=False) if isinstance(given, ExportedProgram) else given
        known, kind, model = names_of(graph), "graph", type(graph).__name__
        values = functools.partial(flatten_batch, graph)
    else:
        what = "an eager module" if isinstance(given, nn.Module) else "not a graph"
        raise CaptureError(
            f"got {type(given).__name__}, which is {what}; expected a QuantizedPair, a Capture or a GraphModule. "
            "Capture a model first: pt2qa.profile(pt2qa.capture(model, example_inputs), batches)."
        )
    facts = {"side": kind, "quantizer": "", "model": model, "environment": Environment.here(fingerprint(graph))}
    return ProfileTarget(graph, node_names(graph, known), values, graph, notes, facts)


def _checked(capture: Capture, graph: GraphModule) -> Callable[[Batch], list[Any]]:
    def values(batch: Batch) -> list[Any]:
        capture.check_batch(*as_call(batch, graph))
        return flatten_batch(graph, batch)

    return values


def health_of(target: ProfileTarget, number: int, values: Sequence[Any], inside: Inside) -> DataHealth:
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


@dataclass(frozen=True, slots=True)
class _Done(Mergeable):
    """By value number what was seen; ``with_nan`` and ``changed`` are numbers of batches, from 0."""

    seen: Mapping[int, ValueStatistics] = field(default_factory=dict, metadata=EACH)
    health: DataHealth = field(default_factory=lambda: DataHealth(0, 0), metadata=MERGED)
    with_nan: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()


class Measurements:
    """The statistics of a plan's values over all batches; a batch that is interrupted counts in none of them."""

    def __init__(self, target: ProfileTarget, plan: Plan, wanted: Wanted, mask: Mask | None) -> None:
        self.target, self.plan = target, plan
        self.axes = Axes(target.graph, mask)
        self.wanted = replace(wanted, mask=self.axes.settings.get("mask", ""))
        self._done = _Done()

    @property
    def seen(self) -> Mapping[int, ValueStatistics]:
        return self._done.seen

    @property
    def batches(self) -> int:
        return self._done.health.batches

    @property
    def samples(self) -> int:
        return self._done.health.samples

    def takes_empty(self, values: Sequence[Any]) -> bool:
        """Whether a batch has no element; it is counted then, and need not run."""
        empty = has_no_element(values)
        if empty:
            self.take(values, {}, None, Inside(None, {}))
        return empty

    def take(
        self,
        values: Sequence[Any],
        found: Mapping[int, ValueStatistics],
        outputs: Any,
        inside: Inside,
        *,
        changed: bool = False,
    ) -> None:
        """Adds what was found on a batch; ``changed``: observing changed the outputs."""
        number, samples = self.batches, count_samples(list(values))
        if has_no_element(values) or is_empty(samples, outputs):
            health = DataHealth(1, samples, (empty_batch(number),))
        else:
            health = health_of(self.target, number, values, inside)
        has_nan = any(each.statistics.nans for key, each in found.items() if not self.plan.values[key].constant)
        self._done = self._done.merge(_Done(found, health, (number,) * has_nan, (number,) * changed))

    def profile(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> Profile:
        """The report.  Values that are not tensors, such as sizes, have no rows."""
        seen, health = self.seen, self._done.health
        refuse_empty(self.batches, health.set_apart)
        numbers = {number: position for position, number in enumerate(sorted(seen))}
        described = {number: described_by(self.plan.values[number], seen[number]) for number in numbers}
        rows = tuple(
            ProfileRow(
                **{**asdict(place), "value": numbers[place.value]},
                **numbers_of(described[place.value], seen[place.value]),
            )
            for place in self.plan.places
            if place.value in seen
        )
        said = (*self.target.notes, *self._not_measured(), *before, *self.notes(), *after)
        return Profile(
            rows=rows,
            **packed_values(list(described.values()), [seen[number] for number in numbers], self.wanted),
            **self.target.facts,
            **as_fields(health),
            notes=tuple(dict.fromkeys(said)),
        )

    def _not_measured(self) -> Iterator[str]:
        for place in self.plan.places:
            if place.value in self.seen and self.seen[place.value].is_uneven:
                yield f"{place.name}: no numbers by channel, batches differ in the channel axis"
        if self.plan.unwritten:
            yield f"not measured, {UNWRITTEN}: {few(self.plan.unwritten)}"

    def notes(self) -> Iterator[str]:
        if self.axes.layouts is not None:
            yield from self._about_mask(self.axes.layouts)
        total = counted(self.batches, "batch", "batches")
        unusable = "no values, because observing changed the program's outputs,"
        for what, found in (("NaN", self._done.with_nan), (unusable, self._done.changed)):
            if found:
                yield f"{what} in {len(found)} of {total}: {few([f'batch {number}' for number in found])}"

    def _about_mask(self, known: Mapping[str, Any]) -> Iterator[str]:
        values = self.plan.values
        names = {n: name for n, name in self.plan.names.items() if n in self.seen and not values[n].constant}
        masked = {number for number in names if known.get(values[number].node.name) is not None}
        yield from without_axes([name for number, name in names.items() if number not in masked], len(names))
        along = [
            name
            for number, name in names.items()
            if number in masked and self.seen[number].channels is None and len(self.seen[number].shape) > 1
        ]
        if along and self.wanted.per_channel:
            yield f"no numbers by channel, the channels are samples or positions: {few(along, 3)}"
