"""The options of the XNNPACK quantizer.  ExecuTorch is imported when a quantizer is built, never before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pt2qa.errors import PluginError
from pt2qa.plugins import BackendSpec, OverridePlan, Rule, Scope, check_options, check_overrides, op_type, scopes_in
from pt2qa_xnnpack.backend import XNNPACKBackend
from pt2qa_xnnpack.internals import shape_of
from pt2qa_xnnpack.spec import SPEC

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

PRODUCTS = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
)
"""Ops that multiply by a weight."""

WITHOUT_KERNEL = ("conv3d", "conv_transpose3d")
"""Products that ExecuTorch's quantizer annotates, and that ExecuTorch lowers in float only: they stay in float."""

QUANTIZED_OPS = (*(op for op in PRODUCTS if op not in WITHOUT_KERNEL), "add", "mul", "cat", "adaptive_avg_pool2d")
"""Ops that start a quantized region. Others (``max_pool2d``, ``mean``, ``view`` …) pass their producer's scale on."""

DYNAMIC_OPS = ("linear", "conv2d", "conv_transpose2d")
"""Ops that XNNPACK can quantize with scales computed for each input."""

FUSABLE = tuple((op, act) for op in ("conv2d", "conv_transpose2d", "linear") for act in ("hardtanh", "relu6"))
"""Pairs that XNNPACK runs as one int8 kernel, though its quantizer rounds between them; ``F.relu6`` becomes a hardtanh.

From ExecuTorch 1.4.1: ``fused_acts`` in ``backends/xnnpack/partition/config/gemm_configs.py`` takes them into one
partition, and ``backends/xnnpack/_passes/fuse_activation_pass.py`` makes the activation the kernel's output range.
``add`` takes only a ReLU there, ``clamp`` is in neither list, and a conv1d has a reshape before its activation.
"""


@dataclass(frozen=True, kw_only=True)
class XNNPACK:
    """ExecuTorch's XNNPACK quantizer: int8 weights (symmetric, -127..127) and int8 activations (affine, -128..127).

    Args:
        mode: ``"static"``: activation scales come from calibration. ``"dynamic"``: they are computed from each input;
            linear, and conv2d and conv_transpose2d unless depthwise or followed by a ReLU, which stay in float, as
            convolutions in three dimensions do in either mode.
        per_channel: one weight scale for each output channel, else one for the tensor. Calibrated on 16 images, the
            pretrained MobileNetV2 has an output SQNR of about 14 dB per channel and 10.5 dB per tensor.
        modules: by module path, the options that differ there (``{"features.0": {"per_channel": False}}``), or None:
            everything in it stays in float.
        op_types: the same by op name: ``{"add": None}``. A named module takes precedence over a named op type.

    A convolution that is called twice is quantized only at its first call, as with the quantizer itself.

    Raises:
        PluginError: an option's value is not one of those above.

    Unlike the quantizer's own ``set_module_name``, which leaves convolutions of the named module in float (their
    weights carry no module name and so fail its filter), ``modules`` quantizes them.

    >>> XNNPACK(per_channel=False, op_types={"add": None}).per_channel
    False
    """

    name: ClassVar[str] = "xnnpack"
    summary: ClassVar[str] = "int8 for Arm and x86 CPUs through ExecuTorch's XNNPACK backend"
    levels: ClassVar[tuple[str, ...]] = ("float", "dynamic", "observer")
    fusable: ClassVar[tuple[tuple[str, str], ...]] = FUSABLE
    backend: ClassVar[XNNPACKBackend] = XNNPACKBackend()
    int32_bias: ClassVar[bool] = True
    spec: ClassVar[BackendSpec] = SPEC
    quantizer_classes: ClassVar[tuple[str, ...]] = (
        "executorch.backends.xnnpack.quantizer.xnnpack_quantizer.XNNPACKQuantizer",
        "torchao.testing.pt2e._xnnpack_quantizer.XNNPACKQuantizer",
    )

    mode: Literal["static", "dynamic"] = field(default="static", metadata={"help": "how activation scales are found"})
    per_channel: bool = field(default=True, metadata={"help": "one weight scale per output channel, not per tensor"})
    modules: Mapping[str, Mapping[str, object] | None] = field(
        default_factory=dict, hash=False, metadata={"help": "options that differ in a module; None: float"}
    )
    op_types: Mapping[str, Mapping[str, object] | None] = field(
        default_factory=dict, hash=False, metadata={"help": "options that differ for an op; None: float"}
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_overrides(self)

    def build(self, graph: GraphModule, *, qat: bool) -> Any:
        """The configured quantizer; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        apart = scopes_in(self, graph, QUANTIZED_OPS)
        for scope in apart:
            _check_dynamic(scope)
        there = {op_type(node) for node in graph.graph.nodes if node.op == "call_function"}
        in_float: list[Scope[XNNPACK]] = [Scope("op type", op, None, (op,), ()) for op in WITHOUT_KERNEL if op in there]
        # ExecuTorch takes seconds to import, and only a build needs it.
        from pt2qa_xnnpack.regions import quantizer_for

        return quantizer_for(self, (*in_float, *apart), qat)

    def takes(self) -> tuple[str, ...]:
        """The kinds of op that this mode quantizes; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        return DYNAMIC_OPS if self.mode == "dynamic" else QUANTIZED_OPS

    def unsupported_reason(self, kind: str, node: Node) -> str:
        """Why XNNPACK cannot apply an edit to an op; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        if kind == "int16":
            return "XNNPACK has no int16 activations"
        if kind != "dynamic":
            return ""
        if not self.per_channel:
            return (
                "XNNPACK computes scales for each input only where weights have a scale per channel (per_channel=true)"
            )
        if op_type(node) not in DYNAMIC_OPS:
            return f"XNNPACK computes scales for each input of {', '.join(DYNAMIC_OPS)} only"
        return _dynamic_conv_reason(node) if op_type(node) != "linear" else ""

    def dynamic_axes(self, node: Node) -> tuple[int, ...]:
        """Which values share a dynamic scale in XNNPACK's kernels; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        return dynamic_axes(node)

    def rules(self) -> tuple[Rule, ...]:
        """Checks of what XNNPACK makes of a converted graph; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_xnnpack.rules import RULES

        return RULES

    def before_convert(self) -> Callable[[GraphModule], list[tuple[Node, str]]]:
        """What ExecuTorch's delegate needs of a prepared graph; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_xnnpack.separation import for_xnnpack

        return for_xnnpack

    def quantizer_code(self, plan: OverridePlan, graph: GraphModule, *, qat: bool = False) -> str:
        """The plan as calls of ExecuTorch's quantizer; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_xnnpack.code import quantizer_code

        return quantizer_code(self, plan, graph, qat)


def dynamic_axes(node: Node) -> tuple[int, ...]:
    """The axes along which the values of a dynamic input share a scale in XNNPACK's kernel, counted from the last.

    ``convert_pt2e`` has one scale for the tensor, XNNPACK one for each row of a linear's input and each image of a
    convolution's (``num_nonbatch_dims`` in ExecuTorch's ``backends/xnnpack/operators/quant_params.py``).  A pointwise
    convolution runs as a linear over the channels, so that each pixel has a scale, as measured with ExecuTorch 1.4.1.
    """
    if op_type(node) == "linear":
        return (-1,)
    if op_type(node) not in DYNAMIC_OPS:
        return ()
    return (-3,) if _is_pointwise(node) else (-3, -2, -1)


def _is_pointwise(node: Node) -> bool:
    """Whether a convolution multiplies the channels of each pixel: 1 x 1, without stride, padding and groups.

    The kernel is 1 x 1 if the output has the input's height and width.
    """
    if op_type(node) != "conv2d":
        return False
    arguments: Any = (*node.args[3:], *([1], [0], [1], 1)[max(len(node.args) - 3, 0) :])
    stride, padding, _, groups = arguments
    source = node.all_input_nodes[0]
    while shape_of(source) is None:
        source = source.all_input_nodes[0]  # its quantize and dequantize ops were not traced
    before, after = shape_of(source) or (), shape_of(node) or ()
    return set(stride) == {1} and set(padding) == {0} and groups == 1 and tuple(before[-2:]) == tuple(after[-2:])


def _dynamic_conv_reason(node: Node) -> str:
    weight = shape_of(node.all_input_nodes[1])
    if weight is not None and op_type(node) == "conv2d" and weight[1] == 1:
        return "XNNPACK has no depthwise convolution with scales computed for each input"
    readers = list(node.users)
    if len(readers) == 1 and op_type(readers[0]) == "relu":
        return "XNNPACK's quantizer leaves a convolution with a ReLU behind it in float where scales are dynamic"
    return ""


def _check_dynamic(scope: Scope[XNNPACK]) -> None:
    if scope.settings is not None and scope.settings.mode == "dynamic" and not set(scope.ops) & set(DYNAMIC_OPS):
        raise PluginError(
            f"quantizer 'xnnpack': {scope.option}: mode 'dynamic' is for {', '.join(DYNAMIC_OPS)}, "
            f"and there is only {', '.join(scope.ops)}. Use 'static', or None to leave it in float"
        )


PLUGIN = XNNPACK()
