"""Override plans as calls of torchao's x86 quantizer.

``set_module_name_qconfig(path, None)`` matches a plan if the module contains one convolution or linear whose readers
are annotated independently of it: a following pool, ``cat`` or ``add`` would be annotated differently.  Everything
else is expressed as an edit of the annotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.nn import functional

from pt2qa.plugins import Base, OverridePlan, edited_quantizer_code, modules_in_float, scopes_in
from pt2qa_x86.configure import Call, calls_for
from pt2qa_x86.plugin import QUANTIZED_OPS, X86

if TYPE_CHECKING:
    from torch.fx import GraphModule

_MODULE = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"


def quantizer_code(plugin: X86, plan: OverridePlan, graph: GraphModule, qat: bool) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    calls = calls_for(plugin, scopes_in(plugin, graph, QUANTIZED_OPS), graph)
    paths = modules_in_float(plan, graph, ("conv1d", "conv2d", "linear"), QUANTIZED_OPS)
    # In QAT, torchao fails on a convolution that its settings leave in float.
    plain = bool(paths) and len(calls) == 1 and not qat
    if plain:
        calls = (*calls, *(("set_module_name_qconfig", (path,), None) for path in paths))
    (first, *others), made = [_call(call, qat) for call in calls], _configs(calls, qat)
    imports = (
        *(["import torch"] if any("torch." in text for text in (first, *others)) else []),
        f"from {_MODULE} import {', '.join(['X86InductorQuantizer', *made])}",
    )
    start = f"X86InductorQuantizer().{first}"
    if plain or not plan.edits:
        return "\n".join([*imports, "", f"quantizer = {start}", *(f"quantizer.{call}" for call in others), ""])
    return edited_quantizer_code(plan, graph, Base(imports, ".".join([start, *others])), plugin, qat=qat)


def _call(call: Call, qat: bool) -> str:
    method, names, settings = call
    ops = method == "set_function_type_qconfig"
    what = [f"torch.{'nn.functional.' * hasattr(functional, name)}{name}" if ops else repr(name) for name in names]
    return f"{method}({', '.join([*what, 'None' if settings is None else _config(settings, qat)])})"


def _configs(calls: Sequence[Call], qat: bool) -> list[str]:
    """The functions that make the configurations."""
    made = [_config(settings, qat).partition("(")[0] for _, _, settings in calls if settings is not None]
    return list(dict.fromkeys(made))


def _config(settings: X86, qat: bool) -> str:
    if settings.mode == "weight_only":
        return "get_x86_inductor_linear_dynamic_fp16_config()"
    options = [
        *(["is_qat=True"] if qat else []),
        *(["is_dynamic=True"] if settings.mode == "dynamic" else []),
        *(["reduce_range=True"] if settings.reduce_range else []),
    ]
    return f"get_default_x86_inductor_quantization_config({', '.join(options)})"
