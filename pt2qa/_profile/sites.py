"""Where a graph quantizes: what an op really reads, behind observers and quantize-dequantize pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import attribute_of
from pt2qa._graph.internals.torchao import is_observer, rounds_now
from pt2qa._simulator import quant_ops
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
            params = quant_ops.read_params(quantize if is_pair else node, self._constant)
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

    def _constant(self, node: Node) -> Any:
        return attribute_of(self._graph, node) if node.op == "get_attr" else None


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
