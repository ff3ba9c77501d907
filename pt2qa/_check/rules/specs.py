"""The specs that a quantizer assigns to values: what they share, and where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import differing, own_spec, spec_read
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator.products import CONVOLUTIONS
from pt2qa.overrides import Annotations
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import Derives, GraphNode, Point, Shares
from pt2qa.overrides.sharing import root_of
from pt2qa.plugins import DoesNotApplyError, Found
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="shared scales that lead nowhere",
    why="prepare_pt2e makes one observer for all that share a scale, at the first of them in the order of the graph. "
    "Without a spec there it fails with an AssertionError or a KeyError, in a circle with a RecursionError "
    "(ao#4421, ao#4483).",
    fix="in the quantizer, give the spec to the first in the order of the graph, and let the later ones refer to it",
    needs=("annotations",),
)
def broken_share(context: CheckContext) -> Iterator[Found]:
    """Chains of shared specs that form a cycle or break off, groups whose first point has no spec of its own."""
    annotations = context.annotations
    if not any(isinstance(spec, Shares | Derives) for spec in annotations.specs.values()):
        raise DoesNotApplyError("to annotations without shared scales")
    yield from _endless(annotations)
    yield from _out_of_order(annotations)
    yield from _underived(annotations)


def _endless(annotations: Annotations) -> Iterator[Found]:
    """Each cycle, and each missing point, once."""
    seen: set[Point] = set()
    for start in annotations.specs:
        if root_of(annotations.specs, start) is not None:
            continue
        chain = _chain(annotations, start)
        end = chain[-1]
        if seen.isdisjoint(chain):
            text = _arrows(annotations, chain)
            if end in annotations.specs:
                yield Found(_name(annotations, start), f"shares its scale in a circle: {text}", fix=_FIX_CIRCLE)
            else:
                yield Found(_name(annotations, start), f"shares a scale that nothing has: {text}", fix=_FIX_MISSING)
        seen.update(chain)


def _chain(annotations: Annotations, point: Point) -> list[Point]:
    """The points from one on, up to the first that is missing, or already in the chain."""
    chain = [point]
    while isinstance(spec := annotations.specs.get(chain[-1]), Shares):
        chain.append(spec.point)
        if spec.point in chain[:-1]:
            break
    return chain


def _out_of_order(annotations: Annotations) -> Iterator[Found]:
    """Groups whose first point refers to a later one."""
    for point, first in annotations.groups.items():
        spec = annotations.specs[point]
        ends = root_of(annotations.specs, point) is not None
        if ends and point == first and isinstance(spec, Shares):
            text = _arrows(annotations, _chain(annotations, point))
            yield Found(_name(annotations, point), f"shares a scale that comes later in the graph: {text}")


def _underived(annotations: Annotations) -> Iterator[Found]:
    """Derived scales whose sources are missing or come later."""
    order = {point: index for index, point in enumerate(annotations.specs)}
    for point, spec in annotations.specs.items():
        for source in spec.points if isinstance(spec, Derives) else ():
            if order.get(source, len(order)) > order[point]:
                what = "comes later in the graph" if source in order else "nothing has"
                text = _arrows(annotations, [point, source])
                yield Found(_name(annotations, point), f"derives its scale from one that {what}: {text}")


def _arrows(annotations: Annotations, chain: list[Point]) -> str:
    return " -> ".join(annotations.graph.describe(point).rstrip(",") for point in chain)


def _name(annotations: Annotations, point: Point) -> str:
    source, reader = point
    return annotations.graph.nodes[reader or source].name


_FIX_CIRCLE = (
    "in the quantizer, let one point of the circle have a QuantizationSpec of its own; the others may go on sharing"
)

_FIX_MISSING = "in the quantizer, annotate the edge or output that SharedQuantizationSpec names, with a spec of its own"

VALUE_PRESERVING = frozenset(
    {"transpose", "permute", "t", "swapaxes", "movedim", "numpy_T", "reshape", "view", "_unsafe_view", "flatten"}
    | {"unflatten", "squeeze", "unsqueeze", "expand", "repeat", "slice", "select", "narrow", "chunk", "split", "flip"}
    | {"roll", "clone", "contiguous", "cat", "stack", "max_pool1d", "max_pool2d", "max_pool3d", "pixel_shuffle"}
    | {"pixel_unshuffle", "channel_shuffle", "dropout", "upsample_nearest2d", "unbind", "detach", "alias"}
)
"""Ops that hand on values as they are, or some of them."""


@rule(
    severity="warning",
    title="values that are rounded with one scale and then with another",
    why="The second rounding adds error for nothing, and kernels that only move data refuse it when the model is "
    "loaded, as a transpose does that asks for equal parameters on both sides (executorch#19836, executorch#22238).",
    fix="in the quantizer, give the op's output a SharedQuantizationSpec to its (first) input edge; for one value with "
    "two readers, ask for the same spec at both",
    needs=("annotations",),
)
def mixed_parameters(context: CheckContext) -> Iterator[Found]:
    """Value-preserving ops with different scales before and after, and values that are rounded in two ways."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    # The rule backend-spec reports what a line of the backend's spec is about.
    yield from (found for found in _unequal_sides(annotations) if found.name not in context.unshared)
    yield from _rounded_twice(annotations)


def _unequal_sides(annotations: Annotations) -> Iterator[Found]:
    groups = {point: first for point, first in annotations.groups.items() if own_spec(annotations, point) is not None}
    for node in annotations.graph.nodes.values():
        after = groups.get((node.key, ""))
        if node.op not in VALUE_PRESERVING or node.constant or after is None:
            continue
        before = {groups[point] for key in node.inputs if (point := (key, node.key)) in groups}
        if others := sorted(before - {after}):
            names = {name for point in others for name in _differing(annotations, point, (node.key, ""))}
            how = f"another {' and '.join(sorted(names))}" if names else "a scale of its own"
            sides = f"{len(others)} of its {len(before)} inputs" if len(before) > 1 else "its input"
            yield Found(node.name, f"{node.op} hands values on, and {sides} has {how}, not that of its output")


def _rounded_twice(annotations: Annotations) -> Iterator[Found]:
    for source, reader in annotations.specs:
        if not reader or annotations.graph.nodes[source].constant:
            continue
        names = _differing(annotations, (source, ""), (source, reader))
        if names:
            node = annotations.graph.nodes[source]
            how = " and ".join(names)
            op = annotations.graph.nodes[reader].op
            yield Found(node.name, f"is rounded as its output and again for the {op}: {how} differ")


def _differing(annotations: Annotations, one: Point, other: Point) -> tuple[str, ...]:
    first, second = own_spec(annotations, one), own_spec(annotations, other)
    return () if first is None or second is None else differing(first, second)


_JOINS = ("add", "sub", "mul", "cat", "stack")


@rule(
    severity="warning",
    title="branches of a sum or concatenation that are not rounded alike",
    why="A backend has int8 kernels for operands of one kind: it computes such an op in float, and the rounding of the "
    "one branch is error without gain.",
    fix="annotate both branches in the quantizer, with the same dtype and scheme; or keep the op in float: "
    'pt2qa.Edit("float", (name,))',
    needs=("annotations",),
)
def residual_add(context: CheckContext) -> Iterator[Found]:
    """Annotated joins that read one branch rounded and another in float, or rounded in another way."""
    annotations = context.annotations
    joins = [node for node in annotations.graph.nodes.values() if node.op in _JOINS and node.name in annotations.ops]
    if not joins:
        raise DoesNotApplyError("to models without annotated sums or concatenations")
    for node in joins:
        branches = [annotations.graph.nodes[key] for key in node.inputs]
        branches = [branch for branch in branches if branch.is_tensor and not branch.constant]
        specs = {branch.name: spec_read(annotations, branch.key, node.key) for branch in branches}
        rounded = [spec for spec in specs.values() if spec is not None]
        in_float = [
            branch.name
            for branch in branches
            if specs[branch.name] is None and not _is_fused(annotations, branch, node)
        ]
        if rounded and in_float:
            yield Found(node.name, f"one branch of the {node.op} is rounded, and {', '.join(in_float)} is not")
        elif attributes := _differing_branches(rounded):
            yield Found(node.name, f"the branches of the {node.op} are rounded with another {' and '.join(attributes)}")


def _is_fused(annotations: Annotations, branch: GraphNode, node: GraphNode) -> bool:
    """Whether a branch stays in float because its op and the join are one kernel, as conv + add on x86."""
    if branch.readers != (node.key,):
        return False
    if branch.op in BATCH_NORMS and branch.name not in annotations.ops:
        # QAT keeps the batch norm between the two, and annotates the ops around it.
        return _is_fused(annotations, annotations.graph.nodes[next(iter(branch.inputs))], branch)
    return branch.name in annotations.ops


def _differing_branches(specs: list[Any]) -> tuple[str, ...]:
    """In what any of the specs differs from the first, scales aside."""
    names = dict.fromkeys(name for other in specs[1:] for name in differing(specs[0], other))
    return tuple(name for name in names if name not in ("scale", "zero_point"))


@rule(
    severity="warning",
    title="convolutions with dynamic scales",
    why="Few backends have a kernel for it: elsewhere it runs in float between rounding ops. One scale serves a whole "
    "batch, so that a prediction depends on what it is batched with; accuracy was seen to drop (ao#4292).",
    fix="quantize convolutions statically, with calibration, and keep dynamic scales for linears: many "
    "quantizers take a configuration for one type of op",
    needs=("annotations",),
)
def dynamic_conv(context: CheckContext) -> Iterator[Found]:
    """Convolutions with a dynamic input, unless the plug-in says that its backend supports them."""
    annotations = context.annotations
    nodes = annotations.graph.nodes
    convolutions = [node for node in nodes.values() if node.op in CONVOLUTIONS]
    if not convolutions:
        raise DoesNotApplyError("to models without convolutions")
    declares = hasattr(context.plugin, "unsupported_reason")
    for node in convolutions:
        specs = [spec_read(annotations, key, node.key) for key in node.inputs if not nodes[key].constant]
        refusal = annotations.graph.refusals.get(("dynamic", node.key), "")
        if any(getattr(spec, "is_dynamic", False) for spec in specs) and (refusal or not declares):
            yield Found(node.name, refusal or f"the scale of the {node.op}'s input is computed anew for each batch")


FIXED = {
    **dict.fromkeys(("softmax", "_softmax", "sigmoid", "hardsigmoid"), "1/256"),
    "tanh": "1/128",
}
"""The scale that covers an op's range with 8 bits; int8 kernels of XNNPACK, TFLite and CMSIS-NN ask for it."""


@rule(
    severity="note",
    title="a calibrated scale where the range is known",
    why="The range follows from the op, so that data can only make it too small: what calibration did not see is cut "
    "off. Several int8 kernels take the fixed scale alone.",
    fix="in the quantizer, annotate the output with FixedQParamsQuantizationSpec; without one, calibrate on data that "
    "reaches both ends",
    needs=("annotations",),
)
def fixed_range(context: CheckContext) -> Iterator[Found]:
    """Outputs of softmax, sigmoid and tanh that are rounded to 8 bits with a scale from calibration."""
    annotations = context.annotations
    ops = [node for node in annotations.graph.nodes.values() if node.op in FIXED]
    if not ops:
        raise DoesNotApplyError("to models without softmax, sigmoid or tanh")
    for node in ops:
        specs = [spec_read(annotations, node.key, reader) for reader in (*node.readers, "")]
        calibrated = [spec for spec in specs if spec is not None and not _is_settled(spec)]
        if calibrated:
            yield Found(node.name, f"the output of {node.op} has a calibrated scale; {FIXED[node.op]} covers its range")


def _is_settled(spec: object) -> bool:
    """Whether a scale needs no calibration, or the spec has more than 8 bits."""
    wide = getattr(getattr(spec, "dtype", None), "itemsize", 1) > 1
    return hasattr(spec, "scale") or bool(getattr(spec, "is_dynamic", False)) or wide


@rule(
    severity="error",
    title="rounding of values that are no measurements",
    why="Indices, counts and booleans come out changed, and the large negative number of a mask takes the whole range "
    "of the scale.",
    fix='keep the op that reads it in float: pt2qa.Edit("float", (name,)), or a quantizer that looks at dtypes',
    needs=("annotations", "graph"),
)
def integer_observed(context: CheckContext) -> Iterator[Found]:
    """Rounded values that are integers or booleans, and rounded floats computed from nothing else."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    nodes = {context.name_of(node): node for node in context.graph.graph.nodes if node.op != "output"}
    measured = _measured(context)
    sources = {point[0]: spec for point in annotations.specs if (spec := own_spec(annotations, point)) is not None}
    for key, spec in sources.items():
        made = annotations.graph.nodes[key]
        wanted = str(getattr(spec, "dtype", "")).removeprefix("torch.")
        if made.dtype and not made.dtype.startswith(("float", "bfloat")):
            yield Found(made.name, f"its {made.dtype} values are rounded to {wanted}, which changes them")
        elif not made.constant and made.name in nodes and nodes[made.name] not in measured:
            yield Found(made.name, f"is made of sizes, indices or masks alone, and rounded to {wanted}", "warning")


def _measured(context: CheckContext) -> set[Node]:
    """The nodes whose value depends on a measurement or a parameter through more than a comparison."""
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
