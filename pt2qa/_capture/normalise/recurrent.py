"""Decomposes recurrent ops on request.

``aten.lstm.input`` is one op with all its matrix products inside, and every quantizer silently leaves it in float.
torch has decompositions of it into linears, one step of the sequence after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.fx import GraphModule, Node

from pt2qa._capture.changes import Change
from pt2qa._capture.normalise.editing import names_by_node, renew_outputs
from pt2qa._graph.handles import PART
from pt2qa._graph.internals.flow_passes import put_instead, traced
from pt2qa._graph.internals.nodes import CUSTOM

RULE: Final = "recurrent op"
_ATEN = torch.ops.aten

RECURRENT = {
    "lstm": (_ATEN.lstm.input, _ATEN.lstm.data),
    "gru": (_ATEN.gru.input, _ATEN.gru.data),
    "rnn": (_ATEN.rnn_tanh.input, _ATEN.rnn_tanh.data, _ATEN.rnn_relu.input, _ATEN.rnn_relu.data),
}
"""The kinds that ``capture(decompose=...)`` takes, with their ops."""


def decompose_recurrent(program: ExportedProgram, kinds: Sequence[str]) -> tuple[Change, ...]:
    """Replaces recurrent ops with linears and elementwise ops, one step of the sequence after the other, in place.

    Each part records under :data:`pt2qa._graph.handles.PART` its op and its step of the sequence.  Kinds that are no
    key of :data:`RECURRENT` are ignored.
    """
    targets = {target for kind in kinds for target in RECURRENT.get(kind, ())}
    wanted = [node for node in program.graph.nodes if node.op == "call_function" and node.target in targets]
    names = names_by_node(program) if wanted else {}
    decompositions = default_decompositions() if wanted else {}
    changes = []
    for node in wanted:
        body = traced(node, decompositions[node.target])
        steps = _steps(node, body)
        for part, copy in put_instead(program.graph_module, node, body).items():
            copy.meta[CUSTOM] = {PART: {"of": names[node], "step": steps[part]}}
        linears = sum(part.target is _ATEN.linear.default for part in steps)
        changes.append(Change(RULE, names[node], f"decomposed into {linears} linears and the ops between them"))
    renew_outputs(program)
    return tuple(changes)


def _steps(node: Node, body: GraphModule) -> dict[Node, int]:
    """For each op of the body, the step of the sequence that it computes, from 0; -1 if it belongs to none or to all.

    A step begins with the product of the hidden state; the last one ends where the outputs of the steps are joined.
    """
    operands = dict(zip(body.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    hidden = _hidden_weights(node)
    counts = dict.fromkeys(hidden, 0)
    steps, current = {}, -1
    for part in body.graph.nodes:
        if part.op != "call_function":
            continue
        weight = operands.get(part.args[1]) if part.target is _ATEN.linear.default else None
        if weight in counts:
            current = counts[weight]
            counts[weight] += 1
        elif part.target in (_ATEN.cat.default, _ATEN.stack.default):
            current = -1
        steps[part] = current
    return steps


def _hidden_weights(node: Node) -> list[Any]:
    """The hidden-to-hidden weight of each layer and direction: the second of its parameters."""
    arguments: list[Any] = list(node.args)
    place = max(index for index, argument in enumerate(arguments) if isinstance(argument, list | tuple))
    parameters, layers, both_ways = arguments[place], arguments[place + 2], arguments[place + 5]
    return list(parameters[1 :: len(parameters) // (layers * (2 if both_ways else 1))])
