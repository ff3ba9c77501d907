"""The options of the x86 quantizer.  torchao is imported when a quantizer is built, never before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pt2qa.errors import PluginError
from pt2qa.plugins import (
    BackendSpec,
    OverridePlan,
    Rule,
    Scope,
    check_options,
    check_overrides,
    modules_of,
    op_type,
    scopes_in,
)
from pt2qa_x86.backend import X86Backend
from pt2qa_x86.spec import SPEC

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

QUANTIZED_OPS = (
    "conv1d",
    "conv2d",
    "linear",
    "mul",
    "max_pool2d",
    "cat",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "flatten",
    "matmul",
)
"""Ops that the quantizer can annotate. Pools, ``cat`` and ``flatten`` only if their inputs are already quantized."""


@dataclass(frozen=True, kw_only=True)
class X86:
    """torchao's x86 Inductor quantizer: int8 weights per output channel (-128..127), uint8 activations (0..255).

    Args:
        mode: ``"static"``: activation scales come from calibration. ``"dynamic"``: they are computed from each input;
            linear only. ``"weight_only"``: linear weights in float16, everything else in float32.
        reduce_range: activations in 0..127, for CPUs without VNNI, whose int16 sums of two products otherwise saturate.
        modules: by module path, the options that differ there (``{"head": {"reduce_range": True}}``), or None:
            everything in it stays in float. Naming a module also quantizes its ``matmul``, which is off by default.
        op_types: the same by op name: ``{"matmul": {}}`` turns ``matmul`` on with the plug-in's own options,
            ``{"linear": None}`` leaves linears in float. A named module takes precedence over a named op type.

    Static and dynamic do not mix in one model; weight-only is not for QAT, and QAT cannot leave a convolution with a
    batch norm in float. Weights are always per channel:
    the backend has no other scheme.

    Raises:
        PluginError: an option's value is not one of those above, or options that exclude each other.

    >>> X86(mode="dynamic", modules={"head": None}).mode
    'dynamic'
    """

    name: ClassVar[str] = "x86"
    summary: ClassVar[str] = "int8 for Intel and AMD CPUs through torch.compile's Inductor backend"
    levels: ClassVar[tuple[str, ...]] = ("float", "dynamic", "observer")
    backend: ClassVar[X86Backend] = X86Backend()
    # The quantizer already annotates a convolution or linear together with the activation after it.
    fusable: ClassVar[tuple[tuple[str, str], ...]] = ()
    int32_bias: ClassVar[bool] = False
    spec: ClassVar[BackendSpec] = SPEC
    quantizer_classes: ClassVar[tuple[str, ...]] = (
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer.X86InductorQuantizer",
    )

    mode: Literal["static", "dynamic", "weight_only"] = field(
        default="static", metadata={"help": "how activations are quantized; weight_only: float16 linear weights"}
    )
    reduce_range: bool = field(default=False, metadata={"help": "7-bit activations, for CPUs without VNNI"})
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
            _check_linear_only(scope)
        _check_modes(self, apart, qat)
        if qat:
            _check_float_convs(apart, graph)
        # torchao takes seconds to import, and only a build needs it.
        from pt2qa_x86.configure import quantizer_for

        return quantizer_for(self, apart, graph, qat)

    def takes(self) -> tuple[str, ...]:
        """The kinds of op that this mode quantizes; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        if self.mode != "static":
            return ("linear",)
        return tuple(op for op in QUANTIZED_OPS if op != "matmul" or "matmul" in self.op_types)

    def unsupported_reason(self, kind: str, node: Node) -> str:
        """Why Inductor cannot apply an edit to an op; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        if kind == "int16":
            return "Inductor has no int16 activations"
        if kind == "int8" and self.reduce_range:
            return "reduce_range=true keeps activations in seven bits"
        if kind == "dynamic" and op_type(node) != "linear":
            return "Inductor computes scales for each input of linear only"
        return ""

    def before_convert(self) -> Callable[[GraphModule], list[tuple[Node, str]]]:
        """What oneDNN's kernels need of a prepared graph; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_x86.layout import for_x86

        return for_x86

    def quantizer_code(self, plan: OverridePlan, graph: GraphModule, *, qat: bool = False) -> str:
        """The plan as calls of torchao's quantizer; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_x86.code import quantizer_code

        return quantizer_code(self, plan, graph, qat)

    def rules(self) -> tuple[Rule, ...]:
        """Checks that only these CPUs need; see :class:`pt2qa.plugins.QuantizerPlugin`."""
        from pt2qa_x86.rules import RULES

        return RULES


def _check_linear_only(scope: Scope[X86]) -> None:
    if scope.settings is not None and scope.settings.mode != "static" and "linear" not in scope.ops:
        raise PluginError(
            f"quantizer 'x86': {scope.option}: mode {scope.settings.mode!r} is for linear, "
            f"and there is only {', '.join(scope.ops)}. Use 'static', or None to leave it in float"
        )


def _check_modes(plugin: X86, apart: tuple[Scope[X86], ...], qat: bool) -> None:
    modes: dict[str, str] = {"mode": plugin.mode}
    modes |= {scope.option: scope.settings.mode for scope in apart if scope.settings is not None}
    if qat and "weight_only" in modes.values():
        where = next(option for option, mode in modes.items() if mode == "weight_only")
        raise PluginError(
            f"quantizer 'x86': {where} is 'weight_only', which has no QAT: float16 weights need no training. "
            "Use 'static' or 'dynamic', or quantize with qat=False"
        )
    if plugin.reduce_range and set(modes.values()) == {"weight_only"}:
        raise PluginError(
            "quantizer 'x86': reduce_range is about int8 activations, and mode 'weight_only' has none: drop one of them"
        )
    if {"static", "dynamic"} <= set(modes.values()):
        listed = ", ".join(f"{where} is {mode!r}" for where, mode in modes.items() if mode != "weight_only")
        raise PluginError(
            f"quantizer 'x86': static and dynamic quantization do not mix in one model, but {listed}. "
            "Use one of the two, and None for what shall stay in float"
        )


def _check_float_convs(apart: tuple[Scope[X86], ...], graph: GraphModule) -> None:
    """QAT rewrites every convolution with a batch norm, and raises an IndexError at one that x86 marked as float."""
    for node in graph.graph.nodes:
        scope = next((scope for scope in apart if scope.holds(node)), None)
        if scope is None or scope.settings is not None or op_type(node) != "conv2d":
            continue
        if any(op_type(user) == "batch_norm" for user in node.users):
            raise PluginError(
                f"quantizer 'x86': {scope.option}: {('the model', *modules_of(node))[-1]} is a convolution "
                "with a batch norm, which torchao's QAT cannot leave in float. Quantize it, or use qat=False"
            )


PLUGIN = X86()
