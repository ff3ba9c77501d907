"""From options to torchao's x86 quantizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn import functional
from torchao.quantization.pt2e.quantizer import QuantizationConfig
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
    get_x86_inductor_linear_dynamic_fp16_config,
)

from pt2qa.errors import PluginError
from pt2qa.plugins import Scope, called_modules, op_type
from pt2qa_x86.plugin import QUANTIZED_OPS, X86

Call = tuple[str, tuple[str, ...], X86 | None]
"""A method of the quantizer, the op or path that it is called with, if any, and the settings; None is float."""


def calls_for(plugin: X86, apart: Sequence[Scope[X86]], graph: GraphModule) -> tuple[Call, ...]:
    """The calls that give a quantizer the plug-in's options, and those of each scope."""
    # As the global setting these would also apply to convolutions, for which the backend has no such kernel.
    everywhere: Call = ("set_global", (), plugin)
    calls = [everywhere if plugin.mode == "static" else ("set_function_type_qconfig", ("linear",), plugin)]
    paths: dict[str, X86 | None] = {}
    for scope in apart:
        if scope.kind == "op type":
            calls.append(("set_function_type_qconfig", (scope.name,), scope.settings))
            continue
        settings = [(path, scope.settings) for path in scope.paths]
        if scope.settings is not None and scope.settings.mode != "static":
            # Everything but linears in the module stays in float.
            settings = [(path, scope.settings) for path in _linears(scope, graph)] + [
                (path, None) for path in scope.paths
            ]
        for path, own in settings:
            paths.setdefault(path, own)  # a path already set comes from a deeper module
    return (*calls, *(("set_module_name_qconfig", (path,), own) for path, own in paths.items()))


def quantizer_for(plugin: X86, apart: Sequence[Scope[X86]], graph: GraphModule, qat: bool) -> X86InductorQuantizer:
    """A quantizer with the plug-in's options, and those of each scope."""
    quantizer = X86InductorQuantizer()
    for method, names, settings in calls_for(plugin, apart, graph):
        what = map(function_of, names) if method == "set_function_type_qconfig" else names
        _set(getattr(quantizer, method), *what, None if settings is None else _config(settings, qat))
    return quantizer


def function_of(op: str) -> Callable[..., Any]:
    """The function by which the quantizer's settings know an op: ``torch.nn.functional.linear`` for ``linear``."""
    return getattr(functional if hasattr(functional, op) else torch, op)  # type: ignore[no-any-return]  # by name


def _config(settings: X86, qat: bool) -> QuantizationConfig:
    if settings.mode == "weight_only":
        return get_x86_inductor_linear_dynamic_fp16_config()
    return get_default_x86_inductor_quantization_config(
        is_qat=qat, is_dynamic=settings.mode == "dynamic", reduce_range=settings.reduce_range
    )


def _set(method: Callable[..., Any], *args: Any) -> None:
    """Calls a setter of the quantizer.  It skips what it does not support and only warns; here that is an error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        method(*args)
    if said:
        told = " ".join(str(warning.message) for warning in said)
        raise PluginError(f"quantizer 'x86': torchao's quantizer refused {args[0]!r}: {told}")


def _linears(scope: Scope[X86], graph: GraphModule) -> list[str]:
    """Paths of the modules inside a scope that call linear and nothing else that settings affect."""
    called: dict[str, set[str]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and scope.holds(node) and op_type(node) in QUANTIZED_OPS:
            called.setdefault(called_modules(node)[-1], set()).add(op_type(node))
    linears = {path: ops - {"linear"} for path, ops in called.items() if "linear" in ops}
    for path, others in linears.items():
        if others:
            raise PluginError(
                f"quantizer 'x86': {scope.option}: this mode is for linear only, and {path!r} calls "
                f"{', '.join(sorted(others))} beside it. Put the linear into a module of its own, or use None"
            )
    return list(linears)
