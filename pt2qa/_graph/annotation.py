"""Reads what a quantizer annotated at the nodes of a graph; all other modules read annotations through this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import ANNOTATION


def specs_of(node: Node) -> list[tuple[Node | None, Any]]:
    """The specs of a node's annotation, each with the input that it is for, None for the output; empty without one."""
    annotation = node.meta.get(ANNOTATION)
    if annotation is None:
        return []
    specs = [*(annotation.input_qspec_map or {}).items(), (None, annotation.output_qspec)]
    return [(source, spec) for source, spec in specs if spec is not None]


def annotated_ops(nodes: Iterable[Node]) -> Counter[str]:
    """The ops at which a quantizer requires a rounded value, counted by type; it need not set ``_annotated``."""
    return Counter(
        op_of(node.target)
        for node in nodes
        if node.op == "call_function"
        and any(rounds(spec, constant=getattr(source, "op", "") == "get_attr") for source, spec in specs_of(node))
    )


def rounds(spec: Any, *, constant: bool) -> bool:
    """Whether a torchao spec rounds a value: float32 never does, float16 only for constants."""
    dtype = getattr(spec, "dtype", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return True
    return dtype.itemsize == 1 or (dtype is torch.float16 and constant)
