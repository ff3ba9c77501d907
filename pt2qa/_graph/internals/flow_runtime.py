"""What pt2qa does to graphs, and a printed ``quantizer.py`` too: it has the source of those functions that it needs.

So this file needs torch alone, and of pt2qa only what is printed with it: see :func:`pt2qa.plugins.code.runtime`.
"""

from __future__ import annotations

import base64
import operator
import re
import struct
from collections.abc import Callable, Iterable, Mapping
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
        if read.op != "call_module":
            raise ValueError(f"{name}: the quantizer leaves its weight in float here, so it has no integers to set")
        target, observer = parameter_of(read), operator.attrgetter(read.target)(graph_module)
        weight = graph_module.get_parameter(target).detach()
        given = torch.frombuffer(bytearray(base64.b64decode(integers)), dtype=torch.int8).reshape(weight.shape)
        value = in_float(*(each.to(weight.device) for each in (given, *observer.calculate_qparams())))
        set_parameters(graph_module, {target: value.to(weight.dtype)})


def in_float(integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The values of integers with one scale, or one for each output channel."""
    shape = (-1, *[1] * (integers.dim() - 1))
    return (integers - zero_point.reshape(shape)).float() * scale.reshape(shape)


Change = tuple[str, str, int, int, float, str]
"""``scale`` or ``shift``; an op; the number of a parameter among its arguments; an axis; a power; a number for each
channel, float32 in base64."""


def change_parameters(graph_module: GraphModule, ops: Mapping[str, Node], changes: Iterable[Change]) -> None:
    """Changes parameters of ops, in place and in order; computed in float64 on the CPU, so it is the same everywhere.

    A ``scale`` multiplies a parameter by numbers to a power, along its axis 0, or along axis 1 as the channels of all
    groups.  A ``shift`` adds numbers times the power to a parameter, or to a bias what the weight makes of them if the
    axis is 1.
    """
    for kind, name, argument, axis, power, numbers in changes:
        args, given = ops[name].args, floats(numbers).double()
        target = parameter_of(args[argument])
        value = operator.attrgetter(target)(graph_module).detach()
        if kind == "scale":
            changed = scaled(value.cpu().double(), given**power, axis)
        else:
            weight = operator.attrgetter(parameter_of(args[1]))(graph_module).detach() if axis else None
            shift = given * power if weight is None else weight.cpu().double() @ given * power
            changed = value.cpu().double() + shift.reshape(value.shape)
        set_parameters(graph_module, {target: changed.to(value)})


def scaled(value: Tensor, factors: Tensor, axis: int) -> Tensor:
    """A parameter times a factor for each element, for each index of axis 0, or for each channel of all groups."""
    if factors.numel() == value.numel():
        return value * factors.reshape(value.shape)
    if axis == 0:
        return value * factors.reshape(-1, *[1] * (value.dim() - 1))
    groups = len(factors) // value.shape[1]
    found = value.reshape(groups, -1, *value.shape[1:])
    return (found * factors.reshape(groups, 1, -1, *[1] * (value.dim() - 2))).reshape(value.shape)


def floats(numbers: str) -> Tensor:
    """Float32 numbers from base64."""
    found = struct.iter_unpack("<f", base64.b64decode(numbers))
    return torch.tensor([number for (number,) in found], dtype=torch.float32)


def set_parameters(graph_module: GraphModule, values: Mapping[str, Tensor]) -> None:
    """Gives parameters of a graph other values, in place; other graphs that have the same parameters keep theirs."""
    for target, value in values.items():
        path, _, name = target.rpartition(".")
        module = graph_module.get_submodule(path)
        is_buffer = name in dict(module.named_buffers(recurse=False))
        setattr(module, name, value if is_buffer else nn.Parameter(value, requires_grad=False))
