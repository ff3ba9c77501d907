"""Which nodes are constants.  This depends on what is rounded: an op that reads a rounded constant is not constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pt2qa.overrides.points import GraphNode, Specs
from pt2qa.overrides.sharing import rounds_at


def as_lowered(nodes: Mapping[str, GraphNode], specs: Specs) -> dict[str, GraphNode]:
    """The nodes, with ``constant`` set as in the program that these specs lead to.

    A value that is computed only from constants is a constant, named after what it was computed from.  But an op that
    reads a rounded constant is an ordinary op, so that reports show its error.

    Args:
        nodes: by fx name, in graph order.
        specs: every annotated point.
    """
    found: dict[str, GraphNode] = {}
    rounded: set[str] = set()
    for key, node in nodes.items():
        sources = list(dict.fromkeys(source for _, source in node.reads))
        fixed = all(found[source].constant for source in sources) if sources else node.constant
        reads_rounded = any(
            source in rounded or rounds_at(specs, (source, key), nodes) or rounds_at(specs, (source, ""), nodes)
            for source in sources
        )
        constant = fixed and (node.moves or not reads_rounded)
        name = node.name
        if fixed and sources:
            name = found[sources[0]].name if constant else node.owner or name
        if constant and reads_rounded:
            rounded.add(key)
        found[key] = replace(node, constant=constant, name=name)
    return found
