"""The values of a model as its ops produce and read them, in a converted program or in a float graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from pt2qa._annotations.rows import Role
from pt2qa._graph.handles import OpName, handle_of, walk
from pt2qa._report.prose import few
from pt2qa._simulator.products import arguments_of, constant_role
from pt2qa._simulator.program import Constant, Program, Site, Step
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import OUTPUT, GraphNode, dtype_of, read_nodes


@dataclass(frozen=True, slots=True)
class AnnotatedValue:
    """A value as one op produces or reads it: the subject of a report's row.

    ``owner`` is the captured op that the op is, or is part of; empty if the capture lacks it.  ``dtype`` is
    that of the float model; ``site`` is None where the converted model does not round the value, or there is none yet.
    The other fields are as in :class:`pt2qa._annotations.rows.AnnotationRow`.
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
    program: Program, names: Mapping[int, OpName], dtypes: Mapping[str, str]
) -> Iterator[AnnotatedValue]:
    """The values of a converted model, each with its site; ``dtypes`` are those of :func:`value_dtypes`."""
    slots = _Slots(program, dtypes)
    for slot, name in zip(program.inputs, program.input_names, strict=True):
        yield from slots.made(slot, name, "input", name)
    for step in program.steps:
        if step.site is None:
            owner = names[step.handle].name if step.handle in names else ""
            yield from slots.read(step, owner)
            yield from slots.made(step.out, step.name, step.op, owner)


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


def value_dtypes(graph: GraphModule, names: Mapping[int, OpName]) -> dict[str, str]:
    """The dtype of each value of a graph by the name of the op or input that produces it."""
    nodes = read_nodes(graph, names).values()
    return {node.owner if node.constant else node.name: node.dtype for node in nodes if node.dtype}


class _Slots:
    """What the slots of a program hold."""

    def __init__(self, program: Program, dtypes: Mapping[str, str]) -> None:
        self.dtypes = dtypes
        self.constants: dict[int, Constant] = {constant.slot: constant for constant in program.constants}
        self.names = dict(zip(program.inputs, program.input_names, strict=True))
        self.names |= {step.out: step.name for step in program.steps}
        self.of_result = {site.result: site for site in program.sites if site.source != site.result}
        self.of_source: dict[int, list[Site]] = defaultdict(list)
        for site in self.of_result.values():
            self.of_source[site.source].append(site)
        self.sites = program.sites
        self.float_readers: dict[int, list[str]] = defaultdict(list)
        for step in program.steps:
            for slot in step.reads if step.site is None else ():
                self.float_readers[slot].append(step.name)

    def read(self, step: Step, owner: str) -> Iterator[AnnotatedValue]:
        """The arguments of an op."""
        for argument, slot in arguments_of(step):
            constant = self.constants.get(slot)
            if constant is None:
                of = self.names[slot]
                dtype, site = self.dtypes.get(of, ""), self.of_result.get(slot)
                yield AnnotatedValue(step.name, step.op, owner, "input", argument, of, False, dtype, site)
            elif isinstance(constant.reference, Tensor):
                yield AnnotatedValue(
                    step.name,
                    step.op,
                    owner,
                    _role(step.op, argument, constant.is_parameter),
                    argument,
                    constant.attribute or "a constant",
                    True,
                    str(constant.reference.dtype).removeprefix("torch."),
                    None if constant.site is None else self.sites[constant.site],
                )

    def made(self, slot: int, name: str, op: str, owner: str) -> Iterator[AnnotatedValue]:
        """The output of an op, once more for each way of rounding it that no op reads."""
        sites = self.of_source[slot]
        dtype = self.dtypes.get(name, "")
        if not sites:
            yield AnnotatedValue(name, op, owner, "output", -1, name, False, dtype)
            return
        readers = self.float_readers[slot]
        note = f"read in float by {few(readers)}" if readers else ""
        for site in (sites[0], *(other for other in sites[1:] if not other.readers)):
            yield AnnotatedValue(name, op, owner, "output", -1, name, False, dtype, site, note)


def _role(op: str, argument: int, is_parameter: bool) -> Role:
    role = constant_role(op, argument, is_parameter)
    return "input" if role == "activation" else role


def _reason(node: GraphNode, nodes: Mapping[str, GraphNode], present: set[str]) -> str:
    """Why an op of the captured graph is not in the quantized graph."""
    if node.constant:
        return "computed from constants alone, once"
    before = next((nodes[key].name for key in node.inputs), "")
    if node.op in BATCH_NORMS and before in present:
        return f"folded into {before}"
    return "removed by the quantizer, prepare or convert"
