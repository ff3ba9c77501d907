"""Ops that draw random numbers in eval mode."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._check.rules.train_mode import argument_of
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.torch import OpOverload
from pt2qa.plugins import Found, Rule

_TRAINING_ARGUMENTS = ("train", "training", "dropout_p")
"""Arguments by which an op draws random numbers or not; train-mode looks at them."""


def find(context: CheckContext) -> Iterator[Found]:
    """Ops of the graph that draw random numbers whatever the mode."""
    for name, node in context.nodes.items():
        if _is_random(node):
            yield Found(name, f"{op_of(node.target)} draws new random numbers in each run")


def _is_random(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return argument_of(node, *_TRAINING_ARGUMENTS) is None


RULE = Rule(
    id="random-op",
    severity="warning",
    title="ops that draw random numbers in eval mode",
    why="The reference and the quantized model draw different numbers, so that the difference of their outputs says "
    "nothing about int8, and observers see values that do not come again.",
    fix="take the random numbers as an input of forward, or leave them out in eval mode: if self.training",
    needs=("graph",),
    find=find,
)
