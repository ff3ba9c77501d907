"""Records for every op which module class or function it came from, separately for each call.

Quantizers that match *source partitions* (x86 above all) read ``source_fn_stack``, which only ``strict=True`` writes.
Otherwise they guess from ``nn_module_stack``: two calls of one module form a single partition, a subclass of ``Conv2d``
is not a ``Conv2d``, and ``F.conv2d`` has no class at all.  In strict mode, a ``Conv2d`` with circular padding forms two
partitions, one without a convolution.  This pass gives both modes one entry per op: the class that represents what the
op computes.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import graph_modules, names_by_node
from pt2qa._graph.handles import module_of, op_of
from pt2qa._graph.internals.nodes import SOURCES, VALUE, module_stack
from pt2qa._graph.internals.torch import OpOverload

_ATEN = torch.ops.aten

_CLASSES: dict[OpOverload, tuple[type[nn.Module], ...]] = {
    _ATEN.conv1d.default: (nn.Conv1d,),
    _ATEN.conv2d.default: (nn.Conv2d,),
    _ATEN.conv3d.default: (nn.Conv3d,),
    _ATEN.linear.default: (nn.Linear,),
    _ATEN.batch_norm.default: (nn.BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm3d),
    _ATEN.relu.default: (nn.ReLU,),
    _ATEN.relu_.default: (nn.ReLU,),
    _ATEN.relu6.default: (nn.ReLU6,),
    _ATEN.hardtanh.default: (nn.Hardtanh, nn.ReLU6),
    _ATEN.hardtanh_.default: (nn.Hardtanh, nn.ReLU6),
    _ATEN.hardswish.default: (nn.Hardswish,),
    _ATEN.hardswish_.default: (nn.Hardswish,),
    _ATEN.silu.default: (nn.SiLU,),
    _ATEN.silu_.default: (nn.SiLU,),
    _ATEN.gelu.default: (nn.GELU,),
    _ATEN.leaky_relu.default: (nn.LeakyReLU,),
    _ATEN.leaky_relu_.default: (nn.LeakyReLU,),
    _ATEN.tanh.default: (nn.Tanh,),
    _ATEN.tanh_.default: (nn.Tanh,),
    _ATEN.max_pool2d.default: (nn.MaxPool2d,),
    _ATEN.avg_pool2d.default: (nn.AvgPool2d,),
    _ATEN.adaptive_avg_pool2d.default: (nn.AdaptiveAvgPool2d,),
}
"""The classes by which quantizers know an op.  The first one is used if none of the others called the op."""

_OPERATORS: dict[OpOverload, Callable[..., Any]] = {
    _ATEN.add.Tensor: operator.add,
    _ATEN.add_.Tensor: operator.add,
    _ATEN.mul.Tensor: operator.mul,
    _ATEN.mul_.Tensor: operator.mul,
}
"""The same for operators on two tensors.  With a scalar they are different ops, on which the x86 quantizer fails."""

_NAMED = {op_of(target) for target in (*_CLASSES, *_OPERATORS)}
_SINGLE = tuple({kind for kinds in _CLASSES.values() for kind in kinds})
_OPEN = (nn.RNNBase, nn.RNNCellBase)
"""Composite modules whose inner ops are separate sources once capture has decomposed them."""

_SHARED_RULE: Final = "shared module"
_RULE: Final = "op source"


def write_sources(program: ExportedProgram, opened: tuple[type[nn.Module], ...] = ()) -> tuple[Change, ...]:
    """Rewrites ``source_fn_stack`` in place: one entry for each op, none for parameters.

    Ops inside a composite ``torch.nn`` module, such as ``MultiheadAttention``, keep that module as their source, as in
    strict export; one call of it is one partition.  Ops of the modules that are ``opened`` get the sources that they
    would have outside of any module.  Returned is which modules are called more than once, and which ops got a class
    that did not call them.
    """
    renamed: list[tuple[Node, str]] = []
    calls: Counter[tuple[str, str]] = Counter()
    for graph_module in graph_modules(program):
        first_in_call: dict[tuple[Any, ...], str] = {}
        for node in graph_module.graph.nodes:
            if node.op != "call_function":
                node.meta.pop(SOURCES, None)
                continue
            if node.target is operator.getitem and isinstance(node.args[0], Node) and SOURCES in node.args[0].meta:
                node.meta[SOURCES] = list(node.args[0].meta[SOURCES])
                continue
            caller = _calling_class(node)
            caller = None if caller in opened else caller
            source = _source(node, caller)
            label = node.name
            if source is caller and caller not in _SINGLE:
                label = first_in_call.setdefault(tuple(module_stack(node)), node.name)
            elif source in _SINGLE:
                path, kind = module_of(node)
                if source is caller:
                    calls[path, op_of(node.target)] += 1
                else:
                    renamed.append((node, f"matched as {source.__name__}; its caller is {kind or 'not known'}"))
            node.meta[SOURCES] = [(label, source)]
    if not renamed and all(count == 1 for count in calls.values()):
        return ()
    names = names_by_node(program)
    shared = tuple(
        Change(_SHARED_RULE, module, f"its {count} calls of {op} are matched one by one")
        for (module, op), count in calls.items()
        if count > 1
    )
    return shared + tuple(Change(_RULE, names[node], what) for node, what in renamed)


def _source(node: Node, caller: type[nn.Module] | None) -> Any:
    """The class or function that represents an op."""
    kinds = _CLASSES.get(node.target) if isinstance(node.target, OpOverload) else None
    if caller is not None and caller not in _SINGLE and not issubclass(caller, (*_SINGLE, *_OPEN)):
        return caller
    if kinds is not None:
        return caller if caller in kinds else _by_rank(node, kinds)
    if isinstance(node.target, OpOverload) and node.target in _OPERATORS:
        return _OPERATORS[node.target] if _takes_two_tensors(node) else node.target
    if caller is not None and issubclass(caller, _OPEN):
        return caller
    name = op_of(node.target)
    if not isinstance(node.target, OpOverload):
        # Not "add", which means an addition of tensors: this one adds sizes, or is a higher-order op.
        return f"{type(node.target).__name__}.{name}"
    # Quantizers would mistake another overload for the op that they know by its class, and fail.
    function = None if name in _NAMED else getattr(torch, name, getattr(F, name, None))
    return function if callable(function) and getattr(function, "__module__", None) else node.target


def _by_rank(node: Node, kinds: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    if kinds[0] is nn.BatchNorm2d:
        return {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(node.meta[VALUE].dim(), nn.BatchNorm1d)
    return kinds[0]


def _calling_class(node: Node) -> type[nn.Module] | None:
    """The ``torch.nn`` class that called an op; None for other classes and for containers."""
    kind: Any = [None, *(kind for _, kind in module_stack(node).values())][-1]
    if isinstance(kind, str):
        module, _, name = kind.rpartition(".")
        is_torch = module.startswith(("torch.nn.modules", "torch.ao."))
        kind = getattr(sys.modules.get(module), name, None) if is_torch else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind.__module__.endswith("container"):
        return None
    return kind if kind.__module__.startswith(("torch.nn.modules", "torch.ao.")) else None


def _takes_two_tensors(node: Node) -> bool:
    return all(isinstance(arg, Node) and isinstance(arg.meta.get(VALUE), Tensor) for arg in node.args[:2])
