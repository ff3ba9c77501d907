"""What ``prepare`` did to the numbers: nothing, or an error that names where.

Observers pass values on unchanged, so a prepared graph must still compute the float model.  Where it does not, no
calibration can mend it, and blaming int8 would be wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.agreement import FLIPS, compare_outputs, difference
from pt2qa._graph.handles import handle_of, names_of
from pt2qa._graph.internals.torch import pytree
from pt2qa._simulator import op_rules
from pt2qa._simulator.simulator import graph_values
from pt2qa.errors import QuantizeError

PREPARE_MATCH_DB = 60.0
"""Below this, ``prepare`` changed the model: folding a batch norm costs float rounding, which is far above."""


def check_prepared(
    float_graph: GraphModule,
    prepared: GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Any,
    quantizer: str,
) -> None:
    """Compares what a prepared graph returned with what the float graph returns on the same inputs.

    Raises:
        QuantizeError: they differ by more than float rounding, in integers, or in where NaN stands; the message names
            the first op where they do.
    """
    with torch.no_grad():
        found = compare_outputs(float_graph(*args, **kwargs), outputs, PREPARE_MATCH_DB, flips=FLIPS)
    if found is None:
        return
    where = _first_changed(float_graph, prepared, pytree.tree_leaves((args, kwargs)))
    raise QuantizeError(
        f"prepare changed the model before any quantization: {found.leaf} {found.what}, held against the float model"
        f"{where}. "
        f"This is {quantizer}'s or torchao's rewriting, not int8: no calibration can mend it. A convolution whose "
        "weights are used twice with batch norms that differ is the usual cause; give each use its own weights."
    )


def prepared_names(prepared: GraphModule) -> dict[str, str]:
    """What people read, by fx node name of a prepared graph."""
    names = names_of(prepared)
    return {node.name: names[handle].name for node in prepared.graph.nodes if (handle := handle_of(node)) in names}


def _first_changed(float_graph: GraphModule, prepared: GraphModule, values: list[Any]) -> str:
    """Names the first op whose value prepare changed; a conv with a folded batch norm is held against the norm."""
    after_folding = {
        handle_of(node.args[0]): handle_of(node)
        for node in float_graph.graph.nodes
        if op_rules.op_name(node.target) == "batch_norm" and isinstance(node.args[0], Node)
    }
    kept = {handle_of(node) for node in prepared.graph.nodes if node.op == "call_function"}
    expected: dict[int | None, Tensor] = {}
    found: list[str] = []
    names = prepared_names(prepared)

    def keep(node: Node, value: Any) -> None:
        if node.op == "call_function" and isinstance(value, Tensor):
            expected[handle_of(node)] = value.clone()

    def compare(node: Node, value: Any) -> None:
        handle = handle_of(node)
        if found or node.op != "call_function" or handle is None or not isinstance(value, Tensor):
            return
        batch_norm = after_folding.get(handle)
        want = expected.get(batch_norm if batch_norm is not None and batch_norm not in kept else handle)
        if want is None or want.shape != value.shape:
            return
        if difference(want, value, PREPARE_MATCH_DB, flips=FLIPS) is not None:
            found.append(names.get(node.name, node.name))

    graph_values(float_graph, values, keep)
    graph_values(prepared, values, compare)
    return f", first at {found[0]}" if found else ""
