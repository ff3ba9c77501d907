"""What a plan moves from the output of a norm into the weights of the linears that read it.

With s a factor for each channel, ``norm(x) / s`` and ``weight * s`` give the same products.  Powers of two change only
exponents, so a float model stays what it is, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import set_parameters
from pt2qa._graph.handles import OpName, attribute_of, name_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.errors import QuantizeError
from pt2qa.overrides.plan import Edit

_ATEN = torch.ops.aten
NORMS = (_ATEN.layer_norm.default, _ATEN.rms_norm.default, _ATEN.mul.Tensor)
"""Ops with a parameter for each channel of their output; a norm written out ends with a multiplication."""

_RESHAPES = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone", "dropout")
_BY_AXES = {"transpose": (1, 2), "select": (1,), "slice": (1,)}


@dataclass(frozen=True, slots=True)
class Smoothable:
    """A norm, its parameters by attribute, and the linears that alone read it, with the attributes of their weights."""

    norm: str
    parameters: tuple[str, ...]
    linears: Mapping[str, str]

    @property
    def ops(self) -> tuple[str, ...]:
        """The names that an edit has."""
        return (self.norm, *self.linears)


def smoothable_in(graph_module: GraphModule, names: Mapping[int, OpName]) -> Iterator[Smoothable]:
    """The norms of a graph whose output only linears read, through ops that leave the channels where they are.

    Their parameters have no other reader.
    """
    readers = Counter(
        str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr" for _ in node.users
    )

    def own(node: object) -> bool:
        if not isinstance(node, Node) or node.op != "get_attr" or readers[str(node.target)] != 1:
            return False
        return isinstance(attribute_of(graph_module, node), nn.Parameter)

    for node in graph_module.graph.nodes:
        if node.target not in NORMS:
            continue
        read = [source for source in node.all_input_nodes if source.op == "get_attr"]
        linears = list(_linears(node))
        name, found = name_of(node, names), [name_of(linear, names) for linear in linears]
        known = name is not None and None not in found and len(set(found)) == len(found)
        weights = [cast(Node, linear.args[1]) for linear in linears]
        parameters = [*read, *weights]
        if not (known and read and linears and all(map(own, parameters))):
            continue
        if len({attribute_of(graph_module, each).shape[-1] for each in parameters}) == 1:
            targets = {str(each): str(weight.target) for each, weight in zip(found, weights, strict=True)}
            yield Smoothable(str(name), tuple(str(source.target) for source in read), targets)


def _linears(node: Node) -> Iterator[Node]:
    """The linears that read a value; nothing if another op does, too."""
    found = []
    for reader in node.users:
        op = op_of(reader.target) if reader.op == "call_function" else ""
        if op == "linear" and reader.args[0] is node and node not in reader.args[1:]:
            found.append(reader)
        elif _keeps_channels(reader, op, node):
            behind = list(_linears(reader))
            if not behind:
                return
            found += behind
        else:
            return
    yield from found


def _keeps_channels(reader: Node, op: str, node: Node) -> bool:
    """Whether the last axis of an op's output is that of its input."""
    before, after = (each.meta.get(VALUE) for each in (node, reader))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or not after.dim():
        return False
    last = before.dim() - 1
    if op in _BY_AXES:
        axes = [reader.args[place] if len(reader.args) > place else 0 for place in _BY_AXES[op]]
        return all(isinstance(axis, int) and axis % before.dim() != last for axis in axes)
    if op == "permute":
        *_, axis = cast(list[int], reader.args[1])
        return axis % before.dim() == last
    return op in _RESHAPES and after.shape[-1] == before.shape[-1]


def smooth(graph_module: GraphModule, edits: Iterable[Edit], names: Mapping[int, OpName]) -> None:
    """Makes the ``smooth`` edits, in place.

    Raises:
        QuantizeError: the ops are not a norm and the linears that alone read it, or it has another size.
    """
    chosen = [edit for edit in edits if edit.kind == "smooth"]
    known = {each.norm: each for each in smoothable_in(graph_module, names)} if chosen else {}
    for edit in chosen:
        found = known.get(edit.ops[0])
        if found is None or {*found.ops} != {*edit.ops}:
            raise QuantizeError(
                f"{edit}: these are not a norm and all that reads it, linears with weights of their own"
            )
        for target in (*found.parameters, *found.linears.values()):
            value = graph_module.get_parameter(target).detach()
            factors = torch.tensor(edit.numbers, dtype=value.dtype, device=value.device)
            if value.shape[-1:] != factors.shape:
                raise QuantizeError(f"{edit}: {target} has the shape {tuple(value.shape)}")
            set_parameters(graph_module, {target: value / factors if target in found.parameters else value * factors})


SOURCE = '''
def smooth(graph_module):
    """Moves factors from the output of norms into the weights of the linears that read it."""
    ops = ops_by_name(graph_module.graph)
    for (norm, *linears), values in FACTORS:
        factors = torch.tensor([each for (each,) in struct.iter_unpack("<f", base64.b64decode(values))])
        read = [source for source in ops[norm].all_input_nodes if source.op == "get_attr"]
        for source in [*read, *(ops[name].args[1] for name in linears)]:
            module, _, attribute = source.target.rpartition(".")
            value = graph_module.get_parameter(source.target).detach()
            own = factors.to(value.dtype)
            parameter = torch.nn.Parameter(value / own if source in read else value * own, requires_grad=False)
            setattr(graph_module.get_submodule(module), attribute, parameter)
'''
"""What :func:`smooth` does, for an export flow without pt2qa."""


def source_of(edits: Iterable[Edit]) -> str:
    """The function of :data:`SOURCE`, and the values of the ``smooth`` edits as text; empty if there are none."""
    lines = "".join(f"    ({edit.ops!r}, {edit.values!r}),\n" for edit in edits if edit.kind == "smooth")
    return f"FACTORS = (\n{lines})\n{SOURCE}" if lines else ""
