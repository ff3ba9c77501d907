"""What a plug-in says its backend can do beside its own defaults; assumptions for plug-ins that do not say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa.overrides.plan import OverridePlan
    from pt2qa.plugins.rules import Rule

LEVELS = ("float", "observer")
"""What every backend can take: an op that stays in float, and scales that are found in another way."""


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


def refusal(plugin: Any, kind: str, node: Node) -> str:
    """Why an op cannot take an edit; empty where it can, or where the plug-in does not say."""
    refuses = getattr(plugin, "refuses", None)
    return "" if refuses is None else str(refuses(kind, node))


def rules_of(plugin: Any) -> tuple[Rule, ...]:
    """The rules that a plug-in brings to the structure check, for what only its backend knows."""
    rules = getattr(plugin, "rules", None)
    return () if rules is None else tuple(rules())


def spell(plugin: Any, plan: OverridePlan, graph: GraphModule) -> str:
    """A plan as Python source for an export flow without pt2qa.

    Args:
        plugin: the plug-in; one that cannot spell a plan gets a snippet that edits the annotation of any quantizer.
        plan: the edits.
        graph: the captured float graph, with handles.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
    """
    from pt2qa.plugins.spelling import Base, spell_edits

    own = getattr(plugin, "spell", None)
    if own is not None:
        return str(own(plan, graph))
    return spell_edits(plan, graph, Base((), "quantizer", "quantizer is the one that you configured"))
