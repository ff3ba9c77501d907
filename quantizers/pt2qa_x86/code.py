"""Override plans as calls of torchao's x86 quantizer.

``set_module_name_qconfig(path, None)`` matches a plan if the module contains one convolution or linear whose readers
are annotated independently of it: a following pool, ``cat`` or ``add`` would be annotated differently.  Everything
else is expressed as an edit of the annotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pt2qa.plugins import Base, OverridePlan, edited_quantizer_code, modules_in_float
from pt2qa_x86.plugin import QUANTIZED_OPS, X86

if TYPE_CHECKING:
    from torch.fx import GraphModule

_MODULE = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"


def quantizer_code(plugin: X86, plan: OverridePlan, graph: GraphModule, qat: bool) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    base = _base(plugin, qat)
    paths = modules_in_float(plan, graph, ("conv1d", "conv2d", "linear"), QUANTIZED_OPS)
    # In QAT, torchao fails on a convolution that its settings leave in float.
    if not paths or base.remark or qat:
        return edited_quantizer_code(plan, graph, base)
    calls = [f"quantizer.set_module_name_qconfig({path!r}, None)" for path in paths]
    return "\n".join([*base.imports, "", f"quantizer = {base.expression}", *calls, ""])


def _base(plugin: X86, qat: bool) -> Base:
    if plugin.modules or plugin.op_types:
        return Base(
            (),
            "quantizer",
            f"quantizer is what pt2qa.quantizer('x86', ...).build(graph, qat={qat}) gives for its options",
        )
    if plugin.mode == "weight_only":
        config = "get_x86_inductor_linear_dynamic_fp16_config()"
    else:
        options = [
            *(["is_qat=True"] if qat else []),
            *(["is_dynamic=True"] if plugin.mode == "dynamic" else []),
            *(["reduce_range=True"] if plugin.reduce_range else []),
        ]
        config = f"get_default_x86_inductor_quantization_config({', '.join(options)})"
    imports = f"from {_MODULE} import X86InductorQuantizer, {config.partition('(')[0]}"
    if plugin.mode == "static":
        return Base((imports,), f"X86InductorQuantizer().set_global({config})")
    return Base(
        ("import torch", imports),
        f"X86InductorQuantizer().set_function_type_qconfig(torch.nn.functional.linear, {config})",
    )
