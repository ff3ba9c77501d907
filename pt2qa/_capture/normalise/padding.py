"""Replaces ``padding="same"`` and ``"valid"`` with numbers.

``aten.conv2d.padding`` is not the overload ``aten.conv2d.default`` that quantizers look for: the x86 quantizer raises
``ValueError``, and QAT finds no convolution with batch norm.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node
from pt2qa._graph.internals.nodes import VALUE

_RULE: Final = "padding"
_EXPLICIT = {
    torch.ops.aten.conv1d.padding: torch.ops.aten.conv1d.default,
    torch.ops.aten.conv2d.padding: torch.ops.aten.conv2d.default,
    torch.ops.aten.conv3d.padding: torch.ops.aten.conv3d.default,
}


def write_out_padding(program: ExportedProgram) -> tuple[Change, ...]:
    """Gives convolutions with ``"same"`` or ``"valid"`` padding their numeric overload, in place.

    For an even kernel, ``"same"`` pads one side more than the other, which no number can express; it does not change.
    """
    found = []
    for graph_module in graph_modules(program):
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and node.target in _EXPLICIT and (padding := _padding(node)) is not None:
                stride, _, dilation, groups = _settings(node)
                bias = node.args[2] if len(node.args) > 2 else None
                node.args = (*node.args[:2], bias, stride, padding, dilation, groups)
                node.target = _EXPLICIT[node.target]
                found.append((node, padding))
        graph_module.recompile()
    if not found:
        return ()
    names = names_by_node(program)
    return tuple(Change(_RULE, names[node], f"written out as {padding}") for node, padding in found)


def _padding(node: Node) -> list[int] | None:
    weight = node.args[1]
    assert isinstance(weight, Node)
    kernel = weight.meta[VALUE].shape[2:]
    _, kind, dilation, _ = _settings(node)
    if kind == "valid":
        return [0] * len(kernel)
    steps = dilation * len(kernel) if len(dilation) == 1 else dilation
    both_sides = [step * (size - 1) for step, size in zip(steps, kernel, strict=True)]
    return [total // 2 for total in both_sides] if all(total % 2 == 0 for total in both_sides) else None


def _settings(node: Node) -> tuple[list[int], str, list[int], int]:
    """Stride, padding, dilation and groups, with the schema's defaults."""
    weight = node.args[1]
    assert isinstance(weight, Node)
    rank = weight.meta[VALUE].dim() - 2
    given = [*node.args[3:], *([[1] * rank, "valid", [1] * rank, 1][len(node.args[3:]) :])]
    return tuple(given)  # type: ignore[return-value]
