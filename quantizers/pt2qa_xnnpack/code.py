"""Override plans as calls of ExecuTorch's quantizer.

Its own way to leave a module in float is a filter: ``set_module_name`` takes no None.  A filter matches a plan
if it is called for every op of the region, the module contains nothing else, and no following op would pass the
region's scale on.  Everything else is expressed as an edit of the annotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pt2qa.plugins import Base, OverridePlan, edited_quantizer_code, modules_in_float, op_type
from pt2qa_xnnpack.plugin import QUANTIZED_OPS, WITHOUT_KERNEL, XNNPACK

if TYPE_CHECKING:
    from torch.fx import GraphModule

_MODULE = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
_ASKED = frozenset(QUANTIZED_OPS) - {"cat", "adaptive_avg_pool2d"}
"""Ops for which the quantizer calls its filter, and whose annotation does not depend on the preceding op's."""


def quantizer_code(plugin: XNNPACK, plan: OverridePlan, graph: GraphModule, qat: bool) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    products = {op_type(node) for node in graph.graph.nodes if node.op == "call_function"} & {*WITHOUT_KERNEL}
    base = _base(plugin, sorted(products), qat)
    paths = modules_in_float(plan, graph, _ASKED, (*QUANTIZED_OPS, "relu"))
    if not paths or products or base.remark:
        return edited_quantizer_code(plan, graph, base, plugin, qat=qat)
    return "\n".join(
        [
            *base.imports,
            "from torchao.quantization.pt2e.quantizer import get_module_name_filter",
            "",
            f"in_float = [get_module_name_filter(path) for path in {list(paths)!r}]",
            f"quantizer = {base.expression}",
            "quantizer.set_filter_function(lambda node: not any(holds(node) for holds in in_float))",
            "",
        ]
    )


def _base(plugin: XNNPACK, without_kernel: Sequence[str], qat: bool) -> Base:
    if plugin.modules or plugin.op_types:
        return Base(
            (),
            "quantizer",
            f"quantizer is what pt2qa.quantizer('xnnpack', ...).build(graph, qat={qat}) gives: the options modules and "
            "op_types are pt2qa's own, and ExecuTorch's quantizer has no calls for them",
        )
    options = [
        f"is_per_channel={plugin.per_channel}",
        *(["is_qat=True"] if qat else []),
        *(["is_dynamic=True"] if plugin.mode == "dynamic" else []),
    ]
    made = f"XNNPACKQuantizer().set_global(get_symmetric_quantization_config({', '.join(options)}))"
    if without_kernel:
        starts = tuple(f"aten.{op}" for op in without_kernel)
        made += f".set_filter_function(lambda node: not str(node.target).startswith({starts!r}))"
    return Base((f"from {_MODULE} import XNNPACKQuantizer, get_symmetric_quantization_config",), made)
