"""What to look at in a graph: what ops really read, each value once, and the rows that show it at its ops."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, written_by
from pt2qa._graph.handles import OpName, attribute_of, handle_of, op_of, source_line
from pt2qa._graph.internals.nodes import calls_guards
from pt2qa._graph.internals.torch import arguments_of
from pt2qa._graph.internals.torchao import is_observer, rounds_now
from pt2qa._profile.report import Role, ValueRow
from pt2qa._report.selection import OpKind, select
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.batches import written_buffers
from pt2qa._simulator.lifetimes import unwritten_values
from pt2qa._simulator.program import QuantParams


@dataclass(frozen=True, slots=True)
class ReadValue:
    """A value as an op reads it; ``quantize`` is the node that quantizes it, None if none does."""

    node: Node
    quantize: Node | None = None
    params: QuantParams | None = None


class Sites:
    """The quantize-dequantize pairs, fake-quantize modules and observers of a graph.

    A value quantized in one way for several readers is one value, however many nodes quantize it.
    """

    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._modules = dict(graph.named_modules(remove_duplicate=False))
        self._first: dict[tuple[Any, ...], Node] = {}
        for node in graph.graph.nodes:
            if quant_ops.is_dequantize(node):
                self._first.setdefault(self._identity(node), node)

    def module_of(self, node: Node) -> nn.Module | None:
        return self._modules.get(str(node.target)) if node.op == "call_module" else None

    def is_observer(self, node: Node) -> bool:
        return is_observer(self.module_of(node))

    def fake_quantizes(self, node: Node) -> bool:
        """Whether a node calls a fake-quantize module that is switched on."""
        return rounds_now(self.module_of(node))

    def behind_observers(self, node: Node) -> Node:
        """The node that produces an argument: observers pass on their input."""
        while self.is_observer(node) and not self.fake_quantizes(node):
            node = _source(node)
        return node

    def read(self, node: Node) -> ReadValue:
        node = self.behind_observers(node)
        if self.fake_quantizes(node):
            return ReadValue(node, node, _params_of(self.module_of(node)))
        if quant_ops.is_dequantize(node):
            node = self._first[self._identity(node)]
            quantize = _source(node)
            is_pair = quant_ops.is_quantize(quantize)
            params = quant_ops.read_params(quantize if is_pair else node, lambda each: attribute_of(self._graph, each))
            return ReadValue(node, quantize if is_pair else None, params)
        return ReadValue(node)

    def readings(self, node: Node) -> list[ReadValue]:
        """The ways in which an op's result is quantized for its readers; the result itself if it is not."""
        found: dict[Node, ReadValue] = {}
        waiting = [(node, user) for user in node.users]
        while waiting:
            source, user = waiting.pop(0)
            reads_it = bool(user.args) and user.args[0] is source
            if reads_it and (quant_ops.is_dequantize(user) or self.fake_quantizes(user)):
                read = self.read(user)
                found.setdefault(read.node, read)
            elif reads_it and (quant_ops.is_quantize(user) or self.is_observer(user)):
                waiting += [(user, reader) for reader in user.users]
        return list(found.values()) or [ReadValue(node)]

    def _identity(self, node: Node) -> tuple[Any, ...]:
        """What two dequantize nodes of one value have in common."""
        integers = _source(node)
        if not quant_ops.is_quantize(integers):
            return integers, None, str(node.args[1:])
        return _source(integers), integers.target, str(integers.args[1:]), str(node.args[1:])


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _params_of(module: Any) -> QuantParams:
    single = module.scale.numel() == 1
    return QuantParams(
        dtype=str(module.dtype).removeprefix("torch."),
        scale=float(module.scale) if single else module.scale.detach(),
        zero_point=int(module.zero_point) if single else module.zero_point.detach(),
        quant_min=int(module.quant_min),
        quant_max=int(module.quant_max),
        axis=None if single else int(module.ch_axis),
    )


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is measured once per batch, or only once if no batch changes it.

    Attributes:
        node: what produces it.
        reader: the op before which it is measured, because something has written to it since it was produced; None if
            it is measured as soon as it is produced.
        quantize, params: the node that quantizes it, and how; None if none does.
        channels: its channel axis, 1 or -1.
    """

    node: Node
    reader: Node | None
    quantize: Node | None
    params: QuantParams | None
    constant: bool
    channels: int

    @property
    def source(self) -> Node:
        """The node that makes it, before it is quantized."""
        return self.node if self.quantize is None else _source(self.quantize)


@dataclass(frozen=True, slots=True, eq=False)
class ProfiledValue(ValueRow):
    """The fields of a row that no batch changes, as in :class:`pt2qa.ProfileRow`."""

    of: str
    source: str
    value: int
    handle: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Values to measure, each once, and rows that show them, in graph order.

    Attributes:
        writes: whether the graph changes its inputs or buffers when it runs.
        written: the names of the buffers that it changes.
        unwritten: the ops whose results, new memory that is not written yet, are not measured.
    """

    values: tuple[Value, ...]
    places: tuple[ProfiledValue, ...]
    writes: bool
    written: tuple[str, ...]
    unwritten: tuple[str, ...]

    @property
    def names(self) -> dict[int, str]:
        """What each value is called, by its number."""
        return dict(sorted({place.value: place.of for place in reversed(self.places)}.items()))


def make_plan(
    graph: GraphModule,
    names: Mapping[Node, OpName],
    *,
    prefixes: Sequence[str] = (),
    ops: Collection[OpKind] = (),
    parameters: Mapping[tuple[int, str], str] = MappingProxyType({}),
    with_stack: bool = False,
) -> Plan:
    """Plans the profile of a graph, which is not changed; options as for :func:`pt2qa.profile`.

    ``parameters`` says what to call those that an op reads, by its handle and the name of its argument.
    """
    return _Planner(graph, names, parameters, with_stack).plan(prefixes, ops)


def parameter_names(graph: GraphModule, names: Mapping[Node, OpName]) -> dict[tuple[int, str], str]:
    """The parameters and buffers that each op of a float graph reads, by handle and argument name."""
    places = make_plan(graph, names).places
    fixed = [place for place in places if place.role in ("weight", "bias", "constant")]
    return {(place.handle, place.argument): place.of for place in fixed if place.handle >= 0}


class _Planner:
    def __init__(
        self, graph: GraphModule, names: Mapping[Node, OpName], parameters: Mapping[Any, str], with_stack: bool
    ) -> None:
        self.graph, self.names, self.parameters, self.with_stack = graph, names, parameters, with_stack
        self.sites = Sites(graph)
        self.order = {node: position for position, node in enumerate(graph.graph.nodes)}
        aliases = Aliases(graph)
        self.writes = [
            (self.order[node], frozenset(aliases.group(written)))
            for node in self.order
            for written in written_by(node, graph)
        ]
        self.written = written_buffers(graph)
        self.unwritten = unwritten_values(graph.graph)
        self.left_out: dict[str, None] = {}
        self.constant = self._constants()
        self.channels = self._channels()
        self.values: list[Value] = []
        self.numbers: dict[tuple[Node, Node | None], int] = {}
        self.places: list[ProfiledValue] = []

    def plan(self, prefixes: Sequence[str], ops: Collection[OpKind]) -> Plan:
        nodes = [node for node in self.order if self._is_op(node)]
        chosen = select([self.names[node] for node in nodes], prefixes, ops)
        for node in (nodes[position] for position in sorted(chosen)):
            if node.op != "placeholder" and node.target is not operator.getitem:
                self._reads(node)
            for read in self.sites.readings(node):
                self._place(node, "output", "", self.names[node].name, self._value(read, read.node, None))
        return Plan(tuple(self.values), tuple(self.places), bool(self.writes), self.written, tuple(self.left_out))

    def _is_op(self, node: Node) -> bool:
        """Whether a node gets rows: inputs and ops of the model, but not quantization ops or constants."""
        if node.op not in ("placeholder", "call_function", "call_method", "call_module") or self.constant[node]:
            return False
        source = node.args[0] if node.target is operator.getitem else node
        serves = isinstance(source, Node) and quant_ops.is_quantization(source)
        return not serves and not self.sites.is_observer(node) and not calls_guards(node)

    # -- rows ----------------------------------------------------------------------------------------------------

    def _reads(self, node: Node) -> None:
        for argument, leaf in _arguments(node):
            read = self.sites.read(leaf)
            origin = self._origin(read.node)
            role = self._role(argument, read.node, origin)
            of = self.parameters.get((_handle(node), argument)) if role != "input" else None
            if of is None:
                of = self.names[origin].name if origin in self.names else str(origin.target)
            self._place(node, role, argument, of, self._value(read, self.sites.behind_observers(leaf), node))

    def _place(self, node: Node, role: Role, argument: str, of: str, value: int | None) -> None:
        if value is None:
            self.left_out[of] = None
            return
        source = source_line(node, code=True) if self.with_stack else ""
        name = self.names[node]
        self.places.append(
            ProfiledValue(name.name, name.module, name.op, role, argument, of, source, value, _handle(node))
        )

    def _value(self, read: ReadValue, actual: Node, reader: Node | None) -> int | None:
        """The number of a value; one that was written to since it was produced is a new one for its reader.

        None for memory that is not written yet.
        """
        written = [position for position, group in self.writes if actual in group]
        stale = reader is not None and any(self.order[actual] < at < self.order[reader] for at in written)
        if read.node in self.unwritten and not stale:
            return None
        key = (actual, reader) if stale else (read.node, None)
        if key not in self.numbers:
            self.numbers[key] = len(self.values)
            constant = self.constant[read.node] and not written
            self.values.append(Value(*key, read.quantize, read.params, constant, self.channels[read.node]))
        return self.numbers[key]

    def _role(self, argument: str, node: Node, origin: Node) -> Role:
        if argument == "weight" or argument == "bias":
            return "weight" if argument == "weight" else "bias"
        if not self.constant[node]:
            return "input"
        is_parameter = isinstance(attribute_of(self.graph, origin), nn.Parameter)
        return "weight" if is_parameter else "constant"

    def _origin(self, node: Node) -> Node:
        """The op, input or attribute behind quantization; for a constant, the attribute that it is computed from."""
        while node.op != "get_attr":
            source = node.args[0] if node.args else None
            serves = quant_ops.is_quantization(node) or self.sites.is_observer(node)
            if not isinstance(source, Node) or not (serves or self.constant[node]):
                return node
            node = source
        return node

    # -- properties of nodes -------------------------------------------------------------------------------------

    def _constants(self) -> dict[Node, bool]:
        """For each node whether no batch changes its value."""
        found: dict[Node, bool] = {}
        for node in self.order:
            fixed = node.op == "get_attr" or (node.op == "call_function" and not op_rules.is_random(node.target))
            found[node] = fixed and all(found[source] for source in node.all_input_nodes)
        return found

    def _channels(self) -> dict[Node, int]:
        """The channel axis of each node: from the nearest upstream op that knows it; 1 for inputs, as in images."""
        found: dict[Node, int] = {}
        for node in self.order:
            op = "" if node.op in ("placeholder", "get_attr", "output") else op_of(node.target)
            source = next((each for each in node.all_input_nodes if not self.constant[each]), None)
            if op.startswith(_LAST_AXIS):
                found[node] = -1
            elif op.startswith(_CHANNELS_FIRST) or source is None:
                found[node] = 1
            else:
                found[node] = found[source]
        return found


_LAST_AXIS = (
    *("linear", "addmm", "mm", "matmul", "bmm", "embedding", "layer_norm", "rms_norm", "lstm", "gru", "rnn"),
    *("permute", "transpose", "movedim", "scaled_dot_product"),
)
"""Beginnings of the names of ops whose output has its channels last, or that moved them away from axis 1."""

_CHANNELS_FIRST = ("conv", "batch_norm", "_native_batch_norm", "group_norm", "instance_norm")
"""Beginnings of the names of ops whose output has its channels in axis 1."""


def _handle(node: Node) -> int:
    handle = handle_of(node)
    return -1 if handle is None else handle


def _arguments(node: Node) -> Iterator[tuple[str, Node]]:
    """The inputs of a node, each with its argument name: ``input``, ``tensors[1]``; positions without a schema."""
    names = [argument.name for argument in arguments_of(node.target)] or map(str, range(len(node.args)))
    for name, argument in (*zip(names, node.args, strict=False), *node.kwargs.items()):
        yield from _leaves(name, argument)


def _leaves(name: str, argument: Any) -> Iterator[tuple[str, Node]]:
    if isinstance(argument, Node):
        yield name, argument
    elif isinstance(argument, (list, tuple)):
        for position, item in enumerate(argument):
            yield from _leaves(f"{name}[{position}]", item)
    elif isinstance(argument, dict):
        for key, item in argument.items():
            yield from _leaves(f"{name}.{key}", item)
