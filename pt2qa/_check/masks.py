"""Mask values: the large negative numbers and infinities that a graph puts where softmax must ignore a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import attribute_of, op_of

SMALLEST_MASK = -1e4
"""Masks hold -1e4 (BERT), -65504 and -3.4e38 (the smallest float16 and float32), or -inf; scores stay far above."""

_FILLING = frozenset(
    {"full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill", "where", "mul", "pad", "constant_pad_nd"}
)
"""Ops whose scalars become values of their result; a mask of zeros and ones is multiplied with the number."""

_PASSING_ON = frozenset(
    {"add", "sub", "where", "masked_fill", "expand", "view", "reshape", "permute", "transpose", "slice", "select"}
    | {"unsqueeze", "squeeze", "to", "_to_copy", "clone", "contiguous", "cat", "triu", "tril", "repeat", "index"}
    | {"broadcast_to", "lift_fresh_copy", "detach", "alias", "copy", "slice_scatter", "minimum", "_unsafe_view"}
)
"""Ops whose result holds what they read."""


class Mask(NamedTuple):
    """A mask value and the node that puts it in."""

    value: float
    origin: Node

    @property
    def severity(self) -> float:
        """Larger is worse."""
        return -self.value if math.isfinite(self.value) else math.inf


def masks_in(graph_module: GraphModule) -> dict[Node, Mask]:
    """The nodes of a float graph whose value may hold a mask value, with the largest; masks in inputs are unknown."""
    found: dict[Node, Mask] = {}
    for node in graph_module.graph.nodes:
        held = [found[source] for source in node.all_input_nodes if source in found] if _passes_on(node) else []
        held += [Mask(value, node) for value in _own(node, graph_module) if is_mask(value)]
        if held:
            found[node] = max(held, key=lambda mask: mask.severity)
    return found


def is_mask(value: float) -> bool:
    """Whether a number means "leave this out" rather than a measurement."""
    return not math.isfinite(value) or value <= SMALLEST_MASK


def _passes_on(node: Node) -> bool:
    # A module of a prepared graph is an observer, which returns what it sees.
    return node.op == "call_module" or (node.op == "call_function" and op_of(node.target) in _PASSING_ON)


def _own(node: Node, graph_module: GraphModule) -> Iterable[float]:
    """The extreme values of a constant, or the numbers that an op puts in."""
    if node.op == "get_attr":
        value = attribute_of(graph_module, node)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return []
        return [float(end) for end in value.detach().aminmax()]
    if node.op != "call_function" or op_of(node.target) not in _FILLING:
        return []
    arguments = (*node.args, *node.kwargs.values())
    return [float(part) for part in arguments if isinstance(part, (int, float)) and not isinstance(part, bool)]
