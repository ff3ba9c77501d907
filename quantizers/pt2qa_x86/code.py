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


def quantizer_code(plugin: X86, plan: OverridePlan, graph: GraphModule) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    base = _base(plugin)
    paths = modules_in_float(plan, graph, ("conv1d", "conv2d", "linear"), QUANTIZED_OPS)
    if not paths or base.remark:
        return edited_quantizer_code(plan, graph, base)
    calls = [f"quantizer.set_module_name_qconfig({path!r}, None)" for path in paths]
    return "\n".join([*base.imports, "", f"quantizer = {base.expression}", *calls, ""])


def _base(plugin: X86) -> Base:
    if plugin.modules or plugin.op_types or plugin.mode != "static":
        return Base(
            (),
            "quantizer",
            "quantizer is what pt2qa.quantizer('x86', ...).build(graph, qat=False) gives for its options",
        )
    option = "reduce_range=True" if plugin.reduce_range else ""
    return Base(
        (f"from {_MODULE} import X86InductorQuantizer, get_default_x86_inductor_quantization_config",),
        f"X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config({option}))",
    )
