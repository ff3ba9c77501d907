"""The specs that a quantizer assigns to values: what they share, and where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from pt2qa._check.context import CheckContext, require
from pt2qa._check.products import differing, own_spec, spec_read
from pt2qa._graph.handles import op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._simulator.products import CONVOLUTIONS
from pt2qa.overrides import Annotations
from pt2qa.overrides.broken_lines import BrokenLine
from pt2qa.overrides.edits import BATCH_NORMS
from pt2qa.overrides.points import Derives, GraphNode, Point, Shares, root_of
from pt2qa.plugins import Found
from pt2qa.plugins.backend_spec import TensorSpec
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="shared scales that resolve to no spec",
    why="prepare_pt2e makes one observer for all values that share a scale, at the first of them in graph order. "
    "Without a spec there it raises an AssertionError or a KeyError, for a cycle a RecursionError (ao#4421, ao#4483).",
    fix="in the quantizer, give the first value in graph order the spec, and let the later ones refer to it",
    needs=("annotations",),
)
def broken_share(context: CheckContext) -> Iterator[Found]:
    shared = any(isinstance(spec, Shares | Derives) for spec in context.annotations.specs.values())
    require(shared, "to annotations without shared scales")
    return broken_shares(context.annotations)


def broken_shares(annotations: Annotations) -> Iterator[Found]:
    """Each cycle and each missing point once; each scale that is shared or derived from a later point."""
    specs, order = annotations.specs, {point: index for index, point in enumerate(annotations.specs)}
    told = set[Point]()
    for point, spec in specs.items():
        if isinstance(spec, Derives):
            for source in spec.points:
                if order.get(source, len(order)) > order[point]:
                    what = "comes later in the graph" if source in order else "is not annotated"
                    yield _share(annotations, [point, source], f"derives its scale from a value that {what}")
            continue
        chain = _chain(annotations, point)
        if root_of(specs, point) is None:
            if told.isdisjoint(chain):
                cycle = chain[-1] in specs
                why = "shares its scale in a cycle" if cycle else "shares the scale of a value that is not annotated"
                fix = "annotate the edge or output that SharedQuantizationSpec names"
                fix = "give one value of the cycle a QuantizationSpec of its own" if cycle else fix
                yield _share(annotations, chain, why, f"in the quantizer, {fix}")
            told.update(chain)
        elif isinstance(spec, Shares) and annotations.groups[point] == point:
            yield _share(annotations, chain, "shares the scale of a value that comes later in the graph")


def _chain(annotations: Annotations, point: Point) -> list[Point]:
    """The points from one on, up to the first that is missing, or already in the chain."""
    chain = [point]
    while isinstance(spec := annotations.specs.get(chain[-1]), Shares):
        chain.append(spec.point)
        if spec.point in chain[:-1]:
            break
    return chain


def _share(annotations: Annotations, chain: list[Point], why: str, fix: str = "") -> Found:
    source, reader = chain[0]
    arrows = " -> ".join(annotations.graph.describe(point).rstrip(",") for point in chain)
    return Found(annotations.graph.nodes[reader or source].name, f"{why}: {arrows}", fix=fix)


VALUE_PRESERVING = frozenset(
    {"transpose", "permute", "t", "swapaxes", "movedim", "numpy_T", "reshape", "view", "_unsafe_view", "flatten"}
    | {"unflatten", "squeeze", "unsqueeze", "expand", "repeat", "slice", "select", "narrow", "chunk", "split", "flip"}
    | {"roll", "clone", "contiguous", "cat", "stack", "max_pool1d", "max_pool2d", "max_pool3d", "pixel_shuffle"}
    | {"pixel_unshuffle", "channel_shuffle", "dropout", "upsample_nearest2d", "unbind", "detach", "alias"}
)
"""Ops whose output values are values of their input."""


@rule(
    severity="warning",
    title="values that are rounded twice, with different scales",
    why="The second rounding adds error, and kernels that only move data, such as transpose, refuse different scales "
    "on both sides when the model is loaded (executorch#19836, executorch#22238).",
    fix="in the quantizer, give the op's output a SharedQuantizationSpec to its (first) input edge; for one value with "
    "two readers, use the same spec for both",
    needs=("annotations",),
)
def mixed_parameters(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    require(annotations.edges, NOTHING_ANNOTATED)
    # The rule backend-spec reports what a line of the backend's spec is about.
    yield from (found for found in _unequal_sides(annotations) if found.name not in context.unshared)
    yield from _rounded_twice(annotations)


NOTHING_ANNOTATED = "to models of which nothing is annotated"


def _unequal_sides(annotations: Annotations) -> Iterator[Found]:
    groups = {point: first for point, first in annotations.groups.items() if own_spec(annotations, point) is not None}
    for node in annotations.graph.nodes.values():
        after = groups.get((node.key, ""))
        if node.op not in VALUE_PRESERVING or node.constant or after is None:
            continue
        before = {groups[point] for key in node.inputs if (point := (key, node.key)) in groups}
        if others := sorted(before - {after}):
            names = {name for point in others for name in _differing(annotations, point, (node.key, ""))}
            how = f"another {' and '.join(sorted(names))}" if names else "another scale"
            sides = f"{len(others)} of its {len(before)} inputs" if len(before) > 1 else "its input"
            verb = "have" if len(others) > 1 else "has"
            yield Found(node.name, f"{node.op} does not change values, but {sides} {verb} {how} than its output")


def _rounded_twice(annotations: Annotations) -> Iterator[Found]:
    nodes = annotations.graph.nodes
    for source, reader in annotations.specs:
        if reader and not nodes[source].constant:
            names = " and ".join(_differing(annotations, (source, ""), (source, reader)))
            if names:
                why = f"is rounded as an output and again for the {nodes[reader].op} that reads it: {names} differ"
                yield Found(nodes[source].name, why)


def _differing(annotations: Annotations, one: Point, other: Point) -> tuple[str, ...]:
    first, second = own_spec(annotations, one), own_spec(annotations, other)
    return () if first is None or second is None else differing(first, second)


@rule(
    severity="warning",
    title="operands of a sum or concatenation that are quantized differently",
    why="Backends have int8 kernels for operands of one dtype and scheme. Otherwise the op runs in float, and rounding "
    "one operand costs accuracy for nothing.",
    fix="annotate all operands in the quantizer, with the same dtype and scheme; or keep the op in float: "
    'pt2qa.Edit("float", (name,))',
    needs=("annotations",),
)
def residual_add(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    nodes = annotations.graph.nodes
    kinds = ("add", "sub", "mul", "cat", "stack")
    joins = [node for node in nodes.values() if node.op in kinds and node.name in annotations.ops]
    for node in require(joins, "to models without annotated sums or concatenations"):
        operands = [nodes[key] for key in node.inputs if nodes[key].is_tensor and not nodes[key].constant]
        specs = {operand.name: spec_read(annotations, operand.key, node.key) for operand in operands}
        rounded = [spec for spec in specs.values() if spec is not None]
        unrounded = [operand for operand in operands if specs[operand.name] is None]
        in_float = [operand.name for operand in unrounded if not _is_fused(annotations, operand, node)]
        attributes = dict.fromkeys(name for other in rounded[1:] for name in differing(rounded[0], other))
        apart = [name for name in attributes if name not in ("scale", "zero_point")]
        if rounded and in_float:
            yield Found(node.name, f"{', '.join(in_float)} is not rounded, but the other operand is")
        elif apart:
            yield Found(node.name, f"its operands differ in {' and '.join(apart)}")


def _is_fused(annotations: Annotations, operand: GraphNode, node: GraphNode) -> bool:
    """Whether an operand stays in float because its op and the join are one kernel, as conv + add on x86."""
    if operand.readers != (node.key,):
        return False
    if operand.op in BATCH_NORMS and operand.name not in annotations.ops:
        # QAT keeps the batch norm between the two, and annotates the ops around it.
        return _is_fused(annotations, annotations.graph.nodes[next(iter(operand.inputs))], operand)
    return operand.name in annotations.ops


@rule(
    severity="warning",
    title="convolutions with dynamic scales",
    why="Few backends have a kernel for them; others run them in float between rounding ops. All samples of a batch "
    "share one scale, so a prediction depends on the rest of its batch; accuracy was seen to drop (ao#4292).",
    fix="quantize convolutions statically, with calibration, and use dynamic scales for linears only: many quantizers "
    "take a configuration for one type of op",
    needs=("annotations",),
)
def dynamic_conv(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    nodes = annotations.graph.nodes
    declares = hasattr(context.plugin, "unsupported_reason")
    convolutions = [node for node in nodes.values() if node.op in CONVOLUTIONS]
    for node in require(convolutions, "to models without convolutions"):
        specs = [spec_read(annotations, key, node.key) for key in node.inputs if not nodes[key].constant]
        refusal = annotations.graph.refusals.get(("dynamic", node.key), "")
        if any(getattr(spec, "is_dynamic", False) for spec in specs) and (refusal or not declares):
            yield Found(node.name, refusal or f"each batch sets the scale of the {node.op}'s input")


FIXED = {**dict.fromkeys(("softmax", "_softmax", "sigmoid", "hardsigmoid"), "1/256"), "tanh": "1/128"}
"""The scale that covers an op's range with 8 bits; int8 kernels of XNNPACK, TFLite and CMSIS-NN require it."""


@rule(
    severity="note",
    title="calibrated scales for outputs whose range is known",
    why="The range follows from the op; calibration can only make it too small, and values outside are clamped. "
    "Several int8 kernels take only the fixed scale.",
    fix="in the quantizer, annotate the output with FixedQParamsQuantizationSpec; otherwise calibrate on data that "
    "reaches both ends of the range",
    needs=("annotations",),
)
def fixed_range(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    ops = [node for node in annotations.graph.nodes.values() if node.op in FIXED]
    for node in require(ops, "to models without softmax, sigmoid or tanh"):
        specs = [spec_read(annotations, node.key, reader) for reader in (*node.readers, "")]
        if any(spec is not None and _is_calibrated(spec) for spec in specs):
            yield Found(node.name, f"the output of {node.op} has a calibrated scale; {FIXED[node.op]} covers its range")


def _is_calibrated(spec: object) -> bool:
    """Whether a scale needs calibration and has 8 bits."""
    wide = getattr(getattr(spec, "dtype", None), "itemsize", 1) > 1
    return not (hasattr(spec, "scale") or getattr(spec, "is_dynamic", False) or wide)


@rule(
    severity="error",
    title="rounding of integers, booleans and masks",
    why="Rounding changes indices, counts and booleans, and the large negative number of a mask takes the whole range "
    "of the scale.",
    fix='keep the op that reads it in float: pt2qa.Edit("float", (name,)), or check dtypes in the quantizer',
    needs=("annotations", "graph"),
)
def integer_observed(context: CheckContext) -> Iterator[Found]:
    annotations = context.annotations
    require(annotations.edges, NOTHING_ANNOTATED)
    nodes = {context.name_of(node): node for node in context.graph.graph.nodes if node.op != "output"}
    measured = _measured(context)
    sources = {point[0]: spec for point in annotations.specs if (spec := own_spec(annotations, point)) is not None}
    for key, spec in sources.items():
        made = annotations.graph.nodes[key]
        wanted = str(getattr(spec, "dtype", "")).removeprefix("torch.")
        if made.dtype and not made.dtype.startswith(("float", "bfloat")):
            yield Found(made.name, f"its {made.dtype} values are rounded to {wanted}, which changes them")
        elif not made.constant and made.name in nodes and nodes[made.name] not in measured:
            why = f"is computed from sizes, indices or masks only, and rounded to {wanted}"
            yield Found(made.name, why, "warning")


def _measured(context: CheckContext) -> set[Node]:
    """The nodes whose value depends on a measurement or a parameter through more than a comparison."""
    parameters = {name for name, _ in context.graph.named_parameters(remove_duplicate=False)}
    found: set[Node] = set()
    for node in context.graph.graph.nodes:
        value = node.meta.get(VALUE)
        dtype = value.dtype if isinstance(value, Tensor) else None
        if node.op in ("placeholder", "get_attr"):
            is_data = dtype is not None and (dtype.is_floating_point or dtype in _SAMPLE_DTYPES)
            counts = str(node.target) in parameters or (is_data and (node.op == "placeholder" or value.numel() > 1))
        else:
            counts = node.target in _RANDOM or op_of(node.target) in _NONLINEAR
            counts = counts or (dtype is not torch.bool and not found.isdisjoint(node.all_input_nodes))
        if counts:
            found.add(node)
    return found


_SAMPLE_DTYPES = (torch.uint8, torch.int8, torch.int16)
"""Integers that pictures and sound come in; indices and masks have 32 bits, 64 or one."""

_NONLINEAR = frozenset({"sin", "cos", "exp", "pow", "log", "softmax", "sqrt", "rsqrt", "tanh", "sigmoid"})
"""Ops that make measurements of indices, such as the encoding of a position."""

_RANDOM = (torch.ops.aten.randn.default, torch.ops.aten.rand.default, torch.ops.aten.randn_like.default)


@rule(
    severity="error",
    title="annotations that the backend does not support",
    why="What a kernel does not support fails when the model is lowered, stays in float or, worse, runs with the "
    "kernel's own zero point, channel axis or range instead of the calibrated ones. The findings quote the plug-in's "
    "spec.",
    fix="annotate what the line says",
)
def backend_spec(context: CheckContext) -> Iterator[Found]:
    """A warning if only accuracy is lost."""
    for broken in context.broken_lines:
        mild = broken.differs in (("range",), ("fusion",))
        yield Found(broken.name, str(broken), "warning" if mild else None, _fix(broken))


def _fix(broken: BrokenLine) -> str:
    line = broken.line
    if line.part == "scales":
        return "in the quantizer, give all but the first input, and the output, SharedQuantizationSpec((input, node))"
    if line.part == "fused":
        return f"in the quantizer, annotate the output of the activation, and not that of the {line.op} before it"
    spec = line.takes[0]
    if spec.quant_min is None and spec.dtype == "float32":
        return f"in the quantizer, leave the {line.part} of the {line.op} out of input_qspec_map"
    return f"in the quantizer, give it QuantizationSpec({_arguments(spec)})"


def _arguments(spec: TensorSpec) -> str:
    """A spec as the arguments of torchao's class, without its observer."""
    found = [f"torch.{spec.dtype}"]
    if spec.quant_min is not None:
        scales = "per_tensor" if spec.axis is None else "per_channel"
        found += [f"quant_min={spec.quant_min}", f"quant_max={spec.quant_max}"]
        found += [f"qscheme=torch.{scales}_{spec.scheme}"]
        found += [f"ch_axis={spec.axis}"] if spec.axis is not None else []
        found += ["is_dynamic=True"] if spec.dynamic else []
    return ", ".join(found)
