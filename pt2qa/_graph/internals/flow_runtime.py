"""What pt2qa does to graphs, and a printed ``quantizer.py`` too: it has the source of those functions that it needs.

So this file needs torch alone, and of pt2qa only what is printed with it: see :func:`pt2qa.plugins.code.runtime`.
"""

from __future__ import annotations

import base64
import operator
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, GraphModule, Node

from pt2qa._graph.internals.nodes import VALUE, clean_path, module_stack

BIAS: Final = 2
"""The number of the argument that is the bias, of convolutions and linears."""


def ops_by_name(graph: Graph) -> dict[str, Node]:
    """The ops of a graph by module path, op and ordinal, such as layer1.0.conv1/conv2d; inputs and output by name."""
    output, names, used = graph.output_node(), dict[Node, str](), dict[str, int]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        names[node] = numbered(stem_of(node, names), used)
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    return {**inputs, output.name: output, **{name: node for node, name in names.items()}}


def stem_of(node: Node, names: Mapping[Node, str], within: str = "") -> str:
    """The name of an op without its ordinal: module path and op, or which output of an op that has a name."""
    if node.target is operator.getitem and isinstance(node.args[0], Node) and node.args[0] in names:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    module = within or module_of(node)[0]
    return f"{module}/{op_of(node.target)}" if module else op_of(node.target)


def numbered(stem: str, used: dict[str, int]) -> str:
    """A name with an ordinal from the second use of a stem on; ``used`` counts them."""
    used[stem] = ordinal = used.get(stem, -1) + 1
    return f"{stem}_{ordinal}" if ordinal else stem


def op_of(target: Callable[..., Any] | str) -> str:
    """What a node's target does, without namespace, overload and in-place underscore.

    >>> import torch
    >>> op_of(torch.ops.aten.relu_.default), op_of(torch.ops.aten.conv2d.default), op_of(operator.getitem)
    ('relu', 'conv2d', 'getitem')
    """
    if isinstance(target, HigherOrderOperator):
        return str(target.name()).removesuffix("_impl")
    target = target.overloadpacket if isinstance(target, OpOverload) else target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.strip("_") if name.startswith("__") else name.removesuffix("_")


def module_of(node: Node) -> tuple[str, str]:
    """Path and class name of the module that called a node's op; two empty strings if unknown."""
    stack = module_stack(node)
    if not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    kind = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
    return clean_path(path), kind.rpartition(".")[2]


# -- parameters --------------------------------------------------------------------------------------------------------


def add_to_biases(graph_module: GraphModule, ops: Mapping[str, Node], values: Iterable[tuple[str, str]]) -> None:
    """Adds numbers, float32 in base64, to the biases of ops, in place and in order; of zeros where an op has none."""
    for name, numbers in values:
        node = ops[name]
        if len(node.args) <= BIAS or node.args[BIAS] is None:
            give_bias(graph_module, name, node)
        target = parameter_of(node.args[BIAS])
        bias = graph_module.get_parameter(target).detach()
        set_parameters(graph_module, {target: (bias.float() + floats(numbers).to(bias.device)).to(bias.dtype)})


def give_bias(graph_module: GraphModule, name: str, node: Node) -> None:
    """Gives an op without a bias one of zeros, in place."""
    value, target = node.meta[VALUE], "bias_of_" + re.sub(r"\W", "_", name)
    weight = operator.attrgetter(parameter_of(node.args[1]))(graph_module)
    set_parameters(graph_module, {target: torch.zeros(len(weight), dtype=value.dtype, device=value.device)})
    with node.graph.inserting_before(node):
        bias = node.graph.get_attr(target)
    node.args = (*node.args[:BIAS], bias, *node.args[BIAS + 1 :])
    graph_module.recompile()


def parameter_of(node: Any) -> str:
    """The name of a parameter, behind what observes or dequantizes it."""
    while node.op != "get_attr":
        node = node.args[0]
    return str(node.target)


def set_integers(graph_module: GraphModule, ops: Mapping[str, Node], values: Iterable[tuple[str, str]]) -> None:
    """Gives the observed weights of ops the values of integers, int8 in base64, in place."""
    for name, integers in values:
        read: Any = ops[name].args[1]
        target, observer = parameter_of(read), operator.attrgetter(read.target)(graph_module)
        weight = graph_module.get_parameter(target).detach()
        given = torch.frombuffer(bytearray(base64.b64decode(integers)), dtype=torch.int8).reshape(weight.shape)
        value = in_float(*(each.to(weight.device) for each in (given, *observer.calculate_qparams())))
        set_parameters(graph_module, {target: value.to(weight.dtype)})


def in_float(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The values of integers with one scale, or one for each output channel."""
    shape = (-1, *[1] * (integers.dim() - 1))
    return (integers - zero_point.reshape(shape)).float() * scale.reshape(shape)


Move = tuple[str, str, Sequence[str], Sequence[str], str]
"""``smooth`` or ``shift``; a norm; linears that read it; linears whose outputs are added to its own; a number for each
channel, float32 in base64."""


def change_norms(graph_module: GraphModule, ops: Mapping[str, Node], moves: Iterable[Move]) -> None:
    """Moves factors or shifts from norms into the parameters around them, in place and in order."""

    def bias_of(name: str) -> str:
        return parameter_of(ops[name].args[BIAS])

    def value_of(target: str) -> Tensor:
        return graph_module.get_parameter(target).detach()

    for kind, norm, linears, added, numbers in moves:
        values = floats(numbers)
        own = [str(source.target) for source in ops[norm].all_input_nodes if source.op == "get_attr"]
        weights = {name: parameter_of(ops[name].args[1]) for name in linears}
        if kind == "smooth":
            changed = {target: value_of(target) / values.to(value_of(target)) for target in own}
            changed |= {target: value_of(target) * values.to(value_of(target)) for target in weights.values()}
        else:
            values = values.double()
            shifts = {bias_of(name): value_of(weight).cpu().double() @ values for name, weight in weights.items()}
            shifts |= {own[-1]: -values, **{bias_of(name): values for name in added}}
            changed = {
                target: (value_of(target).cpu().double() + shift).to(value_of(target))
                for target, shift in shifts.items()
            }
        set_parameters(graph_module, changed)


def floats(numbers: str) -> Tensor:
    """Float32 numbers from base64."""
    found = struct.iter_unpack("<f", base64.b64decode(numbers))
    return torch.tensor([number for (number,) in found], dtype=torch.float32)


def set_parameters(graph_module: GraphModule, values: Mapping[str, Tensor]) -> None:
    """Gives parameters of a graph other values, in place; other graphs that have the same parameters keep theirs."""
    for target, value in values.items():
        module, _, name = target.rpartition(".")
        setattr(graph_module.get_submodule(module), name, nn.Parameter(value, requires_grad=False))
