"""Ops in float between quantized ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from pt2qa._check.context import CheckContext
from pt2qa._check.rounding import own_spec, spec_read
from pt2qa.overrides import Annotations
from pt2qa.overrides.points import GraphNode
from pt2qa.plugins import DoesNotApplyError, Found, Rule

_LISTED = 4
_FREE = {"dropout", "feature_dropout", "alias", "detach", "getitem"}
"""Ops that a backend takes out, or that only name an output."""


def find(context: CheckContext) -> Iterator[Found]:
    """Kinds of connected ops that the quantizer leaves out between rounded values, the costliest kind first."""
    annotations = context.annotations
    if not annotations.edges:
        raise DoesNotApplyError("to models of which nothing is annotated")
    places: dict[str, list[str]] = defaultdict(list)
    costs: Counter[str] = Counter()
    for island in _islands(annotations):
        read, written = _border(annotations, island)
        kinds = list(dict.fromkeys(node.op for node in island if node.op not in _FREE))
        if read and written and kinds:
            more = f" and {len(kinds) - _LISTED} more" if len(kinds) > _LISTED else ""
            what = f"{', '.join(kinds[:_LISTED])}{more} between quantized ops, with {read} dequantize"
            what += f" and {written} quantize"
            places[what].append(island[0].name)
            costs[what] += read + written
    for what, names in places.items():
        times = "" if len(names) == 1 else f", at {len(names)} places, of which this is the first"
        yield Found(names[0], what + times, value=costs[what])


def _islands(annotations: Annotations) -> Iterator[list[GraphNode]]:
    """Sets of connected ops without an annotation, each in graph order."""
    nodes = annotations.ground.nodes
    loose = {key for key, node in nodes.items() if not node.constant and node.op != "input"}
    loose -= {reader or source for source, reader in annotations.specs}
    while loose:
        open_keys, island = [next(key for key in nodes if key in loose)], set[str]()
        while open_keys:
            key = open_keys.pop()
            if key in loose:
                loose.remove(key)
                island.add(key)
                open_keys += [*nodes[key].inputs, *nodes[key].readers]
        yield [node for key, node in nodes.items() if key in island]


def _border(annotations: Annotations, island: list[GraphNode]) -> tuple[int, int]:
    """How many rounded values the ops of an island read, and how many of theirs are rounded for others."""
    inside = {node.key for node in island}
    read = {
        source
        for node in island
        for source in node.inputs
        if not annotations.ground.nodes[source].constant and spec_read(annotations, source, node.key) is not None
    }
    written = {
        node.key
        for node in island
        if any(own_spec(annotations, (node.key, key)) is not None for key in node.readers if key not in inside)
    }
    return len(read - inside), len(written)


RULE = Rule(
    id="float-island",
    severity="note",
    title="ops in float between quantized ones",
    why="Each value that comes or goes is converted, which costs time on its own, and cuts the graph of a delegate "
    "into pieces. Layer norms and activations without an int8 kernel are the usual ones.",
    fix="where the backend has a kernel, annotate the ops in the quantizer; where not, keeping their neighbours in "
    'float, too, may cost less: pt2qa.Edit("float", (name, ...)), or pt2qa.reconfigure',
    needs=("annotations",),
    find=find,
)
