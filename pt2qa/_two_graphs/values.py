"""Which values of two graphs are compared, and what of each graph has no counterpart.

An op is the same in both graphs if it carries the same handle.

- *Parts.*  A decomposed op hands its handle to all its parts.  The value of the op is that of its last part with the
  shape and dtype that the other graph has; a batch norm that the other graph has folded is a part of the op before it.
- *Where a value is read.*  Ops without a handle that stand between an op and its readers, such as quantize and
  dequantize, belong to the op: what is compared is what an op with a handle reads, in both graphs the same reader.
  So a rounded value is compared after dequantize (``dq``) where both graphs round it, and with the plain value where
  only one does.  If the graphs have no reader in common, the values that the ops compute are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, attribute_of, module_of, names_of, op_of, output_handle
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree
from pt2qa._quantize.pairing import nodes_by_handle, reason_of_absence
from pt2qa._report.prose import counted
from pt2qa._report.rows import Unpaired
from pt2qa._simulator import quant_ops
from pt2qa._simulator.program import QuantParams
from pt2qa._simulator.quant_ops import serves_quantization
from pt2qa.overrides.edits import BATCH_NORMS

Letter = Literal["a", "b"]

REMOVED: Final = "no op of the other graph has its handle: it was removed or replaced"
"""Why an op has no counterpart, if nothing better is known."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A value that both graphs have.

    Attributes:
        handle, name: of the op that computes it.
        a, b: the nodes with the value.
        read: whether ops without a handle come between the op and the value, in either graph.
        params: how it is rounded; None if it is not.
        note: what is special.
    """

    handle: int
    name: OpName
    a: Node
    b: Node
    read: bool
    params: QuantParams | None
    note: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The values that are compared, in the order of graph a, and all ops that have no counterpart.

    ``lost`` are the handles of those of which no reason is known.
    """

    values: tuple[Compared, ...]
    unpaired: tuple[Unpaired, ...]
    lost: tuple[int, ...]
    notes: tuple[str, ...]


class _Ops:
    """The ops of one graph by handle, and what their readers read."""

    def __init__(self, letter: Letter, graph: GraphModule) -> None:
        self.letter, self.graph, self.names = letter, graph, names_of(graph)
        self.parts = nodes_by_handle(graph)
        for node in graph.graph.nodes:
            if (handle := output_handle(node)) is not None and node not in self.parts.get(handle, ()):
                self.parts.setdefault(handle, []).append(node)
        self.handles = {node: handle for handle, nodes in self.parts.items() for node in nodes}
        self.kinds = {op_of(node.target) for node in self.handles}
        self.order = {node: number for number, node in enumerate(graph.graph.nodes)}
        self.first = self._firsts()

    def _firsts(self) -> dict[Node, Node]:
        """For each op without a handle, the first one that does the same: convert dequantizes for each reader anew."""
        firsts: dict[Node, Node] = {}
        known: dict[str, Node] = {}
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and node not in self.handles:
                args = torch.fx.map_arg((node.args, node.kwargs), lambda each: firsts.get(each, each))
                firsts[node] = known.setdefault(f"{node.target} {args}", node)
        return firsts

    def take_in_folded(self, other: _Ops) -> None:
        """Makes batch norms that the other graph has folded parts of the op before them."""
        for handle, nodes in list(self.parts.items()):
            source = nodes[0].args[0] if nodes[0].args else None
            into = self.handles.get(source) if isinstance(source, Node) else None
            if op_of(nodes[0].target) in BATCH_NORMS and handle not in other.parts and into is not None:
                self.parts[into] = [*self.parts[into], *self.parts.pop(handle)]
                self.handles |= dict.fromkeys(nodes, into)

    def read(self, node: Node) -> dict[int | None, Node]:
        """By handle of the reader, None for the output, the first node that it reads this value from."""
        found: dict[int | None, Node] = {}
        waiting, seen = [node], {node}
        while waiting:
            source = waiting.pop()
            for user in source.users:
                reader = self.handles.get(user)
                if user.op == "output" or (reader is not None and reader != self.handles[node]):
                    found[reader] = min(source, found.get(reader, source), key=self.order.__getitem__)
                elif reader is None and user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return {reader: self.first.get(source, source) for reader, source in found.items()}

    def params(self, node: Node) -> QuantParams | None:
        """How a dequantize node rounds; None for any other."""
        if not quant_ops.is_dequantize(node):
            return None
        return quant_ops.read_params(node, lambda each: attribute_of(self.graph, each))

    def note(self, handle: int, part: Node, read: Node) -> Iterator[str]:
        if len(self.parts[handle]) > 1:
            yield f"{len(self.parts[handle])} ops in {self.letter}, compared after {op_of(part.target)}"
        if read is not part and not quant_ops.is_quantization(read):
            yield f"read in {self.letter} after {op_of(read.target)}, which has no handle"


def plan_values(a: GraphModule, b: GraphModule) -> Plan:
    left, right = _Ops("a", a), _Ops("b", b)
    # Names count the ops of a kind, and parts of decomposed ops would count as well.
    whole, other = sorted((left, right), key=lambda ops: len(ops.handles) - len(ops.parts))
    names = {**other.names, **whole.names}
    lost: list[int] = []
    unpaired = [*_absent(left, right, names, lost), *_absent(right, left, names, lost)]
    left.take_in_folded(right)
    right.take_in_folded(left)
    values: list[Compared] = []
    others: list[str] = []
    notes: list[str] = []
    for handle in sorted(left.parts.keys() & right.parts.keys()):
        if _is_one_op(left, right, handle):
            values += _compared(left, right, handle, names[handle])
        else:
            unpaired += [_other_op(left, right, handle), _other_op(right, left, handle)]
            others.append(left.names[handle].name)
    values.sort(key=lambda value: (left.order[value.a], right.order[value.b]))
    if others:
        notes.append(
            f"{counted(len(others), 'handle')} of different ops in the two graphs, {others[0]} first: they were not "
            "made from the same capture, so rows may compare unrelated ops"
        )
    return Plan(tuple(values), tuple(unpaired), tuple(lost), tuple(notes))


def _is_one_op(left: _Ops, right: _Ops, handle: int) -> bool:
    """Whether a handle means one op in both graphs.

    It does not if modules differ, or if each graph has ops of both kinds: an op that was lowered to another kind leaves
    none of its own behind.
    """
    one, other = left.parts[handle][0], right.parts[handle][0]
    if len({module_of(one)[0], module_of(other)[0]} - {""}) > 1:
        return False
    kinds = {op_of(one.target), op_of(other.target)}
    whole = len(left.parts[handle]) == len(right.parts[handle]) == 1
    return not (whole and len(kinds) == 2 and kinds <= left.kinds & right.kinds)


def _compared(left: _Ops, right: _Ops, handle: int, name: OpName) -> Iterator[Compared]:
    """The values of an op: one for each way in which it is read."""
    part_a, part_b = _alike(left.parts[handle], right.parts[handle])
    reads_a, reads_b = left.read(part_a), right.read(part_b)
    shared = [reader for reader in reads_a if reader in reads_b]
    kinds = (op_of(part_a.target), op_of(part_b.target))
    whole = len(left.parts[handle]) == len(right.parts[handle]) == 1
    read = dict.fromkeys((reads_a[reader], reads_b[reader]) for reader in shared)
    for a, b in read or {(part_a, part_b): None}:
        if a.op == b.op == "placeholder":
            continue
        notes = [*left.note(handle, part_a, a), *right.note(handle, part_b, b)]
        if whole and kinds[0] != kinds[1]:
            notes.append(f"{kinds[0]} in a, {kinds[1]} in b")
        params, other = left.params(a), right.params(b)
        if params is not None and other is not None and _said(params) != _said(other):
            notes.append(f"rounded to {_said(params)} in a, to {_said(other)} in b")
        params = other if params is None else params
        yield Compared(handle, name, a, b, (a, b) != (part_a, part_b), params, "; ".join(notes))


def _alike(a: Sequence[Node], b: Sequence[Node]) -> tuple[Node, Node]:
    """The last parts of an op in both graphs whose values have one shape and dtype; else the last of each."""
    fitting = ((one, other) for one in reversed(a) for other in reversed(b) if _kind(one) == _kind(other))
    return next(fitting, (a[-1], b[-1]))


def _kind(node: Node) -> list[Any]:
    """Shapes and dtypes of the values that a node computes, as recorded; a size that varies is None."""
    return [
        (leaf.dtype, [size if isinstance(size, int) else None for size in leaf.shape])
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in pytree.tree_leaves(node.meta.get(VALUE))
    ]


def _said(params: QuantParams) -> str:
    scale = "each batch's scale" if params.dynamic else f"scale {params.largest_scale:.6g}"
    return f"{params.dtype} {params.quant_min}..{params.quant_max}, {scale}, zero point {params.single_zero_point:g}"


def _absent(ops: _Ops, other: _Ops, names: Mapping[int, OpName], lost: list[int]) -> Iterator[Unpaired]:
    """The ops of a graph without a counterpart in the other one, each with the reason; ``lost`` gets those without."""
    for handle in sorted(ops.names):
        if handle not in ops.parts or handle not in other.parts:
            reason = reason_of_absence(ops.parts.get(handle, ()), names, other.parts, "the other graph")
            lost += [] if reason else [handle]
            yield Unpaired(handle, names[handle].name, ops.letter, reason or REMOVED)
    for node in ops.graph.graph.nodes:
        if node.op == "call_function" and node not in ops.handles and not serves_quantization(node):
            reason = "has no handle, so it cannot be matched to an op of the other graph"
            yield Unpaired(-1, f"{op_of(node.target)} ({node.name})", ops.letter, reason)


def _other_op(ops: _Ops, other: _Ops, handle: int) -> Unpaired:
    reason = f"its handle is that of {other.names[handle].name} in the other graph, a different op"
    return Unpaired(handle, ops.names[handle].name, ops.letter, reason)
