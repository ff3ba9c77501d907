"""Whether a converted graph runs at all, and whether its values are of a type that can be rounded.

A quantizer may ask for what torch has no kernel for, such as an embedding of rounded indices.  Prepare and convert make
such a graph without a word, and it fails in the first analysis, deep inside torch; so it is run once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, handle_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree
from pt2qa._report.prose import few
from pt2qa._simulator.batches import as_batch, flatten_batch
from pt2qa._simulator.verification import graph_outputs
from pt2qa.errors import QuantizeError

_REMEDY = "Pass model.float() and float32 inputs to pt2qa.capture"


def check_runs(
    quantized: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, OpName], quantizer: str
) -> None:
    """Runs a converted graph on a batch.

    Args:
        quantized: what ``convert_pt2e`` returned; its buffers stay as they are.
        args: positional inputs.
        kwargs: keyword inputs.
        names: what to call each handle.
        quantizer: its name, for the error.

    Raises:
        QuantizeError: it fails; the message names the op and what it was given.
    """
    seen: dict[Node, str] = {}

    def note(node: Node, value: Any) -> None:
        seen[node] = ", ".join(_kind(leaf) for leaf in pytree.tree_leaves(value))

    values = flatten_batch(quantized, as_batch(args, kwargs, quantized))
    try:
        graph_outputs(quantized, values, note)
    except Exception as error:
        failed = next(node for node in quantized.graph.nodes if node not in seen and node.target != "_guards_fn")
        name = _name(failed, names)
        given = "; ".join(seen[source] for source in failed.all_input_nodes) or "nothing"
        reason = str(error).strip().partition("\n")[0]
        raise QuantizeError(
            f"the graph that {quantizer} and convert_pt2e made cannot run: at {name}, {failed.target} fails on {given} "
            f"with {type(error).__name__}: {reason}. No calibration can fix it. Leave the op, or what reads it, in "
            f"float: overrides=OverridePlan((Edit('float', ({name!r},)),))."
        ) from error


def refuse_float64(float_graph: GraphModule) -> None:
    """Refuses a model that computes in float64 alone, before it is prepared.

    Raises:
        QuantizeError: all its floating-point values are float64, which the quantize ops of torch do not take.
    """
    dtypes = {dtype for node in float_graph.graph.nodes if (dtype := _dtype(node)) is not None}
    if {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.float64}:
        raise QuantizeError(f"the model computes in float64, which torch's quantize ops do not take. {_REMEDY}.")


def refuse_float64_observers(observed: Collection[tuple[str, Node]], quantizer: str) -> None:
    """Refuses a quantizer that wants float64 values of a model to be rounded.

    Args:
        observed: every value with an observer behind it, and what people call it.
        quantizer: its name, for the error.

    Raises:
        QuantizeError: there are such values; the message names them.
    """
    found = sorted({name for name, node in observed if _dtype(node) is torch.float64})
    if found:
        raise QuantizeError(
            f"{quantizer} asks for float64 values to be rounded, which torch's quantize ops do not take: {few(found)}. "
            f"{_REMEDY}, or leave these in float."
        )


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get(VALUE)
    return value.dtype if isinstance(value, Tensor) else None


def _name(node: Node, names: Mapping[int, OpName]) -> str:
    """The op that a node is; of one that only quantizes, the op that makes the value, else the first that reads it."""
    before, after = node, node
    while _own_name(before, names) is None and before.args and isinstance(before.args[0], Node):
        before = before.args[0]
    while _own_name(after, names) is None and after.users:
        after = next(iter(after.users))
    return _own_name(before, names) or _own_name(after, names) or node.name


def _own_name(node: Node, names: Mapping[int, OpName]) -> str | None:
    handle = handle_of(node)
    return names[handle].name if handle is not None and handle in names else None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
