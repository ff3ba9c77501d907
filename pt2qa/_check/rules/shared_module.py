"""Modules that forward calls more than once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.internals.nodes import VALUE, clean_path, module_stack
from pt2qa.overrides.annotations import Annotations
from pt2qa.plugins import Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """The outermost modules with several calls; a warning where the quantizer takes the weights of some calls only."""
    calls = _calls(context.nodes)
    annotations = context.known_annotations
    for path, ops_of_calls in calls.items():
        count = len(ops_of_calls)
        if count < 2 or any(len(calls[outer]) >= count for outer in _outer(path) if outer in calls):
            continue
        yield _found(path, list(ops_of_calls.values()), annotations, context)


def _found(path: str, calls: list[list[str]], annotations: Annotations | None, context: CheckContext) -> Found:
    what = f"called {len(calls)} times"
    if annotations is not None:
        weighted = [[name for name in ops if _reads_weight(context.nodes[name])] for ops in calls]
        if any(weighted):
            readers = {edge.reader for edge in annotations.edges if edge.kind == "weight"}
            taken = sum(all(name in readers for name in ops) for ops in weighted)
            if 0 < taken < len(calls):
                why = f"{what}, and {context.plugin.name} quantizes the weights in {taken} of these calls only"
                return Found(path, why, "warning", _FIX_WEIGHTS)
    return Found(path, f"{what}; each call has scales of its own, settings by module name reach all of them")


def _calls(nodes: Mapping[str, Node]) -> dict[str, dict[str, list[str]]]:
    """By module path, the ops of each of its calls; torch.export gives every call a key of its own."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, node in nodes.items():
        for key, (path, _) in module_stack(node).items():
            if clean_path(path):
                found[clean_path(path)][key].append(name)
    return found


def _outer(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _reads_weight(node: Node) -> bool:
    return any(source.op == "get_attr" and source.meta[VALUE].dim() > 1 for source in node.all_input_nodes)


_FIX_WEIGHTS = "give each call a module of its own (copy.deepcopy), or count on the float time of the other calls"

RULE = Rule(
    id="shared-module",
    severity="note",
    title="modules that forward calls more than once",
    why="One set of weights, several places in the graph. Each place has its own observers after pt2qa.capture; in "
    "torch.export's own programs quantizers may take all calls for one (plain-program), and some take a "
    "convolution's first call only.",
    fix="nothing where that is meant",
    needs=("graph",),
    find=find,
)
