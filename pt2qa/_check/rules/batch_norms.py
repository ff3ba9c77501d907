"""Batch norms that prepare cannot fold, or must not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext, require
from pt2qa._check.rules.modes import trains
from pt2qa._check.rules.modules import constants_by_memory
from pt2qa._graph.copies import copy_without_values
from pt2qa._graph.handles import handle_of, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa._simulator.products import CONVOLUTIONS
from pt2qa.plugins import Found
from pt2qa.plugins.rules import rule

_FOLDING = CONVOLUTIONS | {"linear"}
_QAT = "to quantization-aware training, whose prepare folds no batch norm"


@rule(
    severity="error",
    title="batch norms that are folded although something else reads the weight or the value",
    why="prepare_pt2e multiplies a batch norm into the weight before it. Other readers of that weight, or of the value "
    "before the batch norm, then compute with the wrong numbers, before anything is rounded.",
    fix="give each use a convolution of its own (copy.deepcopy), or apply the batch norm to the sum instead",
    needs=("graph",),
)
def invalid_fold(context: CheckContext) -> Iterator[Found]:
    require(not context.qat, _QAT)
    graph = context.graph
    norms = [node for node in graph.graph.nodes if _folds(node)]
    require(norms, "to models without a batch norm after a convolution or linear")
    normed = {norm.args[0] for norm in norms}
    for constants in constants_by_memory(graph).values():
        readers = [reader for constant in constants for reader in constant.users if _reads_weight(reader, constant)]
        folded = [reader for reader in readers if reader in normed]
        if not folded:
            continue
        others = [reader for reader in readers if reader not in normed]
        users = [user for reader in folded for user in reader.users]
        own, bypassed = [user for user in users if _folds(user)], [user for user in users if not _folds(user)]
        weight = str(constants[0].target)
        name = context.name_of(folded[0])
        if len({tuple(map(str, norm.args[1:5])) for norm in own}) > 1:
            yield Found(name, f"different batch norms follow the one weight {weight}: {_listed(context, own)}")
        elif why := _bias_at_fault(folded):
            yield Found(name, f"{weight} is used {len(folded)} times, {why}")
        elif others:
            yield Found(name, f"its batch norm is folded into {weight}, which {_listed(context, others)} reads too")
        elif bypassed:
            yield Found(name, f"its batch norm is folded into it, but {_listed(context, bypassed)} reads it without")


def _folds(node: Node) -> bool:
    """Whether a node is a batch norm that prepare folds into its producer."""
    before = node.args[0] if node.op == "call_function" and op_of(node.target) == "batch_norm" else None
    if not isinstance(before, Node) or before.op != "call_function" or op_of(before.target) not in _FOLDING:
        return False
    # prepare leaves a linear with more than two dimensions alone.
    return op_of(before.target) != "linear" or before.meta[VALUE].dim() == 2


def _bias_at_fault(folded: list[Node]) -> str:
    """What is wrong with the biases of several uses of one weight: torchao folds at the first use only."""
    biases = {reader.args[2] if len(reader.args) > 2 else None for reader in folded}
    if len(folded) > 1 and biases == {None}:
        return "without a bias: prepare writes the batch norm into a new bias, and zeros into that at the next use"
    if len(biases) > 1:
        return "with different biases: prepare folds the batch norm only into the first"
    return ""


def _reads_weight(reader: Node, constant: Node) -> bool:
    return reader.op == "call_function" and op_of(reader.target) in _FOLDING and reader.args[1] is constant


def _listed(context: CheckContext, nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys("the output" if node.op == "output" else context.name_of(node) for node in nodes))


@rule(
    severity="warning",
    title="batch norms that cannot be folded",
    why="A batch norm is free only if it is multiplied into the weight of the convolution or linear before it. "
    "Elsewhere it runs in float, between a dequantize and a quantize; and as soon as one is left, convert_pt2e spends "
    "about ten seconds looking for QAT patterns.",
    fix="put the batch norm directly after a convolution (conv, norm, relu instead of norm, relu, conv), or expect its "
    "time in float",
    needs=("graph",),
)
def unfoldable_batch_norm(context: CheckContext) -> Iterator[Found]:
    require(not context.qat, _QAT)
    require(any(_is_batch_norm(node) for node in context.graph.graph.nodes), "to models without batch norm")
    for node in _unfolded(context.graph):
        before = node.all_input_nodes[0]
        op = "an input" if before.op == "placeholder" else op_of(before.target)
        rank = f" with {before.meta[VALUE].dim()} dimensions" if op == "linear" else ""
        yield Found(context.name_of(node), f"it reads {op}{rank}, and stays a float op")


def _unfolded(graph: GraphModule) -> list[Node]:
    # What is folded depends on no weight.
    folded = copy_without_values(graph)
    with warnings.catch_warnings():
        # of linears that it does not fold, which this rule looks for
        warnings.filterwarnings("ignore", message="Not fusing linear")
        fold_batch_norms(folded)
    left = {handle_of(node) for node in folded.graph.nodes if _is_batch_norm(node)}
    return [node for node in graph.graph.nodes if _is_batch_norm(node) and handle_of(node) in left]


def _is_batch_norm(node: Node) -> bool:
    return node.op == "call_function" and op_of(node.target) == "batch_norm" and not trains(node)
