"""The values of a model as its ops produce and read them: what a quantizer annotates there, and what is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2qa._annotations.report import AnnotationRow, Role
from pt2qa._graph.handles import OpName, handle_of, walk
from pt2qa._grouping import grouped
from pt2qa._report.prose import few
from pt2qa._simulator.products import arguments_of, constant_role
from pt2qa._simulator.program import Program, QuantParams, Site
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edits import BATCH_NORMS, AnnotatedGraph
from pt2qa.overrides.points import OUTPUT, Derives, GraphNode, Point, SpecFacts, dtype_of, read_nodes, root_of


@dataclass(frozen=True, slots=True)
class AnnotatedValue:
    """A value as one op produces or reads it: the subject of a report's row.

    ``owner`` is the captured op that the op is, or is part of; empty if the capture lacks it.  ``dtype`` is
    that of the float model; ``site`` is None where the converted model does not round the value, or there is none yet.
    The other fields are as in :class:`pt2qa._annotations.report.AnnotationRow`.
    """

    name: str
    op: str
    owner: str
    role: Role
    argument: int
    of: str
    constant: bool
    dtype: str
    site: Site | None = None
    note: str = ""


def values_in_program(
    program: Program, names: Mapping[int, OpName], graphs: Iterable[GraphModule]
) -> Iterator[AnnotatedValue]:
    """The values of a converted model, each with its site; the float graphs tell their dtypes, the last one first."""
    nodes = [node for graph in graphs for node in read_nodes(graph, names).values() if node.dtype]
    dtypes = {node.owner if node.constant else node.name: node.dtype for node in nodes}
    constants = {constant.slot: constant for constant in program.constants}
    of_result = {site.result: site for site in program.sites if site.source != site.result}
    of_source = grouped((site.source, site) for site in of_result.values())
    ops = [
        (step, names[step.handle].name if step.handle in names else "") for step in program.steps if step.site is None
    ]
    float_readers = grouped((slot, step.name) for step, _ in ops for slot in step.reads)

    def made(slot: int, name: str, op: str, owner: str) -> Iterator[AnnotatedValue]:
        """The output of an op, once more for each way of rounding it that no op reads."""
        sites, readers = of_source[slot], float_readers[slot] if of_source[slot] else []
        note = f"read in float by {few(readers)}" if readers else ""
        for site in (*sites[:1], *(other for other in sites[1:] if not other.readers)) or [None]:
            yield AnnotatedValue(name, op, owner, "output", -1, name, False, dtypes.get(name, ""), site, note)

    for slot, name in zip(program.inputs, program.input_names, strict=True):
        yield from made(slot, name, "input", name)
    for step, owner in ops:
        for argument, slot in arguments_of(step):
            constant = constants.get(slot)
            if constant is None:
                of = program.name_of(slot)
                known = dtypes.get(of, ""), of_result.get(slot)
                yield AnnotatedValue(step.name, step.op, owner, "input", argument, of, False, *known)
            elif isinstance(constant.reference, Tensor):
                role = _role(step.op, argument, constant.is_parameter)
                dtype = str(constant.reference.dtype).removeprefix("torch.")
                known = dtype, None if constant.site is None else program.sites[constant.site]
                of = constant.attribute or "a constant"
                yield AnnotatedValue(step.name, step.op, owner, role, argument, of, True, *known)
        yield from made(step.out, step.name, step.op, owner)


def values_in_graph(nodes: Mapping[str, GraphNode], names: Mapping[int, OpName]) -> Iterator[AnnotatedValue]:
    """The values of a float graph; ops on constants alone are left out."""
    ops = {name.name: name.op for name in names.values()}
    for node in nodes.values():
        if node.constant or node.op == OUTPUT:
            continue
        # A program that was saved and loaded has lost the handles of its inputs, not their names.
        owner = node.name if node.op == "input" else node.owner
        op = ops.get(node.owner, node.op)
        for argument, key in node.reads:
            source = nodes[key]
            role = _role(node.op, argument, source.is_parameter) if source.constant else "input"
            if source.dtype or not source.constant:
                yield AnnotatedValue(node.name, op, owner, role, argument, source.name, source.constant, source.dtype)
        yield AnnotatedValue(node.name, op, owner, "output", -1, node.name, False, node.dtype)


def missing_values(
    graph: GraphModule, names: Mapping[int, OpName], present: Iterable[str]
) -> dict[str, AnnotatedValue]:
    """The outputs of the ops of a captured graph that the quantized one lacks, by name, with the reason in ``note``."""
    known, nodes = set(present), read_nodes(graph, names)
    by_name = {node.owner: node for node in nodes.values() if node.owner}
    dtypes = {handle_of(placed.node): dtype_of(placed.node) for placed in walk(graph)}
    found = {}
    for handle, name in names.items():
        if name.name not in known:
            node = by_name.get(name.name)
            note = "inside a nested graph, which is not analysed" if node is None else _reason(node, nodes, known)
            dtype = dtypes.get(handle, "")
            found[name.name] = AnnotatedValue(
                name.name, name.op, name.name, "output", -1, name.name, False, dtype, note=note
            )
    return found


def _role(op: str, argument: int, is_parameter: bool) -> Role:
    role = constant_role(op, argument, is_parameter)
    return "input" if role == "activation" else role


def _reason(node: GraphNode, nodes: Mapping[str, GraphNode], present: set[str]) -> str:
    if node.constant:
        return "computed from constants alone, once"
    before = next((nodes[key].name for key in node.inputs), "")
    if node.op in BATCH_NORMS and before in present:
        return f"folded into {before}"
    return "removed by the quantizer, prepare or convert"


_WITH_LIMITS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
"""The integer types of quantized values whose limits torch knows."""


class SpecResolver:
    """Finds the specs of one model's values; annotations are None if unknown, sites before conversion."""

    def __init__(self, known: Annotations | None, sites: Sequence[Site] | None) -> None:
        nothing = AnnotatedGraph({}, {}, None, "", qat=False)
        self.annotations = annotations = Annotations({}, nothing, {}, frozenset()) if known is None else known
        self.converted = sites is not None
        self.by_site = annotations.points_at(sites or ())
        self.members = grouped((first, point) for point, first in annotations.groups.items())

    def row(self, value: AnnotatedValue, module: str) -> AnnotationRow:
        """What is annotated at a value of an op of a module, and what is done."""
        own = self._own_point(value)
        unmet = value.site is None and own is not None and self.converted
        point = own if unmet else self._point(value, own)
        facts = None if point is None else self.annotations.facts(point)
        params = None if value.site is None else value.site.params
        done: QuantParams | SpecFacts | None = params if params is not None else None if unmet else facts
        shares, group, derived = self._sharing(point if done is not None else None)
        low, high = (0, 0) if done is None else _range(done)
        scheme = "" if params is None else _scheme(params)
        # The kernels' slices are not annotated.
        scheme = scheme if done is None or facts is None or scheme == "per_slice" else facts.scheme
        note = value.note if value.owner else "inserted by the quantizer, prepare or convert"
        refused = f"{facts.dtype} was requested, but the converted model does not round here" if unmet and facts else ""
        return AnnotationRow(
            name=value.name,
            module=module,
            op=value.op,
            role=value.role,
            argument=value.argument,
            of=value.of,
            dtype=value.dtype if done is None else done.dtype,
            scheme=scheme,
            axis=-1 if done is None or done.axis is None else done.axis,
            observer="" if facts is None else facts.observer,
            quant_min=low,
            quant_max=high,
            dynamic=done is not None and done.dynamic,
            scale=nan if params is None else params.largest_scale,
            zero_point=nan if params is None else params.single_zero_point,
            shares=shares,
            annotated=own is not None,
            quantized=done is not None,
            site=-1 if value.site is None else value.site.index,
            note="; ".join(filter(None, (note, refused, derived))),
            options="" if facts is None else facts.options,
            group=group,
        )

    def _own_point(self, value: AnnotatedValue) -> Point | None:
        """The point that annotates a rounded value at exactly this place."""
        (values, constants), nodes = self.annotations.points_by_name, self.annotations.graph.nodes
        if value.constant:
            found = (point for argument, point in constants.get(value.name, ()) if argument == value.argument)
            return next(found, None)
        points = values.get(value.of, ())
        if value.role == "output":
            return next((point for point in points if not point[1] or nodes[point[1]].op == OUTPUT), None)
        return next((point for point in points if point[1] and nodes[point[1]].name == value.name), None)

    def _point(self, value: AnnotatedValue, own: Point | None) -> Point | None:
        """The point that says how a value is rounded: its own, or another reader's."""
        if value.site is not None:
            points = self.by_site.get(value.site.index, ())
            return own if own in points else next(iter(points), None)
        if own is not None or value.constant:
            return own
        asked = self.annotations.points_by_name[0].get(value.of, ())
        # A value is rounded for all readers if its producer asks for it, else for those that do.
        return next((point for point in asked if value.role == "output" or not point[1]), None)

    def _sharing(self, point: Point | None) -> tuple[str, str, str]:
        """The other values that share its scale, the first of them if that is another one, and what derives it."""
        if point is None:
            return "", "", ""
        name_of, own = self.annotations.value_name, self.annotations.value_name(point)
        values = list(dict.fromkeys(map(name_of, self.members[self.annotations.groups[point]])))
        root = root_of(self.annotations.specs, point)
        spec = None if root is None else self.annotations.specs[root]
        sources = few(list(map(name_of, spec.points))) if isinstance(spec, Derives) else ""
        derived = f"its scale is derived from those of {sources}" if sources else ""
        return few([name for name in values if name != own]), values[0] if values[0] != own else "", derived


def _scheme(params: QuantParams) -> str:
    """What a converted graph alone says about the scheme: where scales are integers' zeros, affine looks symmetric."""
    if params.axis is not None:
        return "per_channel"
    if params.slice_axes:
        return "per_slice"
    several = isinstance(params.scale, torch.Tensor) and params.scale.numel() > 1
    return "per_group" if several else "per_tensor" if params.dtype != "float16" else ""


def _range(done: QuantParams | SpecFacts) -> tuple[int, int]:
    """The integer range; the dtype's if the spec leaves it to the observer."""
    if done.quant_min is not None and done.quant_max is not None:
        return done.quant_min, done.quant_max
    dtype = getattr(torch, done.dtype, None)
    if dtype not in _WITH_LIMITS:
        return 0, 0
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
