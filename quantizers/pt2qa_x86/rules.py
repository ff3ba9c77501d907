"""Rules of the structure check that only x86 CPUs need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pt2qa.plugins import DoesNotApplyError, Found, Rule
from pt2qa_x86.layout import is_strided, weight_of

VNNI = frozenset({"avx_vnni", "avx512_vnni", "amx_int8"})
"""Any of these sums four int8 products in 32 bits at once."""

_X86 = frozenset({"x86_64", "amd64", "sse2", "ssse3", "sse4_1", "avx", "avx2", "avx512f", "avx512bw"})
INT16_MAX = 2**15 - 1


def find(context: Any) -> Iterator[Found]:
    """Convolutions and linears with a pair of weights whose products with the largest input exceed 16 bits."""
    if context.cpu & VNNI:
        raise DoesNotApplyError("to CPUs with VNNI, which add products in 32 bits")
    if not context.cpu & _X86:
        raise DoesNotApplyError('to CPUs that are not known to be x86; give cpu="no-vnni"')
    for product in context.integer_products:
        given = product.input_params
        if given is None or given.dtype != "uint8":
            continue
        largest = given.quant_max * _largest_pair(product.integers)
        if largest > INT16_MAX:
            yield Found(
                product.name,
                f"inputs reach {given.quant_max}, and pairs of weights exceed 16 bits with that",
                value=largest,
            )


def _largest_pair(integers: Any) -> float:
    """The largest absolute sum of two weights of equal sign on adjacent input channels.

    Args:
        integers: tensor of shape (output channels, input channels, ...).
    """
    before, after = integers[:, 0::2], integers[:, 1::2]
    if not after.numel():
        return 0.0  # depthwise kernels widen to 32 bits before they multiply
    before = before[:, : after.shape[1]]
    above = (before.clamp(min=0) + after.clamp(min=0)).max()
    below = (before.clamp(max=0) + after.clamp(max=0)).min()
    return max(float(above), -float(below))


PAIR_SUMS = Rule(
    id="x86-pair-sums",
    severity="warning",
    title="sums of two products that saturate at 16 bits on a CPU without VNNI",
    why="Without VNNI, oneDNN multiplies uint8 inputs by int8 weights and adds the products of two adjacent input "
    "channels in 16 bits, which cuts them off at 32,767: 255 * 127 * 2 is 64,770. The model then computes something "
    "else than on a CPU with VNNI, and than its converted graph. Listed where the weights as they are can do it, for "
    "inputs at the upper end.",
    fix='take 7 bits for activations, as 127 * 127 * 2 is 32,258: pt2qa.quantizer("x86", reduce_range=True); or deploy '
    "on CPUs with VNNI",
    needs=("pair",),
    find=find,
)

UINT8_MAX = 255
PRODUCTS = ("conv1d", "conv2d", "linear")


def find_range(context: Any) -> Iterator[Found]:
    """Sites with a reduced range that round a convolution or linear, or a ReLU directly after one."""
    program = context.pair.program
    steps = {step.out: step for step in program.steps}
    for site in context.pair.sites:
        if site.params.dtype != "uint8" or site.params.quant_max >= UINT8_MAX or site.params.dynamic:
            continue
        made: Any = steps.get(site.source)
        step = steps.get(made.reads[0]) if made is not None and made.op == "relu" else made
        if step is not None and step.op in PRODUCTS:
            kernel = step.op if step is made else f"{step.op} with its relu"
            largest = site.params.quant_max
            yield Found(
                site.name,
                f"its range is 0..{largest}, and the kernel of the {kernel} clamps at {UINT8_MAX}",
                value=UINT8_MAX - largest,
            )


RANGE = Rule(
    id="x86-ignored-range",
    severity="warning",
    title="reduced ranges that the kernels of convolutions and linears ignore",
    why="A convolution or linear rounds its own output to uint8, after its ReLU if it has one, and clamps at 255 "
    "whatever quant_max is. Values beyond the calibrated range are cut off at 127 here and pass there, up to twice as "
    "large. Without VNNI, the next layer's sums of two products can then exceed 16 bits, which reduce_range is to "
    "prevent. All other ops clamp as asked.",
    fix="calibrate on data with the range that the CPU will see; on CPUs with VNNI, leave reduce_range out",
    needs=("pair",),
    find=find_range,
)


def find_strided(context: Any) -> Iterator[Found]:
    """Linears whose int8 weight is not in the order of memory."""
    graph = context.pair.quantized
    for node in graph.graph.nodes:
        weight = weight_of(node)
        if is_strided(graph, weight) and weight is not node.args[1]:  # rounding stands between
            yield Found(context.name_of(node), "its kernel reads the transpose of its weight")


STRIDED = Rule(
    id="x86-strided-weight",
    severity="error",
    title="int8 weights of linears that are another tensor's transpose",
    why="torch 2.13 packs the int8 weight of a linear in the order of memory, whatever its strides. One that was made "
    "by a transpose, as weights of Keras or a tied weight are, is read as the tensor before it: the output is "
    "unrelated to the converted graph's, with torch.compile as well. Weights of convolutions are read right.",
    fix="give it memory of its own: torch.nn.Parameter(weight.contiguous()); pt2qa_x86.for_x86(graph) edits a "
    "graph so; pt2qa.quantize does it, and so does the code that it prints",
    needs=("pair",),
    find=find_strided,
)

RULES = (PAIR_SUMS, RANGE, STRIDED)
"""What :meth:`pt2qa_x86.X86.rules` adds to the structure check."""
