"""In-place ops that keep a quantizer from seeing a pattern."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.torch import OpOverload
from pt2qa._simulator.op_rules import functional_spelling, mutates_first_argument
from pt2qa.errors import QuantizeError
from pt2qa.overrides import Annotations
from pt2qa.plugins import DoesNotApplyError, Found, Rule


def find(context: CheckContext) -> Iterator[Found]:
    """In-place ops around which other edges are rounded once every op is spelled out of place."""
    graph = copy.deepcopy(context.graph)
    written = dict(_spell_out_of_place(graph, context))
    if not written:
        raise DoesNotApplyError("to graphs without in-place ops")
    try:
        after = context.annotate(graph, context.names)
    except QuantizeError as error:
        raise DoesNotApplyError(f"where the quantizer fails on the other spelling: {error}".rstrip(".")) from error
    before = context.annotations
    for name, node in written.items():
        missing, extra = (
            _roundings(one, name) - _roundings(other, name) for one, other in ((after, before), (before, after))
        )
        if missing or extra:
            parts = [f"does not round {', '.join(sorted(missing))}, as it does out of place"] if missing else []
            parts += [f"rounds {', '.join(sorted(extra))}, as it does not out of place"] if extra else []
            yield Found(name, f"written in place ({node.target}), the quantizer {' and '.join(parts)}")


def _spell_out_of_place(graph: GraphModule, context: CheckContext) -> Iterator[tuple[str, Node]]:
    """Gives in-place ops the targets that they would have out of place; edits ``graph``.

    It may then compute something else, where another op looks at the same memory: it is for annotating only.
    """
    names: Mapping[int, object] = context.names
    originals = {node.name: node for node in context.graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not mutates_first_argument(node.target) or handle_of(node) not in names:
            continue
        assert isinstance(node.target, OpOverload)
        other = functional_spelling(node.target)
        if other is not None:
            original = originals[node.name]
            node.target = other
            yield context.name_of(original), original


def _roundings(annotations: Annotations, name: str) -> set[str]:
    """What is rounded next to an op, in words; constants aside."""
    constants = {node.name for node in annotations.ground.nodes.values() if node.constant}
    edges = [edge for edge in annotations.edges if name in (edge.source, edge.reader) and edge.source not in constants]
    return {
        f"{edge.source} as {edge.reader} reads it" if edge.reader else f"the output of {edge.source}" for edge in edges
    }


RULE = Rule(
    id="in-place-spelling",
    severity="warning",
    title="in-place ops that the quantizer does not know",
    why="Quantizers look for patterns op by op, before anything is made functional: out += x; relu_(out) is another "
    "pattern than relu(out + x) (executorch#22159).",
    fix="write the op out of place in forward: out = out * gate in the place of out *= gate, without inplace=True",
    needs=("annotations", "graph"),
    find=find,
)
