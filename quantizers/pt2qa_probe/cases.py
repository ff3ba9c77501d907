"""The tiny models that are lowered: one op each, and how its tensors are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from pt2qa.plugins import TensorSpec
from pt2qa_probe.internals import annotate, scales_of

FLOAT: Final = TensorSpec("float32")
INT32: Final = TensorSpec("int32", "symmetric", None, -(2**31), 2**31 - 1)
"""A bias with the scale of the products that it is added to; along axis 0 where the weight is."""

IMAGE, ROWS = (1, 4, 8, 8), (1, 16)
"""One row, and one image: some kernels have a dynamic scale for each."""

WEIGHTED: Final[Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "conv2d": (lambda: nn.Conv2d(4, 4, 3), IMAGE),
    "conv1d": (lambda: nn.Conv1d(4, 4, 3), (1, 4, 32)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), IMAGE),
    "linear": (lambda: nn.Linear(16, 16), ROWS),
}
OTHERS: Final[Mapping[str, tuple[Callable[..., Tensor], Sequence[tuple[int, ...]]]]] = {
    "add": (torch.add, (IMAGE, IMAGE)),
    "sub": (torch.sub, (IMAGE, IMAGE)),
    "mul": (torch.mul, (IMAGE, IMAGE)),
    "matmul": (torch.matmul, ((4, 8, 16), (4, 16, 8))),
    "relu": (F.relu, (IMAGE,)),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 0.5), (IMAGE,)),
    "sigmoid": (torch.sigmoid, (IMAGE,)),
    "tanh": (torch.tanh, (IMAGE,)),
    "hardswish": (F.hardswish, (IMAGE,)),
    "gelu": (F.gelu, (IMAGE,)),
    "softmax": (lambda x: torch.softmax(x, -1), (ROWS,)),
    "mean": (lambda x: x.mean((2, 3), keepdim=True), (IMAGE,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (IMAGE,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, 2), (IMAGE,)),
    "cat": (lambda a, b: torch.cat([a, b], 1), (IMAGE, IMAGE)),
    "reshape": (lambda x: x.reshape(1, -1), (IMAGE,)),
    "permute": (lambda x: x.permute(0, 2, 3, 1), (IMAGE,)),
    "slice": (lambda x: x[:, 1:3], (IMAGE,)),
}
OPS: Final = (*WEIGHTED, *OTHERS)
MOVES: Final = ("max_pool2d", "cat", "reshape", "permute", "slice")
"""Ops that can hand integers on, if all have one scale."""

JOINED: Final = (*WEIGHTED, "add")
"""Ops whose kernel may apply the activation after them."""

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "relu": F.relu,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}


def is_static(read: TensorSpec) -> bool:
    """Whether what is read has a scale, and the same one for all data."""
    return read != FLOAT and not read.dynamic


@dataclass(frozen=True)
class Case:
    """One op, and how its tensors are rounded.

    Attributes:
        op: its type.
        read: how what it reads is rounded; float32 if it is not.
        given: how what it gives is, if that has static scales, too.
        weight, bias: as ``read``; float32 of an op without them.
        one_scale: whether all that it reads and gives shares one scale.
        then: an activation after it.
        apart: whether a value is also rounded before that.
    """

    op: str
    read: TensorSpec
    given: TensorSpec
    weight: TensorSpec = FLOAT
    bias: TensorSpec = FLOAT
    one_scale: bool = False
    then: str = ""
    apart: bool = False

    @property
    def static(self) -> bool:
        """Whether its scales are."""
        return is_static(self.read)

    def module(self) -> nn.Module:
        """The op as a module, with the same random weights each time."""
        torch.manual_seed(0)
        return _Branch(self)

    def inputs(self, scale: float, seed: int) -> tuple[Tensor, ...]:
        """Random data, not centred unless zero points are 0, so that a zero point that is lost shows."""
        generator = torch.Generator().manual_seed(seed)
        shapes = (WEIGHTED[self.op][1],) if self.op in WEIGHTED else OTHERS[self.op][1]
        mean = 0.4 if self.read.scheme == "affine" else 0.0
        return tuple(scale * (torch.randn(shape, generator=generator) + mean) for shape in shapes)

    def annotate(self, ops: Sequence[Node]) -> None:
        """Rounds at the nodes of its branch: the op, and the activation after it if there is one."""
        node, last = ops[0], ops[-1]
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        inputs: dict[Node, Any] = {} if self.read == FLOAT else dict.fromkeys(sources, _activation(self.read))
        output: Any = _activation(self.given) if self.static else None
        if self.one_scale:
            output = SharedQuantizationSpec((sources[0], node))
            inputs |= dict.fromkeys(sources[1:], output)
        if self.op in WEIGHTED:
            _, weight, bias = node.all_input_nodes
            inputs |= {weight: _weight(self.weight)} if self.weight != FLOAT else {}
            inputs |= {bias: _bias(self.bias, node)} if self.bias != FLOAT else {}
        between = output if node is last or self.apart else None
        annotate(node, inputs, between)
        if node is not last:
            annotate(last, {node: output} if self.apart else {}, output)


class _Branch(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.then = ACTIVATIONS.get(case.then)
        if case.op in WEIGHTED:
            self.function: Callable[..., Tensor] = WEIGHTED[case.op][0]()
            for weight in self.parameters():
                # Not centred, and with channels of different size, so that zero points and axes matter.
                weight.data.add_(0.1).mul_(torch.linspace(0.5, 2, len(weight)).view(-1, *[1] * (weight.dim() - 1)))
        else:
            self.function = OTHERS[case.op][0]

    def forward(self, *inputs: Tensor) -> Tensor:
        found = self.function(*inputs)
        return found if self.then is None else self.then(found)


class Branches(nn.Module):
    """Cases side by side; ``forward`` takes the inputs of all, and returns one output for each."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(case.module() for case in cases)
        self.counts = [len(case.inputs(1.0, 0)) for case in cases]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """The output of each case."""
        rest = iter(inputs)
        return [
            branch(*(next(rest) for _ in range(count)))
            for branch, count in zip(self.branches, self.counts, strict=True)
        ]


class Rounds(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Rounds each branch as its case says."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = cases

    def annotate(self, model: GraphModule) -> GraphModule:
        """Edits ``model``."""
        for case, ops in zip(self.cases, ops_of(model), strict=True):
            case.annotate(ops)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to check."""


def ops_of(model: GraphModule) -> list[list[Node]]:
    """The ops of each branch, in order: back from its output to its inputs."""
    found = []
    for node in model.graph.output_node().all_input_nodes:
        chain = [node]
        while before := [each for each in chain[0].all_input_nodes if each.op == "call_function"]:
            chain.insert(0, before[0])
        found.append(chain)
    return found


def _activation(spec: TensorSpec) -> QuantizationSpec:
    scheme = torch.per_tensor_affine if spec.scheme == "affine" else torch.per_tensor_symmetric
    observer = PlaceholderObserver if spec.dynamic else MinMaxObserver.with_args(eps=2**-12)
    return QuantizationSpec(
        getattr(torch, spec.dtype), observer, spec.quant_min, spec.quant_max, scheme, is_dynamic=spec.dynamic
    )


def _weight(spec: TensorSpec) -> QuantizationSpec:
    scheme = f"per_{'tensor' if spec.axis is None else 'channel'}_{spec.scheme}"
    observer = MinMaxObserver if spec.axis is None else PerChannelMinMaxObserver
    return QuantizationSpec(
        getattr(torch, spec.dtype),
        observer.with_args(eps=2**-12),
        spec.quant_min,
        spec.quant_max,
        getattr(torch, scheme),
        spec.axis,
    )


def _bias(spec: TensorSpec, node: Node) -> DerivedQuantizationSpec:
    source, weight, _ = node.all_input_nodes
    scheme = torch.per_tensor_symmetric if spec.axis is None else torch.per_channel_symmetric

    def derived(observers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        one, other = scales_of(observers)
        scale = (one * other).flatten()
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    return DerivedQuantizationSpec(
        [(source, node), (weight, node)], derived, torch.int32, spec.quant_min, spec.quant_max, scheme, spec.axis
    )


def with_weight(case: Case, weight: TensorSpec) -> Case:
    """The same with another weight, whose axis an int32 bias takes on."""
    bias = replace(case.bias, axis=None if weight.axis is None else 0) if case.bias != FLOAT else FLOAT
    return replace(case, weight=weight, bias=bias)
