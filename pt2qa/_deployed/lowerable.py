"""Which values of the converted graph to observe in the deployed program, and the graph that is lowered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from pt2qa._graph.copies import copy_nodes
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import dynamic_dimensions, pytree
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.outputs import output_names, plain
from pt2qa._simulator.program import QuantParams, Step
from pt2qa._simulator.verification import add_state


@dataclass(frozen=True, slots=True)
class ObservedValue:
    """A value to observe.

    Attributes:
        step: the step of the simulator that computes it: a site, or an op whose output nothing rounds.
        owner: the op's own step; None for a model input.
        node: the name of its node in the graph that is lowered: a quantize node, or the op.
        params: how its integers are dequantized; None for a float value.
        refused: why it cannot be observed on any backend; empty if it can.
    """

    step: Step
    owner: Step | None
    node: str
    params: QuantParams | None
    refused: str = ""

    def value(self, observed: Tensor) -> Tensor:
        """A new tensor with what readers of an observed value get: integers dequantized as the converted graph does."""
        if self.params is None or observed.is_floating_point():
            return observed.clone()
        scale, zero_point = self.params.scale, self.params.zero_point
        assert isinstance(scale, float), "a value with several scales is not observed"
        assert isinstance(zero_point, int)
        return observed.to(torch.float32).sub_(zero_point).mul_(scale)


@dataclass(frozen=True, slots=True)
class Lowerable:
    """The converted graph with nodes of its own and flat inputs and outputs, and the values to observe in it."""

    graph: GraphModule
    values: tuple[ObservedValue, ...]
    fused: tuple[tuple[Step, str], ...]
    """Ops without a value of their own, each with the last op of its kernel."""
    original: Mapping[str, str]
    """By the name of a node in this graph, that in the pair's quantized graph; copying renames some."""

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(observed.node for observed in self.values if not observed.refused))

    @property
    def digest(self) -> str:
        """Identifies the graph with its constants, scales and values to observe."""
        digest = hashlib.sha256()
        number = {node: str(position) for position, node in enumerate(self.graph.graph.nodes)}
        for node in self.graph.graph.nodes:
            args = torch.fx.map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}")
            digest.update(f"{node.op} {node.target} {args}\n".encode())
        add_state(digest.update, self.graph)
        digest.update(" ".join(self.wanted).encode())
        return digest.hexdigest()[:16]

    def dynamic_shapes(self) -> tuple[Any, ...] | None:
        """The sizes that may vary, by input, as for ``torch.export.export``; None if all are fixed."""
        values = [node.meta.get(VALUE) for node in self.graph.graph.find_nodes(op="placeholder")]
        shapes = dynamic_dimensions(values)
        return shapes if any(shapes) else None


def lowerable(pair: QuantizedPair) -> Lowerable:
    converted = pair.quantized if pair.origin is None else pair.origin.graph
    graph = copy_nodes(converted)
    names = dict(zip((node.name for node in converted.graph.nodes), graph.graph.nodes, strict=True))
    if pair.origin is not None:
        names = {own: names[name] for own, name in pair.origin.names.items()}
    output = graph.graph.output_node()
    output.args = (tuple(leaf for leaf in pytree.tree_leaves(plain(output.args[0])) if is_tensor(leaf)),)
    graph.graph.set_codegen(CodeGen())
    graph.recompile()
    original = {node.name: name for name, node in names.items()}
    steps = pair.program.steps
    fused = [(steps[at], steps[region.steps[-1]].name) for region in pair.program.regions for at in region.steps[:-1]]
    return Lowerable(graph, tuple(_observed(pair, names)), tuple(fused), original)


def _observed(pair: QuantizedPair, names: dict[str, Node]) -> Iterator[ObservedValue]:
    program = pair.program
    owners = {step.out: step for step in program.steps if step.site is None}
    # Dynamic scales are computed inside the kernel that reads the value, so the value is observed before.
    rounded = {
        step.reads[0] for step in program.steps if step.site is not None and not program.sites[step.site].params.dynamic
    }
    last = {region.steps[-1] for region in program.regions}
    for step in program.steps:
        if step.site is not None:
            params = program.sites[step.site].params
            if params.dynamic or step.duplicate_of is not None:
                continue
            quantize = names[step.node].args[0]
            assert isinstance(quantize, Node), "a dequantize node reads what a quantize node writes"
            single = isinstance(params.scale, float) and isinstance(params.zero_point, int)
            refused = "" if single else f"it has no single scale ({params.dtype})"
            yield ObservedValue(step, owners.get(step.reads[0]), quantize.name, params, refused)
        elif step.index in last and step.out not in rounded:
            node = names[step.node]
            value = node.meta.get(VALUE)
            if isinstance(value, Tensor) and value.is_floating_point():
                yield ObservedValue(step, step, node.name, None)


def is_tensor(leaf: Any) -> bool:
    """Whether an output of a graph is a tensor, not a number, a size or None."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(leaf, Node) and not isinstance(leaf.meta.get(VALUE), numbers)


def tensor_outputs(graph_module: GraphModule) -> dict[int, str]:
    """The names of a graph's outputs that are tensors, by their number among all of them."""
    leaves = pytree.tree_leaves(plain(graph_module.graph.output_node().args[0]))
    names = enumerate(output_names(graph_module, len(leaves)))
    return {number: name for number, name in names if is_tensor(leaves[number])}


def leaves_of(outputs: Any) -> list[Any]:
    """The flat outputs of a run, without None, numbers and sizes, which are not compared."""
    return [leaf for leaf in pytree.tree_leaves(plain(outputs)) if isinstance(leaf, Tensor)]


def inputs_for(values: Sequence[Any]) -> tuple[Any, ...]:
    """Copies of flat inputs, so that no backend can write to the caller's."""
    return tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in values)
