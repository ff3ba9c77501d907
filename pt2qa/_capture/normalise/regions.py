"""Inlines ``torch.no_grad()`` and switched-off autocast regions.

``torch.export`` puts such a region into a nested graph, where no quantizer looks: a forward under ``no_grad`` silently
stays in float.  Outside of training, the region computes the same without its wrapper.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import drop_attribute, graph_modules, names_by_node, read_instead
from pt2qa._graph.handles import attribute_of, nested_graphs, op_of

_RULE: Final = "nested region"


def inline_regions(program: ExportedProgram) -> tuple[Change, ...]:
    """Inlines the ops of grad-mode regions, and of autocast regions that are off, in place.

    In QAT, gradients then flow through ops that were under ``no_grad``.  Autocast regions that are on compute in
    another dtype, and stay nested.
    """
    changes = []
    while found := _find(program):
        graph_module, region = found
        name = names_by_node(program)[region]
        count = sum(node.op == "call_function" for node in nested_graphs(region, graph_module)[0][1].graph.nodes)
        _inline(program, graph_module, region)
        grad = op_of(region.target) == "wrap_with_set_grad_enabled"
        kind = "no_grad or enable_grad" if grad else "switched-off autocast"
        changes.append(Change(_RULE, name, f"its {count} ops are now in the graph around the {kind} region"))
    return tuple(changes)


def _find(program: ExportedProgram) -> tuple[GraphModule, Node] | None:
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and _operands(node) is not None and _is_simple(node, graph_module):
                return graph_module, node
    return None


def _operands(node: Node) -> tuple[object, ...] | None:
    """The arguments of the region's nested graph; None if the node is not a region to inline."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[2:]
    if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2] is False:
        return node.args[5:]
    return None


def _is_simple(node: Node, graph_module: GraphModule) -> bool:
    """Whether the region returns a tuple of nodes that is only unpacked, which is all that export writes."""
    bodies = nested_graphs(node, graph_module)
    if len(bodies) != 1:
        return False
    (results,) = bodies[0][1].graph.output_node().args
    taken_apart = all(user.target is operator.getitem for user in node.users)
    return taken_apart and isinstance(results, (tuple, list)) and all(isinstance(result, Node) for result in results)


def _inline(program: ExportedProgram, graph_module: GraphModule, region: Node) -> None:
    (_, body), graph = nested_graphs(region, graph_module)[0], graph_module.graph
    operands = _operands(region)
    assert operands is not None
    placeholders = body.graph.find_nodes(op="placeholder")
    values: dict[Node, Node] = dict(zip(placeholders, operands, strict=True))  # type: ignore[arg-type]
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copy = graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                copy.target = _move_attribute(body, node, graph_module)
            copy.meta = dict(node.meta)
            values[node] = copy
    (results,) = body.graph.output_node().args
    for user in list(region.users):
        read_instead(program, user, values[results[user.args[1]]])  # type: ignore[index]
        graph.erase_node(user)
    readers = [node for node in region.all_input_nodes if node.op == "get_attr"]
    graph.erase_node(region)
    for reader in readers:
        drop_attribute(graph_module, reader)
    graph_module.recompile()


def _move_attribute(body: GraphModule, reader: Node, graph_module: GraphModule) -> str:
    name = str(reader.target).replace(".", "_")
    free = next(new for i in range(1, 10**6) if not hasattr(graph_module, new := f"{name}_{i}"))
    setattr(graph_module, free, attribute_of(body, reader))
    return free
