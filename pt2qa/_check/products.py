"""The ops that multiply matrices and how much of each is quantized; which annotated values are rounded, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, handle_of, op_of, walk
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, size_hint
from pt2qa._simulator.flops import FlopCounter, own_multiply_adds
from pt2qa._simulator.products import PRODUCTS, Read, State, reads_of, state_of
from pt2qa._simulator.program import Program
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import Derives, Point, is_quantized
from pt2qa.overrides.sharing import COMPARED, root_of


@dataclass(frozen=True, slots=True)
class Product:
    """An op that multiplies matrices.

    Attributes:
        macs: its multiply-adds for the example inputs.
        share: its share of the model's multiply-adds, 0..1.
        owner: name of the higher-order op whose nested graph contains it; empty at the top.
        annotated: whether the quantizer annotated it; None if no annotation is known.
        state: which of its operands are rounded: all, its input, its weight, none.
    """

    name: str
    op: str
    node: Node
    macs: int
    share: float
    owner: str
    annotated: bool | None
    state: State


def products_of(
    graph: GraphModule, names: Mapping[int, OpName], annotations: Annotations | None, converted: Program | None
) -> tuple[Product, ...]:
    """The ops of a float graph and its nested graphs that multiply something by an activation, in graph order.

    What is rounded follows from the annotations or, in a converted graph, from its sites.
    """
    states = states_of(annotations) if converted is None and annotations is not None else {}
    if converted is not None:
        states |= {
            step.name: state_of(step.op, reads)
            for step, reads in reads_of(converted, nested=True)
            if step.op in PRODUCTS
        }
    annotated = None if annotations is None else annotations.ops.keys()
    found: list[tuple[str, Node, int, str]] = []
    for placed in walk(graph):
        node, handle = placed.node, handle_of(placed.node)
        if node.op != "call_function" or handle is None or handle not in names or op_of(node.target) not in PRODUCTS:
            continue
        owner = handle_of(placed.owner) if placed.owner is not None else None
        inside = names[owner].name if owner is not None and owner in names else ""
        found.append((names[handle].name, node, multiply_adds(node), inside))
    total = sum(macs for _, _, macs, _ in found) or 1
    return tuple(
        Product(
            name=name,
            op=op_of(node.target),
            node=node,
            macs=macs,
            share=macs / total,
            owner=owner,
            annotated=None if annotated is None else name in annotated,
            state=_if_annotated(states.get(name, "float"), node, annotated is None or name in annotated),
        )
        for name, node, macs, owner in found
    )


def _if_annotated(state: State, node: Node, is_annotated: bool) -> State:
    """The state of an op that may itself be unannotated: the ops before it may still round their outputs."""
    if is_annotated or state != "quantized":
        return state
    return "input only" if any(source.op == "get_attr" for source in node.all_input_nodes) else "float"


def multiply_adds(node: Node) -> int:
    """The multiply-adds of a matrix product for the sizes it was traced with, by torch's formulas or our own."""
    args, kwargs = pytree.tree_map_only(Node, lambda source: source.meta.get(VALUE), (node.args, node.kwargs))
    args, kwargs = pytree.tree_map(_sized, (args, kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    op = op_of(node.target)
    if len(tensors) < 2:
        return 0
    own = own_multiply_adds(op, tensors)
    if own is not None:
        return own
    assert callable(node.target)
    counter = FlopCounter()
    with torch.no_grad(), counter:
        try:
            node.target(*args, **kwargs)
        except RuntimeError:
            # A data-dependent size counts as 1, which may be too small for the op: its share is unknown.
            return 0
    return counter.total // 2


def _sized(value: Any) -> Any:
    """A traced value without data and without symbolic sizes, so that counting adds no guard to a program."""
    if isinstance(value, Tensor):
        return torch.empty([size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def states_of(annotations: Annotations) -> dict[str, State]:
    """Which operands of each product are rounded, by name, as a quantizer annotated them."""
    nodes = annotations.graph.nodes
    return {
        node.name: state_of(
            node.op,
            [
                Read(position, nodes[source].constant, spec_read(annotations, source, node.key) is not None)
                for source, position in node.inputs.items()
            ],
        )
        for node in nodes.values()
        if node.op in PRODUCTS
    }


def own_spec(annotations: Annotations, point: Point) -> Any | None:
    """The spec that a point resolves to; None if it has none, leads nowhere, or rounds nothing."""
    root = root_of(annotations.specs, point)
    if root is None or not is_quantized(annotations.specs[root], annotations.graph.nodes[point[0]]):
        return None
    spec = annotations.specs[root]
    return spec.spec if isinstance(spec, Derives) else spec


def spec_read(annotations: Annotations, source: str, reader: str) -> Any | None:
    """The spec with which an op reads a value; None if it reads it in float.  Both go by their fx names."""
    for point in ((source, reader), (source, "")):
        if (spec := own_spec(annotations, point)) is not None:
            return spec
    # A constant may be rounded before it is reshaped.
    node = annotations.graph.nodes[source]
    deeper = node.inputs if node.constant else ()
    return next((spec for one in deeper if (spec := spec_read(annotations, one, source)) is not None), None)


def differing(one: Any, other: Any) -> tuple[str, ...]:
    """The attributes of :data:`COMPARED` in which two specs differ."""
    missing = object()
    return tuple(name for name in COMPARED if getattr(one, name, missing) != getattr(other, name, missing))
