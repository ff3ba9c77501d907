"""What a plug-in declares about its backend beyond its own defaults, and assumptions for plug-ins that do not."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pt2qa.plugins.code import Base, edited_quantizer_code

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa.overrides.plan import OverridePlan
    from pt2qa.plugins.backend import Backend
    from pt2qa.plugins.rules import Rule

LEVELS = ("float", "observer")
"""What every backend supports: ops in float, and other observers."""


def levels_of(plugin: Any) -> tuple[str, ...]:
    """The kinds of edit worth trying op by op with a plug-in's backend.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> "float" in levels_of(pt2qa.quantizer("xnnpack"))
    True
    """
    return tuple(getattr(plugin, "levels", LEVELS))


def fusable_of(plugin: Any) -> tuple[tuple[str, str], ...] | None:
    """Pairs of op types that the backend runs as one kernel; None if the plug-in does not declare them.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> ("conv2d", "hardtanh") in fusable_of(pt2qa.quantizer("xnnpack"))
    True
    """
    pairs = getattr(plugin, "fusable", None)
    return None if pairs is None else tuple((first, second) for first, second in pairs)


def unsupported_reason(plugin: Any, kind: str, node: Node) -> str:
    """Why an op cannot take an edit; empty if it can, or if the plug-in does not say.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.
        kind: of the edit, such as ``float``.
        node: the op in the captured graph.

    >>> capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.zeros(1, 4))
    >>> linear = next(node for node in capture.module().graph.nodes if "linear" in str(node.target))
    >>> unsupported_reason(pt2qa.quantizer("xnnpack"), "float", linear)
    ''
    """
    own = getattr(plugin, "unsupported_reason", None)
    return "" if own is None else str(own(kind, node))


def rules_of(plugin: Any) -> tuple[Rule, ...]:
    """The rules that a plug-in adds to the structure check, specific to its backend.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> {type(rule).__name__ for rule in rules_of(pt2qa.quantizer("xnnpack"))}
    {'Rule'}
    """
    rules = getattr(plugin, "rules", None)
    return () if rules is None else tuple(rules())


def backend_of(plugin: Any) -> Backend | None:
    """What lowers and runs a plug-in's models; None if it has nothing.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> backend_of(pt2qa.quantizer("xnnpack")).name
    'ExecuTorch with XNNPACK'
    """
    return getattr(plugin, "backend", None)


def quantizer_code(plugin: Any, plan: OverridePlan, graph: GraphModule, *, qat: bool = False) -> str:
    """A plan as Python source for an export flow without pt2qa.

    Args:
        plugin: the plug-in; if it writes no code, the result is a quantizer that edits another one's annotations.
        plan: the edits.
        graph: the captured float graph, with handles.
        qat: for ``prepare_qat_pt2e``; a plug-in whose own method does not take it counts as one that writes no code.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
        PluginError: the backend does not support an edit.
        QuantizeError: an edit changes nothing, or cannot be made.

    >>> capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), torch.zeros(1, 4))
    >>> code = quantizer_code(pt2qa.quantizer("xnnpack"), pt2qa.OverridePlan(()), capture.module())
    >>> code.splitlines()[-1]
    'quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))'
    """
    own = getattr(plugin, "quantizer_code", None)
    if own is not None and not qat:
        return str(own(plan, graph))
    if own is not None and "qat" in inspect.signature(own).parameters:
        return str(own(plan, graph, qat=True))
    base = Base((), "quantizer", "quantizer is the one that you configured")
    return edited_quantizer_code(plan, graph, base, plugin, qat=qat)
