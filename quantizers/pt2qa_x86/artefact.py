"""What a package of AOTInductor holds: its int8 kernels and constants, read unrun.

A package is a shared library with the constants, and the C++ code that it was compiled from, which has the calls of
oneDNN's kernels in order and all numbers that Inductor wrote into loops: scales, and constants of up to eight elements.
Read with torch 2.13.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import attribute_of, op_type
from pt2qa_x86.internals import op_of, package_of
from pt2qa_x86.rules import PRODUCTS

_WEIGHED = (*PRODUCTS, "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

_CALL = re.compile(r"aoti_torch_cpu__(q(?:conv|linear)\w*?)(?:_tensor)?\((.*)\)\);")
_OUTPUT = re.compile(r"([\d.e+-]+), (-?\d+)L, &var_\d+, ")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?=[L)]|, )")
CLOSE = 1e-6
IN_CODE = 8
"""Vectors of so many elements may be numbers in the code."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A call of one of oneDNN's int8 kernels: the names of its constants, empty for those in the code.

    ``output`` is the scale and zero point with which it rounds its output; None if that is float.
    """

    op: str
    output: tuple[float, int] | None
    weight: str
    scale: str
    zero_point: str
    weight_scale: str
    bias: str


@dataclass(frozen=True, eq=False)
class Package:
    """What a package holds.

    Attributes:
        constants: by their names in the code; weights that oneDNN packed as they were before.
        numbers: all that stand in the code, sorted.
        kernels: in the order in which they are called.
        isa: the instruction set that Inductor compiled for.
    """

    constants: Mapping[str, Tensor]
    numbers: Tensor
    kernels: tuple[Kernel, ...]
    isa: str

    @classmethod
    def read(cls, path: Path) -> Package:
        """Raises DeploymentError if it has none of what is read here, or in another form."""
        try:
            code, constants, isa = package_of(path)
            kernels = tuple(_kernels(code, constants))
        except Exception as error:
            raise DeploymentError(f"its constants cannot be read: {type(error).__name__}: {error}") from error
        written = {float(each) for each in _NUMBER.findall(code)}
        written |= {float(value) for value in constants.values() if value.dim() == 0}
        return cls(constants, torch.tensor(sorted(written), dtype=torch.float64), kernels, isa)

    @property
    def facts(self) -> tuple[str, ...]:
        """How it computes."""
        if self.kernels:
            return (f"{len(self.kernels)} int8 kernels, compiled for {self.isa}",)
        return (
            f"no int8 kernel, compiled for {self.isa}: all is computed in float, on rounded values. With "
            "torch._inductor.config.freezing = True, set before it is compiled, Inductor takes int8 kernels",
        )

    @property
    def lines(self) -> Iterator[str]:
        """Its kernels, and then the constants that none of them reads."""
        read = set[str]()
        for kernel in self.kernels:
            names = kernel.scale, kernel.zero_point, kernel.weight, kernel.weight_scale, kernel.bias
            read |= {*names}
            scale, zero_point = (_range(self.constants.get(name), "computed") for name in names[:2])
            weight_scale, bias = (_range(self.constants.get(name), "in the code") for name in names[3:])
            told = f"{kernel.op}: input scale {scale}, zero point {zero_point}; weight {self._shape(kernel.weight)}"
            told += f", scale {weight_scale}; bias {bias}"
            yield told + (
                "" if kernel.output is None else "; output scale {:.6g}, zero point {}".format(*kernel.output)
            )
        for name, value in self.constants.items():
            if name not in read and value.numel() > 1 and value.any():
                yield f"constant {self._shape(name)}: {_range(value, '')}"

    def _shape(self, name: str) -> str:
        value = self.constants[name]
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"

    def has(self, wanted: Tensor) -> bool:
        """Whether all elements are among the numbers in the code."""
        flat = wanted.double().flatten()
        at = torch.searchsorted(self.numbers, flat)
        around = torch.stack([self.numbers[(at + by).clamp(0, len(self.numbers) - 1)] for by in (-1, 0)])
        return bool(((around - flat).abs() <= CLOSE * flat.abs()).any(0).all())

    def holds(self, wanted: Tensor) -> bool:
        """Whether a vector is one of the constants, or in the code, where the short ones are."""
        return any(_same(value, wanted) for value in self.constants.values()) or (
            wanted.numel() <= IN_CODE and self.has(wanted)
        )


def _range(value: Tensor | None, otherwise: str) -> str:
    if value is None:
        return otherwise
    low, high = float(value.min()), float(value.max())
    return f"{low:.6g}" if low == high else f"{low:.4g}..{high:.4g}"


def _same(value: Tensor, wanted: Tensor) -> bool:
    fits = value.numel() == wanted.numel()
    return fits and torch.allclose(value.double().flatten(), wanted.double().flatten(), rtol=CLOSE, atol=0)


def _kernels(code: str, constants: Mapping[str, Tensor]) -> Iterator[Kernel]:
    for op, text in _CALL.findall(code):
        _, scale, zero_point, weight, weight_scale, _, *rest = _split(text)
        bias = next(
            (found[1] for each in rest[:2] if (found := re.match(r"&temporary_reference\((\w+)\.get", each))), ""
        )
        found = _OUTPUT.search(text)
        if found is None:
            raise ValueError(f"no scale of the output in {text[:200]}")
        output = (float(found[1]), int(found[2]))
        names = [name if name in constants else "" for name in (weight, scale, zero_point, weight_scale, bias)]
        yield Kernel(op, None if output == (1.0, 0) else output, *names)


def _split(text: str) -> list[str]:
    """The arguments of a call in C++."""
    found, depth = [""], 0
    for each in text:
        depth += (each in "([{<") - (each in ")]}>")
        if each == "," and not depth:
            found.append("")
        else:
            found[-1] += each
    return [each.strip() for each in found]


# -- compared with a converted graph -----------------------------------------------------------------------------------


def differences(package: Package, graph: GraphModule) -> Iterator[tuple[Node, str]]:
    """What a package holds otherwise than a converted graph: weights, biases, scales and zero points, op by op."""
    unused, inputs = list(package.kernels), set[Node]()
    for node in graph.graph.nodes:
        if op_type(node) in _WEIGHED:
            name, told = _of_product(package, node, graph)
            kernel = next((each for each in unused if name and each.weight == name), None)
            if kernel is not None:
                unused.remove(kernel)
                if other := _of_input(package, kernel, node.args[0]):
                    inputs.add(node.args[0].args[0])
                    told.append(other)
            if told:
                yield node, "; ".join(told)
    for node in graph.graph.nodes:
        if node not in inputs and _is(node, "quantize_per_tensor") and isinstance(node.args[1], float):
            scale = torch.tensor(node.args[1])
            if not package.has(scale) and not package.has(1 / scale):
                yield node.all_input_nodes[0], f"its output's scale, {float(scale):.6g} here, is not in it"


def _of_product(package: Package, node: Node, graph: GraphModule) -> tuple[str, list[str]]:
    """The constant that is taken for a product's weight, and what it and the bias are otherwise."""
    weight, scale, axis = _weight(node.args[1], graph)
    if weight is None:
        return "", []
    name, share = _nearest(package, weight, scale, axis)
    if not name and not (weight.numel() <= IN_CODE and package.has(weight)):
        return "", [f"it has no weight of shape {tuple(weight.shape)}"]
    told = [f"{share:.1%} of its weights differ"] if name and share else []
    integers = not name or not package.constants[name].is_floating_point()
    if scale is not None and integers and not package.holds(scale):
        told.append("its weight's scales are not in it")
    bias = attribute_of(graph, node.args[2] if len(node.args) > 2 else None)
    if bias is not None and not package.holds(bias):
        told.append("its bias is not in it")
    return name, told


def _of_input(package: Package, kernel: Kernel, node: Any) -> str:
    """The scale and zero point with which a kernel reads its input, if they are not those of a dequantize node."""
    held = package.constants.get(kernel.scale), package.constants.get(kernel.zero_point)
    if (
        held[0] is None
        or held[1] is None
        or not _is(node, "dequantize_per_tensor")
        or not isinstance(node.args[1], float)
    ):
        return ""
    found, wanted = (float(held[0]), int(held[1])), (node.args[1], node.args[2])
    if abs(found[0] / wanted[0] - 1) <= CLOSE and found[1] == wanted[1]:
        return ""
    return "its input has scale {:.6g}, zero point {}, here {:.6g}, {}".format(*found, *wanted)


def _is(node: Any, op: str) -> bool:
    return isinstance(node, Node) and op_of(node) == f"quantized_decomposed::{op}"


def _weight(node: Any, graph: GraphModule) -> tuple[Tensor | None, Tensor | None, int]:
    """A weight as it is stored, and its scales by which axis; None for one that is computed."""
    scale: Tensor | None = None
    axis: Any = 0
    while isinstance(node, Node) and node.op == "call_function" and node.args:
        if _is(node, "dequantize_per_channel"):
            scale, axis = attribute_of(graph, node.args[1]), node.args[3]
        elif _is(node, "dequantize_per_tensor"):
            scale = torch.tensor([node.args[1]])
        node = node.args[0]
    return attribute_of(graph, node), scale, axis


def _nearest(package: Package, weight: Tensor, scale: Tensor | None, axis: int) -> tuple[str, float]:
    """The constant that has most of a weight's elements, and the share of those that differ; integers, or their values.

    oneDNN's linears hold the transpose.  Corners are compared first.
    """
    forms = {False: weight}
    if scale is not None:
        forms[True] = weight * scale.reshape([-1 if each == axis else 1 for each in range(weight.dim())])
    elif weight.dtype.is_floating_point:
        forms = {True: weight}
    best, closest = ("", math.inf), math.inf
    for name, held in package.constants.items():
        form = forms.get(held.dtype.is_floating_point)
        if form is None or held.dim() < 2 or sorted(held.shape) != sorted(weight.shape):
            continue
        for way in itertools.permutations(range(form.dim())):
            turned = form.permute(way)
            if turned.shape != held.shape:
                continue
            corner = (slice(16),) * held.dim()
            if (share := _differing(held[corner], turned[corner])) < closest:
                closest, best = share, (name, _differing(held, turned))
            if not best[1]:
                return best
    return best


def _differing(held: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double()
    return float(((held.double() - wanted).abs() > CLOSE * wanted.abs()).double().mean())
