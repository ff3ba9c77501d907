"""From options to ExecuTorch's quantizer, region by region.

A region is an op that XNNPACK quantizes together with its weight, its bias and the ReLU after it. Settings belong to
the op; weight, bias and ReLU follow it. The quantizer's own ``set_module_name`` checks the module of each: a weight
has none, and a ReLU is often in another, so the region is rejected and its convolution stays in float.
Here each group of settings is a separate quantizer, which sees only the regions with these settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantizer import ComposableQuantizer, Quantizer

from pt2qa.plugins import Scope, op_type
from pt2qa_xnnpack.internals import keep_in_float
from pt2qa_xnnpack.plugin import DYNAMIC_OPS, QUANTIZED_OPS, WITHOUT_KERNEL, XNNPACK


def quantizer_for(plugin: XNNPACK, apart: Sequence[Scope[XNNPACK]], qat: bool) -> Quantizer:
    """A quantizer that gives each region the settings of the first scope that contains it, else the plug-in's own."""
    everywhere = XNNPACK(mode=plugin.mode, per_channel=plugin.per_channel)
    groups = list(dict.fromkeys(scope.settings for scope in apart if scope.settings is not None))
    if not apart:
        return _plain(everywhere, qat)

    def settings_of(node: Node) -> XNNPACK | None:
        settings = next((scope.settings for scope in apart if scope.holds(node)), everywhere)
        return None if settings is not None and _has_no_kernel(node, settings) else settings

    def only(wanted: XNNPACK) -> Callable[[Node], bool]:
        return lambda node: (start := _start(node)) is None or settings_of(start) == wanted

    if everywhere in groups:
        groups.remove(everywhere)
    quantizers = [_plain(settings, qat).set_filter_function(only(settings)) for settings in (*groups, everywhere)]
    return ComposableQuantizer([KeepFloat(lambda node: _unasked(node) and settings_of(node) is None), *quantizers])


class LeanXNNPACKQuantizer(XNNPACKQuantizer):  # type: ignore[misc]  # executorch has no type information
    """ExecuTorch's quantizer, but it searches for batch norms only in a graph that has one.

    The original exports a dozen patterns at each ``annotate``, which takes seconds, although ``prepare_pt2e`` has
    already folded the batch norms.
    """

    SUPPORTED_PATTERNS: Sequence[Any] = XNNPACKQuantizer.SUPPORTED_PATTERNS

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotates as ExecuTorch's does; edits ``model``, as torchao requires."""
        dynamic = self.global_config.input_activation.is_dynamic
        if dynamic or any(op_type(node) == "batch_norm" for node in model.graph.nodes):
            return super().annotate(model)  # type: ignore[no-any-return]  # ditto
        patterns = self.SUPPORTED_PATTERNS
        self.SUPPORTED_PATTERNS = [pattern for pattern in patterns if "bn" not in pattern.name.split("_")]
        # As the skipped search does first: dead code is not annotated.
        model.graph.eliminate_dead_code()
        model.recompile()
        try:
            return super().annotate(model)  # type: ignore[no-any-return]  # ditto
        finally:
            self.SUPPORTED_PATTERNS = patterns


class KeepFloat(Quantizer):  # type: ignore[misc]  # torchao has no type information
    """Marks ops to stay in float, so that no later quantizer annotates them.

    For ops that XNNPACK's quantizer annotates without calling its filter. Convolutions must not be among them: QAT's
    prepare raises an IndexError at one annotated with nothing to quantize.
    """

    def __init__(self, keep: Callable[[Node], bool]) -> None:
        super().__init__()
        self.keep = keep

    def annotate(self, model: GraphModule) -> GraphModule:
        """Marks the ops as annotated; edits ``model``, as torchao requires."""
        for node in model.graph.nodes:
            if self.keep(node):
                keep_in_float(node)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to check: every graph can stay in float."""


def _plain(settings: XNNPACK, qat: bool) -> LeanXNNPACKQuantizer:
    config = get_symmetric_quantization_config(
        is_per_channel=settings.per_channel, is_qat=qat, is_dynamic=settings.mode == "dynamic"
    )
    quantizer = LeanXNNPACKQuantizer()
    quantizer.set_global(config)
    return quantizer


def _start(node: Node) -> Node | None:
    """The op that starts a node's region; None for weights and nodes outside any region."""
    if op_type(node) == "relu" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node if _starts_region(node) else None


def _starts_region(node: Node) -> bool:
    return node.op == "call_function" and op_type(node) in (*QUANTIZED_OPS, *WITHOUT_KERNEL)


def _unasked(node: Node) -> bool:
    """Whether XNNPACK's quantizer annotates an op without calling its filter: outright, or by passing scales on."""
    return _starts_region(node) and op_type(node) in ("cat", "adaptive_avg_pool2d")


def _has_no_kernel(node: Node, settings: XNNPACK) -> bool:
    return settings.mode == "dynamic" and op_type(node) not in DYNAMIC_OPS
