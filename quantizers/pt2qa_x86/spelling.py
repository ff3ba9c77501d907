"""Override plans as calls of torchao's x86 quantizer.

``set_module_name_qconfig(path, None)`` says what a plan says where the module holds one convolution or linear and what
reads its result is settled by itself: a pool, ``cat`` or ``add`` behind it would be annotated otherwise.  Everything
else is said as an edit of the annotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pt2qa.plugins import Base, OverridePlan, Place, called_modules, modules_of, op_type, places_of, spell_edits
from pt2qa_x86.plugin import QUANTIZED_OPS, X86

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_MODULE = "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"
_STARTS = ("conv1d", "conv2d", "linear")
_FOLLOWERS = ("batch_norm", "relu")
_SETTLED = (*_STARTS, "output")
"""What may read the region's result: nothing that the quantizer annotates after its input."""


def spell(plugin: X86, plan: OverridePlan, graph: GraphModule) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    base = _base(plugin)
    paths = _modules_in_float(plan, graph)
    if not paths or base.remark:
        return spell_edits(plan, graph, base)
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


def _modules_in_float(plan: OverridePlan, graph: GraphModule) -> tuple[str, ...]:
    """The modules to set to None to say a plan; empty where that does not say it."""
    places = places_of(graph)
    names = [name for edit in plan.edits for name in edit.ops]
    if any(edit.kind != "float" for edit in plan.edits) or any(name not in places for name in names):
        return ()
    starts = [places[name] for name in names if places[name].op in _STARTS]
    named = {places[name].node for name in names}
    if {node for start in starts for node in _region(start.node)} != named:
        return ()
    return tuple(start.module for start in starts) if all(_is_alone(start, graph) for start in starts) else ()


def _region(start: Node) -> list[Node]:
    """An op with the batch norm and the ReLU that follow it."""
    region = [start]
    for follower in _FOLLOWERS:
        readers = list(region[-1].users)
        if len(readers) == 1 and op_type(readers[0]) == follower:
            region.append(readers[0])
    return region


def _is_alone(start: Place, graph: GraphModule) -> bool:
    """Whether setting the op's module to None does this and nothing else."""
    called = called_modules(start.node)
    if not called or called[-1] != start.module:
        return False
    if any(op_type(reader) not in _SETTLED and reader.op != "output" for reader in _region(start.node)[-1].users):
        return False
    held = [node for node in graph.graph.nodes if node.op == "call_function" and start.module in modules_of(node)]
    return [node for node in held if op_type(node) in QUANTIZED_OPS] == [start.node]
