"""Rules of the structure check on what XNNPACK's kernels make of a converted graph.

Each was measured with ExecuTorch 1.4.1: tiny graphs were lowered and run by its Python package, and
``tests/quantizers/test_xnnpack_rules.py`` repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from pt2qa.plugins import DoesNotApplyError, Found, Rule, op_type
from pt2qa_xnnpack.delegation import undelegated_ops
from pt2qa_xnnpack.internals import (
    Rounding,
    executorch_release,
    is_channel_dequantize,
    is_dequantize,
    is_quantize,
    rounding_of,
    shape_of,
    value_of,
)
from pt2qa_xnnpack.plugin import PRODUCTS, dynamic_axes
from pt2qa_xnnpack.separation import (
    APART,
    INSIDE,
    JOINS,
    KEEPING,
    LAST,
    RESHAPES,
    ROUNDED,
    bias_read_by,
    clamp_of,
    misread,
    overwriting,
)

# -- parameters with which a program does not load ---------------------------------------------------------------------

LARGEST_RATIO = 256
"""A product's kernel takes ``scale of the input * scale of the weight / scale of the output`` below this."""


def find_refused(context: Any) -> Iterator[Found]:
    """Moves between unequal parameters, and products with an output scale that is too small for them."""
    products = {product.name: product for product in context.integer_products}
    for node in context.pair.quantized.graph.nodes:
        inputs, output = [rounding_of(source) for source in node.all_input_nodes], _rounded_output(node)
        if output is None or None in inputs[:1]:
            continue
        name, op = context.name_of(node), op_type(node)
        if op in KEEPING and _is_kernel(node) and None not in inputs:
            if different := [given for given in inputs if given is not None and given[:2] != output[:2]]:
                yield Found(name, f"{op} has {_parameters(different[0])} before it and {_parameters(output)} after it")
        elif op in PRODUCTS and name in products and inputs[0] is not None:
            ratio = inputs[0].scale * float(products[name].scales.max()) / output.scale
            if ratio >= LARGEST_RATIO:
                yield Found(
                    name,
                    f"scale of the input * scale of the weight / scale of the output is {ratio:.4g}, and the kernel "
                    f"takes less than {LARGEST_RATIO}",
                    fix=_RATIO_FIX,
                    value=ratio,
                )


def _rounded_output(node: Node) -> Rounding | None:
    """How a kernel rounds its output, with the activation that it fuses; None if nothing rounds it alone."""
    reader = _only_reader(node)
    if reader is not None and op_type(node) in PRODUCTS and op_type(reader) in FUSED:
        reader = _only_reader(reader)
    return rounding_of(reader) if is_quantize(reader) else None


def _only_reader(node: Node | None) -> Node | None:
    readers = [] if node is None else list(node.users)
    return readers[0] if len(readers) == 1 else None


def _is_kernel(node: Node) -> bool:
    """Whether XNNPACK takes a move with these arguments and sizes."""
    op, source = op_type(node), node.all_input_nodes[0].args[0]
    before = shape_of(source.args[0]) if is_quantize(source) else None  # type: ignore[union-attr,arg-type]
    after = shape_of(node) or ()
    if op in JOINS:
        return len(node.all_input_nodes) > 1
    if op in RESHAPES and not all(isinstance(size, int) for size in (*(before or ()), *after)):
        return False
    if op == "slice" and (list(node.args[4:]) not in ([], [1]) or executorch_release() >= (1, 5)):
        return False
    if op == "unsqueeze":
        return node.args[1] in (-1, len(after) - 1)
    return op not in ("slice", "flatten") or before != after


def _parameters(of: Rounding) -> str:
    return f"scale {of.scale:.6g}, zero point {of.zero_point}"


_RATIO_FIX = (
    "the output's scale is that of values close to zero: calibrate on data on which the layer is alive, or keep it in "
    'float: pt2qa.Edit("float", (name,))'
)

REFUSED = Rule(
    id="xnnpack-refused-scales",
    severity="error",
    title="scales with which the program does not load",
    why="The model is lowered without an error, and the runtime then fails with 'Failed to load method forward, error: "
    "0x:1'. Kernels that move integers need one scale and zero point for all inputs and the output; those of a "
    "convolution or linear need an output scale that is not too small.",
    fix="let the output share the input's scale: SharedQuantizationSpec((input, op)) in the quantizer, or annotate "
    "nothing behind the op. Before lowering, pt2qa_xnnpack.for_xnnpack(converted) rounds a move's input as its output, "
    "without changing a number",
    needs=("pair",),
    find=find_refused,
)

# -- products that stay outside of the delegate ------------------------------------------------------------------------

FUSED = frozenset({"relu", "hardtanh", "relu6"})
"""Activations that a product's kernel applies to its output."""


def find_outside(context: Any) -> Iterator[Found]:
    """Products with quantized weights for which XNNPACK has no kernel, and why."""
    for node in context.pair.quantized.graph.nodes:
        if op_type(node) not in PRODUCTS:
            continue
        weight = node.args[1]
        per_channel = is_channel_dequantize(weight)
        reason = _outside(node, per_channel) if per_channel or is_dequantize(weight) else ""
        if not reason:
            continue
        fix = 'keep it in float: pt2qa.Edit("float", (name,))' if op_type(node).endswith("3d") else ""
        if per_channel or is_dequantize(_input(node), "tensor"):
            yield Found(context.name_of(node), f"{reason}; to_executorch() then fails: Missing out variants", fix=fix)
        elif op_type(node) == "linear":
            yield Found(context.name_of(node), f"{reason}; the program then does not load")
        else:
            yield Found(context.name_of(node), f"{reason}; the program then runs, and its output is wrong")


def _input(node: Node) -> object:
    """What a product reads; XNNPACK takes a padding before a convolution into its kernel."""
    source = node.args[0]
    return source.args[0] if isinstance(source, Node) and op_type(source) in ("pad", "constant_pad_nd") else source


def _outside(node: Node, per_channel: bool) -> str:
    """Why XNNPACK has no kernel for a product with quantized weights; empty if it has one."""
    op, source = op_type(node), _input(node)
    convolves = op != "linear"
    shape = shape_of(node)
    weight = shape_of(node.args[1].args[0])  # type: ignore[union-attr,arg-type]  # a dequantize node's
    transposed = "transpose" in op
    groups = node.args[7 if transposed else 6 :][:1] if op.endswith(("1d", "2d", "3d")) else ()
    if op.endswith("3d"):
        return "XNNPACK has no 3-d convolution"
    if convolves and shape is not None and len(shape) < int(op[-2]) + 2:
        return "XNNPACK has no convolution of a value without a batch axis"
    if transposed and per_channel and (groups not in ((), (1,)) or node.args[1].args[3] != 1):  # type: ignore[union-attr]
        return "a transposed convolution takes weight scales per channel without groups only"
    if not is_dequantize(source):
        return "its weight is quantized and its input is not"
    if is_dequantize(source, "tensor"):
        if not per_channel:
            return "its input has dynamic scales, and its weight one scale for the tensor"
        if convolves and not op.endswith("2d"):
            return "XNNPACK has dynamic scales for 2-d convolutions only"
        if convolves and not transposed and weight is not None and weight[1] == 1 and groups not in ((), (1,)):
            return "XNNPACK has no depthwise convolution with dynamic scales"
        return ""
    if _rounded_output(node) is not None:
        return ""
    readers = ", ".join(dict.fromkeys(op_type(reader) for reader in node.users))
    return f"its input and weight are quantized, and what {readers or 'nothing'} reads of it is not"


OUTSIDE = Rule(
    id="xnnpack-outside-product",
    severity="error",
    title="quantized convolutions and linears for which XNNPACK has no kernel",
    why="XNNPACK takes one whose input, weight and output are quantized, the output directly or after a ReLU or a "
    "hardtanh that alone reads it; or, with dynamic scales, a linear or 2-d convolution with weight scales per "
    "channel. Any other stays outside of the delegate, together with the dequantize op of its weight, for which "
    "ExecuTorch has no portable kernel. With one scale for the weight the model can be lowered, but the program of a "
    "linear then does not load, and a convolution reads zeros as its weight.",
    fix='quantize its input and its output as well, or keep it in float: pt2qa.Edit("float", (name,))',
    needs=("pair",),
    find=find_outside,
)

# -- integer ranges and types ------------------------------------------------------------------------------------------

INT8 = (-128, 127)


def _static_activations(context: Any) -> Iterator[tuple[str, Rounding]]:
    """Each value that is quantized with fixed parameters: its op's name, and how."""
    for node in context.pair.quantized.graph.nodes:
        rounding = rounding_of(node) if is_quantize(node) else None
        if rounding is not None:
            yield context.name_of(node.args[0]), rounding


def find_range(context: Any) -> Iterator[Found]:
    """Static activations with a range that is narrower than int8's."""
    for name, rounding in _static_activations(context):
        if not str(rounding.dtype).endswith(".int8"):
            continue
        low, high = rounding.quant_min, rounding.quant_max
        steps = max(low - INT8[0], INT8[1] - high)
        if steps > 0:
            yield Found(
                name,
                f"its range is {low}..{high}, and the kernels clamp at {INT8[0]}..{INT8[1]}",
                severity="note" if steps == 1 else None,
                value=steps,
            )


RANGE = Rule(
    id="xnnpack-ignored-range",
    severity="warning",
    title="integer ranges that XNNPACK ignores",
    why="Every kernel clamps at -128..127, whatever quant_min and quant_max of the quantize op are (act_qmin and "
    "act_qmax of get_symmetric_quantization_config). Values beyond the calibrated range are cut off here and not on "
    "the device, where they are up to three times as large for -64..63.",
    fix="let activations have all of int8: leave act_qmin and act_qmax out; and calibrate on data with the range that "
    "the device will see",
    needs=("pair",),
    find=find_range,
)


def find_dtype(context: Any) -> Iterator[Found]:
    """Static activations of another type than int8."""
    for name, rounding in _static_activations(context):
        if not str(rounding.dtype).endswith(".int8"):
            dtype = str(rounding.dtype).removeprefix("torch.")
            yield Found(name, f"is quantized to {dtype}, and XNNPACK has int8 only")


DTYPE = Rule(
    id="xnnpack-dtype",
    severity="error",
    title="activations that are not int8",
    why="XNNPACK leaves a quantize op to another type outside of the delegate, and to_executorch() fails: Missing out "
    "variants, as ExecuTorch has no portable kernel for it.",
    fix="quantize activations to int8; or keep the op in float",
    needs=("pair",),
    find=find_dtype,
)

# -- one bias, one activation ------------------------------------------------------------------------------------------


def find_shared_bias(context: Any) -> Iterator[Found]:
    """Products with static scales that read a bias which another one reads first, with other scales."""
    products = {product.name: product for product in context.integer_products}
    first: dict[Node, Any] = {}
    for node in context.pair.quantized.graph.nodes:
        bias, name = bias_read_by(node), context.name_of(node)
        source = rounding_of(_input(node)) if bias is not None else None
        if bias in first and name not in products:
            yield Found(
                name, f"it is in float, and {first[bias][0]} holds its bias as integers: the program does not load"
            )
        if bias is None or source is None or name not in products:
            continue
        own = source.scale * products[name].scales.double().flatten()
        held = first.setdefault(bias, (name, own))[1]
        ratio = float((held / own).max() if held.shape == own.shape else held.max() / own.max())
        if not math.isclose(ratio, 1, rel_tol=1e-3):
            yield Found(
                name, f"its bias is held with the scale of {first[bias][0]}: as {1 / ratio:.3g} times its value"
            )


SHARED_BIAS = Rule(
    id="xnnpack-shared-bias",
    severity="error",
    title="products that share a bias and have other scales",
    why="ExecuTorch writes a bias into a delegate once, as integers with the input's and weight's scale of the first "
    "product that reads it, and all others of the delegate add these integers with their own scales. A linear called "
    "on x and on 0.1 * x falls from 45.7 dB to 1.2 dB at the second call. Where the other one is in float, as the "
    "second call of a convolution is with ExecuTorch's quantizer, loading fails: Failed to load method forward.",
    fix="give each call a bias of its own: pt2qa_xnnpack.for_xnnpack(graph) edits a prepared or converted graph so; "
    "pt2qa.quantize does it, and so does the code that it prints",
    needs=("pair",),
    find=find_shared_bias,
)


def find_stacked(context: Any) -> Iterator[Found]:
    """Activations that are fused into a kernel in place of those before them."""
    for node in context.pair.quantized.graph.nodes:
        if (right := overwriting(node)) is not None:
            limits, own = ("{:g}..{:g}".format(*each) for each in (right, clamp_of(node) or ()))
            yield Found(
                context.name_of(node), f"its limits {own} replace those of the activation before it: not {limits}"
            )


STACKED = Rule(
    id="xnnpack-stacked-activations",
    severity="error",
    title="activations that undo the one before them",
    why="ExecuTorch fuses the activations behind a convolution, linear, add, sub or mul in float one by one, and the "
    "limits of the last overwrite those before: Linear, Hardtanh, ReLU is no longer limited to 1 (-2 dB). Between "
    "quantize ops it does not.",
    fix="write one activation with the limits of both, such as nn.Hardtanh(0, 1); pt2qa_xnnpack.for_xnnpack(graph) "
    "edits a graph so; pt2qa.quantize does it, and so does the code that it prints",
    needs=("pair",),
    find=find_stacked,
)

# -- float16 -----------------------------------------------------------------------------------------------------------


def find_float16(context: Any) -> Iterator[Found]:
    """Ops on float16 values that have static scales."""
    for node in context.pair.quantized.graph.nodes:
        static = any(is_dequantize(source, "default") for source in node.all_input_nodes)
        if static and not is_quantize(node) and getattr(value_of(node), "dtype", None) == torch.float16:
            yield Found(context.name_of(node), "it is computed in float16, and its input has a static scale")


FLOAT16 = Rule(
    id="xnnpack-float16",
    severity="error",
    title="models in float16 with static scales",
    why="The model is lowered without an error. The delegate writes values of 32 bits into tensors of 16: the output "
    "is wrong, and the process dies (double free or corruption).",
    fix="quantize the model in float32: model.float()",
    needs=("pair",),
    find=find_float16,
)

# -- dynamic scales ----------------------------------------------------------------------------------------------------


def find_slices(context: Any) -> Iterator[Found]:
    """Dynamic inputs of which the kernel scales each row, pixel or image, and the converted graph the tensor."""
    for node in () if context.as_deployed else context.pair.quantized.graph.nodes:
        axes = dynamic_axes(node)
        if not axes or not is_dequantize(node.args[0], "tensor"):
            continue
        shape = shape_of(node.args[0].args[0].args[0])
        if shape is None or any(size != 1 for axis, size in enumerate(shape, -len(shape)) if axis not in axes):
            kind = "image" if len(axes) > 1 else "row" if axes == (-1,) else "pixel"
            yield Found(
                context.name_of(node), f"the kernel has a scale for each {kind} of its input, this graph one for all"
            )


SLICES = Rule(
    id="xnnpack-dynamic-slices",
    severity="note",
    title="dynamic inputs that the device quantizes more finely",
    why="convert_pt2e computes one scale for the tensor, XNNPACK one for each row of a linear's input, each pixel of a "
    "pointwise convolution's and each image of any other's. Where these differ in size, the converted graph is worse "
    "than the device: 13 dB against 59 dB for a linear with rows from 0.001 to 1000.",
    fix="nothing for the device; analyse pair.as_deployed(), which computes as the kernels do",
    needs=("pair",),
    find=find_slices,
)

# -- lowering ----------------------------------------------------------------------------------------------------------


def find_pool(context: Any) -> Iterator[Found]:
    """Max pools that were called without a stride."""
    if executorch_release() >= (1, 5):
        raise DoesNotApplyError("to ExecuTorch 1.5 and later, which takes them")
    for name, node in context.nodes.items():
        if op_type(node) == "max_pool2d" and len(node.args) < 3 and "stride" not in node.kwargs:
            yield Found(name, "max_pool2d has no stride")


POOL = Rule(
    id="xnnpack-pool-stride",
    severity="error",
    title="max pools without a stride",
    why="Before ExecuTorch 1.5, XNNPACK's partitioner reads the stride and finds none: to_edge_transform_and_lower() "
    "fails with 'IndexError: tuple index out of range'.",
    fix="write the stride: F.max_pool2d(x, 2, 2), or use nn.MaxPool2d(2), which does",
    needs=("graph",),
    find=find_pool,
)


def find_scalars(context: Any) -> Iterator[Found]:
    """Values without axes that are made outside of a delegate, and rounded for an op in one."""
    for node in context.pair.quantized.graph.nodes:
        value = node.args[0] if is_quantize(node, "default") else None
        readers = {op_type(reader) for rounded in node.users for reader in rounded.users}
        if isinstance(value, Node) and shape_of(value) == () and not readers.isdisjoint(INSIDE):
            made_inside = op_type(value) in RESHAPES or all(_has_no_axis(read) for read in value.all_input_nodes)
            if value.op == "placeholder" or not made_inside:
                yield Found(context.name_of(value), "it has no axis, and is rounded for a delegate")


def _has_no_axis(node: Node) -> bool:
    while is_dequantize(node) or is_quantize(node):
        node = node.all_input_nodes[0]
    return shape_of(node) == ()


SCALAR = Rule(
    id="xnnpack-scalar",
    severity="error",
    title="quantized values without an axis",
    why="ExecuTorch looks at the first element of what enters a delegate rounded, to see where its channels are, and a "
    "value without axes has none. to_edge_transform_and_lower() fails in ChannelsLastTaggedReshapePass: 'IndexError: "
    "invalid index of a 0-dim tensor'.",
    fix="leave it an axis of size 1: x.mean((0, 1), keepdim=True), x[:1] in place of x[0], scale.reshape(1); or keep "
    'the op that reads it in float: pt2qa.Edit("float", (name,))',
    needs=("pair",),
    find=find_scalars,
)

LARGE_SHARE = 0.01
"""Share of the multiply-adds from which an op outside of the delegate costs time that is worth a warning."""


def find_portable(context: Any) -> Iterator[Found]:
    """Ops between delegated ones for which XNNPACK has no kernel."""
    pair = context.pair
    shares = {product.name: product.share for product in context.products}
    for op in undelegated_ops(pair.program, pair.quantized):
        share = shares.get(op.name, 0.0)
        yield Found(
            op.name,
            f"runs in {', '.join(op.kernels)}, in float, with {share:.1%} of the multiply-adds",
            severity="warning" if share >= LARGE_SHARE else None,
            value=share,
        )


PORTABLE = Rule(
    id="xnnpack-portable-op",
    severity="note",
    title="ops that leave the delegate",
    why="XNNPACK has no kernel for them: the delegate ends before such an op, a portable kernel computes it in float, "
    "which is slow, and another delegate begins after it. XNNPACK's own partitioner was asked.",
    fix="replace the op by one that XNNPACK has, or move it to where the model begins or ends",
    needs=("pair",),
    find=find_portable,
)

# -- images whose channels are last ------------------------------------------------------------------------------------

MISREAD = {
    LAST: "its image is turned for all that read what it was computed from: the output is wrong, or the program fails",
    ROUNDED: "its input is rounded by pixel for one convolution and by image for another: one of both is wrong",
    APART: "its image is read in float by ops of a delegate and by others, and may be turned for both: the output is "
    "wrong, or the program fails",
}
"""What happens to an op that :func:`pt2qa_xnnpack.for_xnnpack` would edit; to one of :data:`FIRST`, by its kind."""


def find_turned(context: Any) -> Iterator[Found]:
    """Ops that get an image in another layout, or rounded in another way, than their kernels take it."""
    for node, needed in misread(context.pair.quantized):
        first = "it is computed over the channels, not over the last axis"
        if op_type(node) == "linear":
            first = "its image is turned between rounding and kernel: the model is not lowered"
        # Whether one delegate has all that it might have, only lowering tells.
        yield Found(context.name_of(node), MISREAD.get(needed, first), "warning" if needed == APART else None)


TURNED_IMAGE = Rule(
    id="xnnpack-turned-image",
    severity="error",
    title="images whose channels are last where an op takes them as first",
    why="XNNPACK's convolutions and pools have the channels last. ExecuTorch turns images before and after them, but "
    "not before a softmax over the last axis, in float too: Conv2d, softmax(-1) is 7 dB from the model. Before a "
    "linear with dynamic scales it turns what is already rounded, before a convolution with dynamic scales the first "
    "value that all was made of, for all who read it: what else is computed of it is wrong, or fails "
    "(xnn_status_invalid_parameter). A pointwise convolution rounds by pixel what others read by image. And an image "
    "with a static scale that is read in float, in the delegate and outside, is turned for both: Conv2d, Mish.",
    fix="pt2qa_xnnpack.for_xnnpack(graph) gives each such op an input of its own, without changing a number; "
    "pt2qa.quantize does it, and so does the code that it prints",
    needs=("pair",),
    find=find_turned,
)

RULES = (REFUSED, OUTSIDE, DTYPE, SHARED_BIAS, STACKED, FLOAT16, POOL, SCALAR, RANGE, PORTABLE, SLICES, TURNED_IMAGE)
"""What :meth:`pt2qa_xnnpack.XNNPACK.rules` adds to the structure check."""
