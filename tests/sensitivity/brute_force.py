"""Sensitivity written out: for each place a copy of the converted graph that quantizes there alone, run as it is.

Copies are made by plain ``torch.fx``: a dequantize whose quantization is off gives way to what was quantized, and an
integer constant to the reference graph's.  pt2qa says which nodes a place has, and computes nothing.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import pt2qa
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.torch import pytree
from pt2qa._sensitivity.site_groups import find_site_groups


def noises(
    pair: pt2qa.QuantizedPair,
    batches: Sequence[Any],
    group: Any = None,
    post_process: Callable[[Any], Any] = lambda outputs: outputs,
) -> list[float]:
    """Squared output error of each place, summed over batches; nan where a value is not finite on one side alone."""

    def outputs(graph: GraphModule) -> list[list[Tensor]]:
        """Of each batch, from the same state."""
        found = []
        state = [(value, value.clone()) for value in (*graph.parameters(), *graph.buffers())]
        for batch in batches:
            args = tuple(value.clone() for value in (batch if isinstance(batch, tuple) else (batch,)))
            with torch.no_grad():
                leaves = pytree.tree_leaves(post_process(graph(*args)))
                found.append([leaf.double() for leaf in leaves if leaf.is_floating_point()])
                for value, before in state:
                    value.copy_(before)
        return found

    references = outputs(copy.deepcopy(pair.reference))
    return [
        sum(
            float(((ref - alone).masked_fill(ref == alone, 0.0).nan_to_num(math.nan, math.nan, math.nan) ** 2).sum())
            for reference, isolated in zip(references, outputs(quantized_at(pair, place.sites)), strict=True)
            for ref, alone in zip(reference, isolated, strict=True)
        )
        for place in find_site_groups(pair.program, group)
    ]


def quantized_at(pair: pt2qa.QuantizedPair, sites: Collection[int]) -> GraphModule:
    """A copy of the converted graph in which these sites alone quantize."""
    graph = copy.deepcopy(pair.quantized)
    on = {step.node for step in pair.program.steps if step.site in sites}
    on_constants = {(c.handle, c.argument) for c in pair.program.constants if c.site in sites}
    floats = {handle_of(node): node for node in pair.reference.graph.nodes if node.op == "call_function"}
    nodes = {node.name: node for node in graph.graph.nodes}
    kept = {nodes[name].args[0] for name in on}
    for node in nodes.values():
        if not _dequantizes(node):
            continue
        source = node.args[0]
        if source.op != "get_attr" and source.args[0].op != "get_attr":
            if source not in kept:
                node.replace_all_uses_with(source.args[0])
            continue
        for user in list(node.users):
            for position, argument in enumerate(user.args):
                if argument is node and (handle_of(user), position) not in on_constants:
                    user.update_arg(position, _constant(graph, floats[handle_of(user)].args[position], pair.reference))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _dequantizes(node: Node) -> bool:
    from_float16 = ".convert_element_type" in str(node.target) and node.args[1] == torch.float32
    return from_float16 or ".dequantize_per_" in str(node.target)


def _constant(graph: GraphModule, read: Any, reference: GraphModule) -> Node:
    """A constant of the reference, or what it computes of constants alone, as a node of another graph."""

    def value_of(node: Node) -> Tensor:
        if node.op == "get_attr":
            return operator.attrgetter(node.target)(reference)
        with torch.no_grad():
            return node.target(*torch.fx.map_arg(node.args, value_of), **torch.fx.map_arg(node.kwargs, value_of))

    name = f"float_{read.name}"
    graph.register_buffer(name, value_of(read).detach().clone())
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        return graph.graph.get_attr(name)
