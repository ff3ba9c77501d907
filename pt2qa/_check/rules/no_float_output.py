"""Models that return no floating-point tensor."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """One finding where every tensor that forward returns has whole numbers or truth values."""
    leaves = pytree.tree_leaves(context.graph.graph.output_node().args)
    values = [leaf.meta.get(VALUE) for leaf in leaves if isinstance(leaf, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        raise DoesNotApplyError("to models that return no tensor")
    if not any(value.is_floating_point() or value.is_complex() for value in tensors):
        dtypes = ", ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in tensors))
        yield Found("", f"forward returns {dtypes} only")


RULE = Rule(
    id="no-float-output",
    severity="warning",
    title="outputs that cannot be compared",
    why="argmax and thresholds hide the error of int8 until a class flips. find_bad_cases, sensitivity and reconfigure "
    "compare floating-point outputs, and have nothing to go by.",
    fix="return the values before argmax or the comparison as well, and take the decision outside of the model",
    needs=("graph",),
    find=find,
)
