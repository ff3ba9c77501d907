"""What a plug-in says its backend can do beside its own defaults; assumptions for plug-ins that do not say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pt2qa.plugins.code import Base, edited_quantizer_code
from pt2qa.plugins.options import name_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa.overrides.plan import OverridePlan
    from pt2qa.plugins.rules import Rule

_FORMER = {"unsupported_reason": "refuses", "quantizer_code": "spell"}
LEVELS = ("float", "observer")
"""What every backend can take: an op that stays in float, and scales that are found in another way."""


def own_method(plugin: Any, name: str) -> Callable[..., Any] | None:
    """A method that a plug-in may leave out, also by the name that it had before; None where it is left out."""
    found: Callable[..., Any] | None = getattr(plugin, name, None)
    if found is None and (found := getattr(plugin, _FORMER[name], None)) is not None:
        text = f"quantizer {name_of(plugin)!r}: its method {_FORMER[name]} is called {name} now"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    return found


def levels_of(plugin: Any) -> tuple[str, ...]:
    """The kinds of edit that are worth trying with a plug-in's backend, op by op."""
    return tuple(getattr(plugin, "levels", LEVELS))


def fusable_of(plugin: Any) -> tuple[tuple[str, str], ...] | None:
    """Pairs of op types that the backend runs as one kernel; None where the plug-in does not say."""
    pairs = getattr(plugin, "fusable", None)
    return None if pairs is None else tuple((first, second) for first, second in pairs)


def taken_by(plugin: Any) -> tuple[str, ...]:
    """The kinds of op that a quantizer as it is configured may annotate; empty where its plug-in does not say."""
    takes = getattr(plugin, "takes", None)
    return () if takes is None else tuple(takes())


def unsupported_reason(plugin: Any, kind: str, node: Node) -> str:
    """Why an op cannot take an edit; empty where it can, or where the plug-in does not say."""
    own = own_method(plugin, "unsupported_reason")
    return "" if own is None else str(own(kind, node))


def rules_of(plugin: Any) -> tuple[Rule, ...]:
    """The rules that a plug-in brings to the structure check, for what only its backend knows."""
    rules = getattr(plugin, "rules", None)
    return () if rules is None else tuple(rules())


def quantizer_code(plugin: Any, plan: OverridePlan, graph: GraphModule) -> str:
    """A plan as Python source for an export flow without pt2qa.

    Args:
        plugin: the plug-in; one that writes no code gets a quantizer that edits the annotation of any other.
        plan: the edits.
        graph: the captured float graph, with handles.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
    """
    own = own_method(plugin, "quantizer_code")
    if own is not None:
        return str(own(plan, graph))
    return edited_quantizer_code(plan, graph, Base((), "quantizer", "quantizer is the one that you configured"))
