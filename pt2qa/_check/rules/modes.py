"""Models in training mode, or with random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from pt2qa._check.context import CheckContext, require
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import BatchNorm, Dropout, InstanceNorm, OpOverload, arguments_of
from pt2qa._simulator.products import RECURRENT
from pt2qa.plugins import Found
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
    for name, node in context.nodes.items():
        if trains(node):
            yield Found(name, f"{op_of(node.target)} was exported in training mode", fix=_FIX_EXPORTED)


def trains(node: Node) -> bool:
    if op_of(node.target) in RECURRENT:
        return bool(argument_of(node, "train")) and bool(argument_of(node, "dropout"))
    return bool(argument_of(node, "training", "train")) or bool(argument_of(node, "dropout_p"))


def argument_of(node: Node, *names: str) -> Any:
    """The value of the first of the named arguments that the op has, or its default; None without one.

    >>> import torch
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


_FIX_EXPORTED = (
    "call model.eval() before torch.export; eval() of what it returns raises NotImplementedError "
    "(torchao.quantization.pt2e.move_exported_model_to_eval(graph) does it there). A program that is to be trained: "
    "pt2qa.check(..., qat=True)"
)


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
