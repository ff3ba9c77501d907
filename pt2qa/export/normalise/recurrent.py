"""Takes recurrent ops apart on request (trap 25).

``aten.lstm.input`` is one op with all its matrix products inside: every quantizer leaves it float, in silence.  torch
has decompositions of it into linears; running them with ``run_decompositions`` rewrites the rest of the program too
(trap 36), so here only the recurrent op is replaced by its own decomposition.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pt2qa.export.changes import Change
from pt2qa.export.normalise.editing import names_by_node, read_instead

_RULE = "recurrent op"

RECURRENT = {
    "lstm": (torch.ops.aten.lstm.input, torch.ops.aten.lstm.data),
    "gru": (torch.ops.aten.gru.input, torch.ops.aten.gru.data),
    "rnn": (
        torch.ops.aten.rnn_tanh.input,
        torch.ops.aten.rnn_tanh.data,
        torch.ops.aten.rnn_relu.input,
        torch.ops.aten.rnn_relu.data,
    ),
}
"""The kinds that ``capture(decompose=...)`` takes, with their ops."""


def decompose_recurrent(program: ExportedProgram, kinds: Sequence[str]) -> tuple[Change, ...]:
    """Replaces recurrent ops by linears and elementwise ops, one step of the sequence after the other, in place.

    Args:
        program: the program.
        kinds: keys of :data:`RECURRENT`.
    """
    targets = {target for kind in kinds for target in RECURRENT[kind]}
    graph_module = program.graph_module
    wanted = [node for node in graph_module.graph.nodes if node.op == "call_function" and node.target in targets]
    changes = []
    for node in wanted:
        name = names_by_node(program)[node]
        linears = _replace(program, graph_module, node, _trace(node))
        changes.append(Change(_RULE, name, f"taken apart into {linears} linears and the ops between them"))
    return tuple(changes)


def _trace(node: Node) -> GraphModule:
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    values = [leaf.meta["val"] for leaf in flat if isinstance(leaf, Node)]

    def run(*tensors: Tensor) -> object:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in flat], spec)
        return decomposition_table[node.target](*args, **kwargs)  # type: ignore[index]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")  # which nobody asked for
        # With MKL-DNN on, torch decomposes an LSTM into another opaque op.
        with torch.backends.mkldnn.flags(enabled=False):
            return make_fx(run, pre_dispatch=True)(*values)


def _replace(program: ExportedProgram, graph_module: GraphModule, node: Node, body: GraphModule) -> int:
    """Puts the ops of ``body`` where ``node`` stood and returns how many linears there are among them."""
    graph = graph_module.graph
    operands = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    values: dict[Node, Node] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op != "call_function":
                continue
            copy = graph.node_copy(inner, values.__getitem__)
            copy.meta = {
                key: node.meta[key] for key in ("nn_module_stack", "stack_trace", "torch_fn") if key in node.meta
            }
            copy.meta["val"] = inner.meta["val"]
            values[inner] = copy
    results = pytree.tree_leaves(body.graph.output_node().args)
    for user in list(node.users):
        assert user.target is operator.getitem
        read_instead(program, user, values[results[cast(int, user.args[1])]])
        graph.erase_node(user)
    graph.erase_node(node)
    for made in reversed(list(values.values())):
        if not made.users and made.op == "call_function" and made not in operands:
            graph.erase_node(made)
    graph_module.recompile()
    return sum(inner.target is torch.ops.aten.linear.default for inner in body.graph.nodes)
