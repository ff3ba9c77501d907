"""Observers where values are no measurements: integers, booleans, masks and sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import own_spec
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """Rounded values that are integers or booleans, and rounded floats that are made of nothing else."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    nodes = {context.name_of(node): node for node in context.graph.graph.nodes if node.op != "output"}
    measured = _measured(context)
    sources = {point[0]: spec for point in annotations.specs if (spec := own_spec(annotations, point)) is not None}
    for key, spec in sources.items():
        made = annotations.ground.nodes[key]
        wanted = str(getattr(spec, "dtype", "")).removeprefix("torch.")
        if made.dtype and not made.dtype.startswith(("float", "bfloat")):
            yield Found(made.name, f"its {made.dtype} values are rounded to {wanted}, which changes them")
        elif not made.constant and made.name in nodes and nodes[made.name] not in measured:
            yield Found(made.name, f"is made of sizes, indices or masks alone, and rounded to {wanted}", "warning")


def _measured(context: CheckContext) -> set[Node]:
    """The nodes whose value depends on a measurement or a parameter by more than a comparison."""
    parameters = {name for name, _ in context.graph.named_parameters(remove_duplicate=False)}
    found: set[Node] = set()
    for node in context.graph.graph.nodes:
        value = node.meta.get(VALUE)
        dtype = value.dtype if isinstance(value, Tensor) else None
        if node.op in ("placeholder", "get_attr"):
            is_data = dtype is not None and (dtype.is_floating_point or dtype in _SAMPLE_DTYPES)
            if str(node.target) in parameters or (is_data and (node.op == "placeholder" or value.numel() > 1)):
                found.add(node)
        elif (
            node.target in _RANDOM
            or op_of(node.target) in _NONLINEAR
            or (dtype is not torch.bool and not found.isdisjoint(node.all_input_nodes))
        ):
            found.add(node)
    return found


_SAMPLE_DTYPES = (torch.uint8, torch.int8, torch.int16)
"""Integers that pictures and sound come in; indices and masks have 32 bits, 64 or one."""

_NONLINEAR = frozenset({"sin", "cos", "exp", "pow", "log", "softmax", "sqrt", "rsqrt", "tanh", "sigmoid"})
"""Ops that make measurements of indices, such as the encoding of a position."""

_RANDOM = (torch.ops.aten.randn.default, torch.ops.aten.rand.default, torch.ops.aten.randn_like.default)

RULE = Rule(
    id="integer-observed",
    severity="error",
    title="rounding of values that are no measurements",
    why="Indices, counts and booleans come out changed, and the large negative number of a mask takes the whole range "
    "of the scale.",
    fix='keep the op that reads it in float: pt2qa.Edit("float", (name,)), or a quantizer that looks at dtypes',
    needs=("annotations", "graph"),
    find=find,
)
