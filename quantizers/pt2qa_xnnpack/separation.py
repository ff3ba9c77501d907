"""Changes of a graph that ExecuTorch's XNNPACK delegate needs, and that cost nothing when it runs.

Needs torch alone: a printed ``quantizer.py`` has the source of this file.
"""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

CLAMPED = ("add", "sub", "mul", "linear", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d")
"""Ops whose kernels apply the activation behind them, as the limits of their output."""

WITH_BIAS = CLAMPED[3:]
"""Ops whose third argument is a bias."""

COPIES = ("clone", "alias", "dropout", "detach")
"""Ops that are removed before activations are fused."""


def for_xnnpack(graph_module: GraphModule) -> list[tuple[Node, str]]:
    """Edits a prepared or converted graph so that XNNPACK computes what it says; returns what was done to which op.

    The graph's own numbers stay.  ExecuTorch 1.4.1 holds a bias once, with the scale of the first product that reads
    it, so each product gets its own.  It fuses activations one by one, and the limits of the last overwrite those of
    the others, so the last gets the limits of all.

    >>> linear = torch.nn.Linear(4, 4)
    >>> model = torch.nn.Sequential(linear, torch.nn.Hardtanh(), torch.nn.ReLU(), linear)
    >>> graph = torch.export.export(model, (torch.zeros(1, 4),)).module()
    >>> [(str(node), done) for node, done in for_xnnpack(graph)]
    [('relu', 'has the limits 0..1'), ('linear_1', 'has a bias of its own')]
    """
    changed = []
    for node in graph_module.graph.nodes:
        limits = overwriting(node)
        if limits is not None and limits[0] < limits[1] < math.inf and limits[0] > -math.inf:
            node.target, node.args, node.kwargs = torch.ops.aten.hardtanh.default, (node.args[0], *limits), {}
            changed.append((node, "has the limits {:g}..{:g}".format(*limits)))
        bias = bias_read_by(node)
        if bias is not None and next(iter(bias.users)) is not node:
            _copy_bias(graph_module, node, bias)
            changed.append((node, "has a bias of its own"))
    graph_module.recompile()
    return changed


def bias_read_by(node: Node) -> Node | None:
    """The parameter that a product adds, if it is one."""
    bias = node.args[2] if _op(node) in WITH_BIAS and len(node.args) > 2 else None
    return bias if isinstance(bias, Node) and bias.op == "get_attr" else None


def overwriting(node: Node) -> tuple[float, float] | None:
    """The limits of an activation together with one before it, if XNNPACK fuses both and forgets the first's."""
    own, first = clamp_of(node), _fused_before(node)
    if own is None or first is None:
        return None
    before = overwriting(first) or clamp_of(first)
    assert before is not None
    both = (min(max(before[0], own[0]), own[1]), max(min(before[1], own[1]), own[0]))
    return None if both == own else both


def clamp_of(node: Node) -> tuple[float, float] | None:
    """What an activation that XNNPACK fuses clamps to; None for any other op."""
    if _op(node) == "relu":
        return 0.0, math.inf
    if _op(node) == "relu6":
        return 0.0, 6.0
    if _op(node) != "hardtanh":
        return None
    given: Any = dict(zip(("min_val", "max_val"), node.args[1:], strict=False)) | dict(node.kwargs)
    return float(given.get("min_val", -1)), float(given.get("max_val", 1))


def _fused_before(node: Node) -> Node | None:
    """The activation that alone this one reads, if XNNPACK fuses it with an op of its own kernel."""
    first = _alone_read(node)
    if first is None or clamp_of(first) is None:
        return None
    kernel = _alone_read(first)
    fused = kernel is not None and (_op(kernel) in CLAMPED or _fused_before(first) is not None)
    return first if fused else None


def _alone_read(node: Node) -> Node | None:
    """What a node reads, behind copies, if nothing else does."""
    while node.args and isinstance(source := node.args[0], Node) and len(source.users) == 1:
        if _op(source) not in COPIES:
            return source
        node = source
    return None


def _copy_bias(graph_module: GraphModule, node: Node, bias: Node) -> None:
    """Gives a product a copy of the bias, as a parameter of its own."""
    name = next(free for number in range(1, 10**6) if not hasattr(graph_module, free := f"{bias.name}_{number}"))
    value = operator.attrgetter(str(bias.target))(graph_module)
    setattr(graph_module, name, torch.nn.Parameter(value.detach().clone(), requires_grad=False))
    with node.graph.inserting_before(node):
        own = node.graph.get_attr(name)
    own.meta = copy.copy(bias.meta)
    node.args = (*node.args[:2], own, *node.args[3:])


def _op(node: Node) -> str:
    target: Any = getattr(node.target, "overloadpacket", None)
    return "" if node.op != "call_function" or target is None else target.__name__.removesuffix("_")
