"""Override plans as calls of ExecuTorch's quantizer.

Its own way to leave a module in float is a filter: ``set_module_name`` takes no None.  A filter says what a plan says
where it is asked for every op of the region, where the module holds nothing else, and where no op behind it would pass
the region's scale on.  Everything else is said as an edit of the annotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pt2qa.plugins import Base, OverridePlan, Place, called_modules, modules_of, op_type, places_of, spell_edits
from pt2qa_xnnpack.plugin import QUANTIZED_OPS, XNNPACK

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_MODULE = "executorch.backends.xnnpack.quantizer.xnnpack_quantizer"
_ASKED = frozenset(QUANTIZED_OPS) - {"cat", "adaptive_avg_pool2d"}
"""Ops for which the quantizer asks its filter, and whose annotation does not depend on that of the op before them."""


def spell(plugin: XNNPACK, plan: OverridePlan, graph: GraphModule) -> str:
    """A plan as Python source; see :class:`pt2qa.plugins.QuantizerPlugin`."""
    base = _base(plugin)
    paths = _modules_in_float(plan, graph)
    if not paths or base.remark:
        return spell_edits(plan, graph, base)
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


def _base(plugin: XNNPACK) -> Base:
    if plugin.modules or plugin.op_types:
        return Base(
            (),
            "quantizer",
            "quantizer is what pt2qa.quantizer('xnnpack', ...).build(graph, qat=False) gives: the options modules and "
            "op_types are pt2qa's own, and ExecuTorch's quantizer has no calls for them",
        )
    options = [f"is_per_channel={plugin.per_channel}", *(["is_dynamic=True"] if plugin.mode == "dynamic" else [])]
    return Base(
        (f"from {_MODULE} import XNNPACKQuantizer, get_symmetric_quantization_config",),
        f"XNNPACKQuantizer().set_global(get_symmetric_quantization_config({', '.join(options)}))",
    )


def _modules_in_float(plan: OverridePlan, graph: GraphModule) -> tuple[str, ...]:
    """The modules that a filter has to leave out to say a plan; empty where no filter says it."""
    places = places_of(graph)
    names = [name for edit in plan.edits for name in edit.ops]
    if any(edit.kind != "float" for edit in plan.edits) or any(name not in places for name in names):
        return ()
    named = {places[name].node for name in names}
    starts = [places[name] for name in names if places[name].op in QUANTIZED_OPS]
    regions = [_region(start.node) for start in starts]
    whole = {node for region in regions for node in region} == named
    if not whole or not all(_is_alone(start, graph, named) for start in starts):
        return ()
    if any(
        op_type(reader) not in _ASKED and reader.op != "output" for region in regions for reader in region[-1].users
    ):
        return ()
    return tuple(dict.fromkeys(start.module for start in starts))


def _region(start: Node) -> list[Node]:
    """An op with the batch norm and the ReLU that the quantizer takes together with it."""
    region = [start]
    for follower in ("batch_norm", "relu"):
        readers = list(region[-1].users)
        if len(readers) == 1 and op_type(readers[0]) == follower:
            region.append(readers[0])
    return region


def _is_alone(start: Place, graph: GraphModule, named: set[Node]) -> bool:
    """Whether a filter on the op's module leaves out what the plan names and nothing else."""
    called = called_modules(start.node)
    if start.op not in _ASKED or not called or called[-1] != start.module:
        return False
    held = [node for node in graph.graph.nodes if node.op == "call_function" and start.module in modules_of(node)]
    return all(node in named for node in held if op_type(node) in (*QUANTIZED_OPS, "relu"))
