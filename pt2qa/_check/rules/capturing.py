"""What a model takes and returns, in which mode it is, which ops hide others, and whether it can be captured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from pt2qa._capture.inputs import as_call, leaf_names, share_memory
from pt2qa._check.context import NO_INPUTS, CheckContext, require
from pt2qa._graph.handles import nested_graphs, op_of, user_inputs, walk
from pt2qa._graph.internals.nodes import VALUE, calls_guards
from pt2qa._graph.internals.torch import BatchNorm, Dropout, InstanceNorm, OpOverload, arguments_of, pytree
from pt2qa._simulator.products import ATTENTION, CELLS, RECURRENT
from pt2qa.errors import CaptureError
from pt2qa.plugins import DoesNotApplyError, Found, Severity
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="dropout or batch norm in training mode",
    why="Dropout draws random numbers and batch norm uses the statistics of each batch, so the reference and the "
    "quantized model differ by chance, and batch norms cannot be folded.",
    fix="call model.eval() before export; for quantization-aware training too: pt2qa.quantize(..., qat=True) trains "
    "the exported graph",
)
def train_mode(context: CheckContext) -> Iterator[Found]:
    if context.given == "model":
        for name, module in context.model.named_modules():
            if module.training and _behaves(module):
                yield Found(name, f"{type(module).__name__} is in training mode")
        return
    require(context.given != "prepared", "to graphs that are being calibrated or trained")
    require(not (context.qat and context.is_exported), "to programs that are to be trained")
    fix = "call model.eval() before torch.export; eval() of what it returns raises NotImplementedError "
    fix += "(torchao.quantization.pt2e.move_exported_model_to_eval(graph) does it there). A program that is to be "
    fix += "trained: pt2qa.check(..., qat=True)"
    for name, node in context.nodes.items():
        if trains(node):
            yield Found(name, f"{op_of(node.target)} was exported in training mode", fix=fix)


def trains(node: Node) -> bool:
    if op_of(node.target) in RECURRENT:
        return bool(argument_of(node, "train")) and bool(argument_of(node, "dropout"))
    return bool(argument_of(node, "training", "train")) or bool(argument_of(node, "dropout_p"))


def argument_of(node: Node, *names: str) -> Any:
    """The value of the first of the named arguments that the op has, or its default; None without one.

    >>> x = torch.fx.Graph().placeholder("x")
    >>> argument_of(x.graph.call_function(torch.ops.aten.dropout.default, (x, 0.5, True)), "training", "train")
    True
    """
    for position, argument in enumerate(arguments_of(node.target)):
        if argument.name in names:
            if position < len(node.args) and not argument.kwarg_only:
                return node.args[position]
            return node.kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None)
    return None


def _behaves(module: nn.Module) -> bool:
    """Whether a module computes something else in training mode."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    if isinstance(module, InstanceNorm):
        return module.track_running_stats
    return isinstance(module, (Dropout, BatchNorm, nn.RReLU))


@rule(
    severity="warning",
    title="ops that draw random numbers in eval mode",
    why="The reference and the quantized model draw different numbers, so the difference of their outputs says nothing "
    "about int8, and observers see values that never recur.",
    fix="make the random numbers an input of forward, or draw them only in training: if self.training",
    needs=("graph",),
)
def random_op(context: CheckContext) -> Iterator[Found]:
    for name, node in context.nodes.items():
        random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        # The rule train-mode looks at ops that draw numbers in training only.
        if random and argument_of(node, "train", "training", "dropout_p") is None:
            yield Found(name, f"{op_of(node.target)} draws new random numbers in each run")


@rule(
    severity="error",
    title="the model cannot be captured",
    why="torch.export, or pt2qa's check of its result, fails here; nothing else can be said about the model.",
    fix="pt2qa.capture(model, args) raises the error with torch's whole message",
)
def capture_fails(context: CheckContext) -> Iterator[Found]:
    require(context.given == "model", "to what is captured already")
    require(not any(train_mode.find(context)), "to models in training mode")
    require(context.args is not None or context.kwargs is not None, NO_INPUTS)
    require(not any(aliased_inputs.find(context)), "to example inputs that share memory")
    if context.known("capture") is None:
        error = context.errors["capture"]
        what, fix = (error.what, error.advice) if isinstance(error, CaptureError) else (str(error), "")
        if isinstance(error, CaptureError) and error.more:
            # A check shows no message of torch to point to, and has no strict= of its own.
            fix += ": pt2qa.check(pt2qa.capture(model, args, strict=...))"
        yield Found("", " ".join(what.split()).rstrip("."), fix=fix.rstrip("."))


@rule(
    severity="error",
    title="example inputs that share memory",
    why="torch.export takes tensors that share memory, such as h = c = zeros, for one input: the program reads one of "
    "them instead of both, and its outputs are wrong.",
    fix="give each input a tensor of its own: pass h.clone()",
)
def aliased_inputs(context: CheckContext) -> Iterator[Found]:
    """Pairs of inputs by the second, and inputs that are parameters of the model."""
    args, kwargs = _inputs(context)
    inputs = [(name, value) for name, value in leaf_names(args, kwargs) if isinstance(value, Tensor)]
    for (first, a), (second, b) in combinations(inputs, 2):
        if share_memory(a, b):
            yield Found(second, f"is one tensor with {first}" if a is b else f"shares memory with {first}")
    state = context.program.state_dict.items() if context.given == "program" else context.model.state_dict().items()
    for owned, tensor in state:
        for name, value in inputs:
            if isinstance(tensor, Tensor) and share_memory(tensor, value):
                yield Found(name, f"shares memory with the model's {owned}")


def _inputs(context: CheckContext) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if context.given == "program":
        # Not a copy's parameters, which share nothing.
        return require(context.value.example_inputs, "to programs without example inputs")  # type: ignore[no-any-return]
    require(context.given == "model", "to what was captured from inputs that are no longer known")
    require(context.args is not None or context.kwargs is not None, NO_INPUTS)
    try:
        return as_call(context.args, None if context.kwargs is None else dict(context.kwargs))
    except CaptureError as error:
        raise DoesNotApplyError(f"to inputs that capture refuses: {error}") from error


@rule(
    severity="note",
    title="inputs that accept one batch size",
    why="What torch.export makes for one size fails for others, or computes nonsense. torch checks the size by a node, "
    "_guards_fn, that stays in the graph through prepare and convert; pt2qa checks each batch itself.",
    fix="capture with dynamic_shapes if batches of other sizes occur, such as a smaller last one",
    needs=("graph",),
)
def fixed_batch(context: CheckContext) -> Iterator[Found]:
    graph = context.graph
    values = {str(node.target): node.meta.get(VALUE) for node in user_inputs(graph)}
    inputs = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.dim()}
    require(inputs, "to models without tensors as inputs")
    # A dynamic dimension's size is a symbol, which must not be compared.
    if any(not isinstance(value.shape[0], int) for value in inputs.values()):
        return
    guarded = any(calls_guards(node) for node in graph.graph.nodes)
    shapes = "{" + ", ".join(f"{name!r}: {{0: torch.export.Dim.AUTO}}" for name in inputs) + "}"
    for name, value in inputs.items():
        if guarded:
            why = "_guards_fn fails on any other, before and after convert"
            fix = f"export with dynamic_shapes={shapes}, or use the graph without guards"
            fix += ": program.module(check_guards=False)"
            yield Found(name, f"accepts size {value.shape[0]} in dimension 0; {why}", "warning", fix)
        elif context.given != "graph":
            fix = f"capture with dynamic_shapes={shapes} if batches of other sizes occur, such as a smaller last one"
            yield Found(name, f"accepts only batches of {value.shape[0]}", fix=fix)


@rule(
    severity="warning",
    title="outputs that cannot be compared",
    why="argmax and thresholds hide the error of int8 until a class flips. find_bad_cases, sensitivity and reconfigure "
    "need floating-point outputs.",
    fix="also return the values before argmax or the comparison, or decide outside of the model",
    needs=("graph",),
)
def no_float_output(context: CheckContext) -> Iterator[Found]:
    leaves = pytree.tree_leaves(context.graph.graph.output_node().args)
    values = [leaf.meta.get(VALUE) for leaf in leaves if isinstance(leaf, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    require(tensors, "to models that return no tensor")
    if not any(value.is_floating_point() or value.is_complex() for value in tensors):
        dtypes = ", ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in tensors))
        yield Found("", f"forward returns only {dtypes}")


@rule(
    severity="warning",
    title="recurrent ops, whose inner products no quantizer sees",
    why="torch.export writes an LSTM, GRU or RNN as one op with all its matrix products inside. Quantizers leave it in "
    "float.",
    fix='pt2qa.capture(model, args, decompose=("lstm", "gru", "rnn")) decomposes it into linears',
    needs=("graph",),
)
def opaque_recurrent(context: CheckContext) -> Iterator[Found]:
    """An error if they hold half of the model's weights: int8 then saves less than 3/8 of them."""
    graph = context.graph
    total = sum(parameter.numel() for parameter in graph.parameters())
    for name, node in context.nodes.items():
        op = op_of(node.target)
        if node.op != "call_function" or op not in RECURRENT | CELLS:
            continue
        values = [source.meta.get(VALUE) for source in node.all_input_nodes if source.op == "get_attr"]
        matrices = [value.numel() for value in values if isinstance(value, Tensor) and value.dim() == 2]
        held = sum(matrices)
        share = held / total if total else 0.0
        why = f"{len(matrices)} matrices with {held:,} of the model's {total:,} parameters ({share:.0%}) stay in float"
        fix = "write the cell with nn.Linear: a product of the input, one of the state, and the gates"
        if op not in CELLS:
            call = f'pt2qa.capture(model, args, decompose=("{op.partition("_")[0]}",))'
            fix = f"{call} unrolls it into linears, for sequences of one length"
        yield Found(name, why, "error" if share >= 0.5 else "warning", fix, value=share)


@rule(
    severity="note",
    title="attention as one op, whose inner products no quantizer sees",
    why="scaled_dot_product_attention holds two matrix products and a softmax. Quantizers leave it in float, as most "
    "backends require; its inputs may still be rounded.",
    fix='nothing if float attention is intended; pt2qa.capture(model, args, decompose=("attention",)) decomposes it '
    "into matmul, softmax and matmul",
    needs=("graph",),
)
def opaque_attention(context: CheckContext) -> Iterator[Found]:
    for name, node in context.nodes.items():
        if node.op == "call_function" and op_of(node.target) in ATTENTION:
            yield Found(name, "its two matrix products are computed in float")


_INLINED = {
    "wrap_with_set_grad_enabled": ("a forward under torch.no_grad()", "torch.no_grad()"),
    "wrap_with_autocast": ("a region without autocast", "autocast"),
}
"""What ``pt2qa.capture`` inlines, and what to remove from forward."""


@rule(
    severity="warning",
    title="ops inside the nested graphs of cond, loops and regions",
    why="The ops of a branch, a loop or a torch.no_grad() region are in graphs of their own. prepare_pt2e annotates "
    "those of while_loop and scan like the outer graph, and no others. Edits reach none of them, and their ops have no "
    "rows.",
    fix="move what should be quantized out of the branch or the loop, or write the choice with torch.where",
    needs=("graph",),
)
def nested_graph(context: CheckContext) -> Iterator[Found]:
    graph = context.graph
    for node in graph.graph.nodes:
        if bodies := nested_graphs(node, graph):
            count = sum(placed.node.op == "call_function" for _, body in bodies for placed in walk(body))
            what = f"the {count} ops in its nested graphs" if count != 1 else "the one op in its nested graph"
            yield Found(context.name_of(node), *_explained(node, what), value=count)


def _explained(node: Node, what: str) -> tuple[str, Severity, str]:
    op = op_of(node.target)
    if op in ("while_loop", "scan"):
        why = f"prepare quantizes {what}, but edits do not reach them, and only rounded values have rows"
        return why, "warning", ""
    if op not in _INLINED:
        return f"prepare leaves {what} in float, and they have no rows", "warning", ""
    region, cause = _INLINED[op]
    if op == "wrap_with_autocast" and node.args[2] is not False:
        why = f"{what} compute in another dtype under autocast, and are neither quantized nor analysed"
        return why, "warning", f"remove {cause} from forward"
    why = f"{what} stay in float: {region} is a graph of its own, which no quantizer enters"
    return why, "error", f"quantize the graph of pt2qa.capture, which inlines it, or remove {cause} from forward"
