"""Which nodes are constants, which depends on what is rounded: an op that computes with a rounded constant is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pt2qa.overrides.points import GraphNode, Specs
from pt2qa.overrides.sharing import rounds_at


def as_lowered(nodes: Mapping[str, GraphNode], specs: Specs) -> dict[str, GraphNode]:
    """The nodes as the program has them that is quantized by these specs.

    What is computed from constants alone is one constant, which goes by the name of what it was made of; but an op that
    computes with a rounded constant is an op like any other, so that its own error is seen.

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
