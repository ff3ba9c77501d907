"""Replaces a composite op with the ops of its decomposition.

``run_decompositions`` would also rewrite the rest of the program.  Here, a decomposition is traced on the values that
one op was traced with, and its ops take that op's place.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.normalise.editing import read_instead
from pt2qa._graph.internals.nodes import CUSTOM, VALUE, origin_of
from pt2qa._graph.internals.torch import make_fx, pytree


def trace(node: Node, decomposition: Callable[..., Any]) -> GraphModule:
    """The ops of ``decomposition(*args, **kwargs)`` for an op's arguments; a placeholder for each node in them."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    values = [leaf.meta[VALUE] for leaf in flat if isinstance(leaf, Node)]

    def run(*tensors: Tensor) -> object:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in flat], spec)
        return decomposition(*args, **kwargs)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # from tracing, irrelevant here
        # With MKL-DNN on, torch would decompose an LSTM into another opaque op.
        with torch.backends.mkldnn.flags(enabled=False):
            return make_fx(run, pre_dispatch=True)(*values)


def operands_of(node: Node, body: GraphModule) -> dict[Node, Node]:
    """The node of the program that each placeholder of a traced ``body`` represents."""
    operands = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    return dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))


def put_instead(
    program: ExportedProgram, node: Node, body: GraphModule, notes: Mapping[Node, dict[str, Any]] | None = None
) -> None:
    """Replaces ``node``, at the top level of a program, with the ops of a traced ``body``, in place.

    Readers of its outputs then read the body's; ``notes`` has what the copy of each op of the body has in its metadata.
    """
    graph = program.graph
    values = operands_of(node, body)
    operands = set(values.values())
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op != "call_function":
                continue
            copy = graph.node_copy(inner, values.__getitem__)
            copy.meta = origin_of(node) | {VALUE: inner.meta[VALUE]}
            if notes is not None:
                copy.meta[CUSTOM] = dict(notes[inner])
            values[inner] = copy
    results = body.graph.output_node().args[0]
    if isinstance(results, Node):
        read_instead(program, node, values[results])
    else:
        leaves = pytree.tree_leaves(results)
        for user in list(node.users):
            assert user.target is operator.getitem
            read_instead(program, user, values[leaves[cast(int, user.args[1])]])
            graph.erase_node(user)
    graph.erase_node(node)
    for made in reversed(list(values.values())):
        if not made.users and made not in operands:
            graph.erase_node(made)
    program.graph_module.recompile()
