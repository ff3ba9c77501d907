"""What is checked between the steps of quantization, so that no fault surfaces deep inside an analysis.

Observers pass values on unchanged, so a prepared graph must still compute the float model: if it does not, no
calibration can fix it, and int8 is not to blame.  A quantizer may also ask for what torch has no kernel
for, such as an embedding of rounded indices: prepare and convert make such a graph, and it fails when it runs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2qa._capture.program import Capture
from pt2qa._graph.agreement import FLIPS, agreement_in, compare_outputs, difference, kind_of
from pt2qa._graph.annotation import annotated_ops
from pt2qa._graph.handles import OpName, copy_to_edit, handle_of, name_of, op_of, parts_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree
from pt2qa._graph.internals.torchao import is_observer
from pt2qa._quantize.calibration import Call, find_observers, observed_value, run_batch, without
from pt2qa._report.prose import few
from pt2qa._simulator.batches import as_batch, flatten_batch
from pt2qa._simulator.graph_run import run_order
from pt2qa._simulator.products import PRODUCTS
from pt2qa._simulator.simulator import graph_values
from pt2qa._simulator.verification import graph_outputs, values_by
from pt2qa.errors import Pt2qaError, QuantizeError
from pt2qa.overrides.edited import annotate
from pt2qa.plugins import GenericPlugin, QuantizerPlugin

PREPARE_MATCH_DB = 60.0
"""Below this, ``prepare`` changed a float32 model: folding a batch norm costs float rounding, which is far above."""

_REMEDY = "Pass model.float() and float32 inputs to pt2qa.capture"


def refuse_float64(float_graph: GraphModule) -> None:
    dtypes = {dtype for node in float_graph.graph.nodes if (dtype := _dtype(node)) is not None}
    if {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.float64}:
        raise QuantizeError(f"the model computes in float64, which torch's quantize ops do not take. {_REMEDY}.")


def refuse_float64_observers(prepared: GraphModule, names: Mapping[int, OpName], quantizer: str) -> None:
    found = {
        observed_value(node, names)
        for node in find_observers(prepared).values()
        if _dtype(node.all_input_nodes[0]) is torch.float64
    }
    if found:
        raise QuantizeError(
            f"{quantizer} asks for float64 values to be rounded, which torch's quantize ops do not take: "
            f"{few(sorted(found))}. {_REMEDY}, or leave these in float."
        )


def check_prepared(
    float_graph: GraphModule, prepared: GraphModule, call: Call, names: Mapping[int, OpName], quantizer: str
) -> None:
    """Compares the outputs of a prepared graph, in eval mode and without observers, with those of the float graph."""
    rewritten = without(prepared, is_observer)
    expected, actual = run_batch(float_graph, call, 0), run_batch(rewritten, call, 0)
    least = agreement_in(float_graph.graph, PREPARE_MATCH_DB)
    found = compare_outputs(expected, actual, least, flips=FLIPS)
    if found is None:
        return
    first = _first_changed(float_graph, rewritten, pytree.tree_leaves(call), least)
    where = f", first at {name_of(first, names) or first.name}" if first is not None else ""
    coarse = (
        " The model computes in half precision, whose rounding adds up in a deep one: capture model.float() to tell "
        "that from a fault."
        if least < PREPARE_MATCH_DB
        else ""
    )
    raise QuantizeError(
        f"prepare changed the model before any quantization: {found}, compared with the float model{where}. This is "
        f"{quantizer}'s or torchao's rewriting, not int8: no calibration can fix it. The usual cause is a batch norm "
        "folded into a convolution whose result another op reads without it, or whose weights are used twice with "
        "batch norms that differ: give each use a convolution of its own. pt2qa.check(capture, quantizer=...) names "
        f"them.{coarse}"
    )


def _first_changed(float_graph: GraphModule, rewritten: GraphModule, values: list[Any], least: float) -> Node | None:
    """The first op whose value prepare changed; a conv with a folded batch norm is compared with the norm."""
    after_folding = {
        handle_of(node.args[0]): handle_of(node)
        for node in float_graph.graph.nodes
        if op_of(node.target) == "batch_norm" and isinstance(node.args[0], Node)
    }
    kept = {handle_of(node) for node in rewritten.graph.nodes if node.op == "call_function"}
    expected: dict[int | None, Any] = values_by(handle_of, float_graph, values)
    found: list[Node] = []
    parts = parts_of(rewritten.graph)

    def compare(node: Node, value: Any) -> None:
        handle = handle_of(node)
        if found or parts.get(node) != 0 or not isinstance(value, Tensor):
            return
        batch_norm = after_folding.get(handle)
        want = expected.get(batch_norm if batch_norm is not None and batch_norm not in kept else handle)
        if isinstance(want, Tensor) and want.shape == value.shape and difference(want, value, least, flips=FLIPS):
            found.append(node)

    graph_values(rewritten, values, compare)
    return found[0] if found else None


def check_runs(
    quantized: GraphModule, call: Call, names: Mapping[int, OpName], quantizer: str
) -> tuple[list[Any], Any]:
    """Runs a converted graph on a batch, and leaves its buffers as they are; returns the flat batch and the outputs."""
    seen: dict[Node, str] = {}

    def note(node: Node, value: Any) -> None:
        seen[node] = ", ".join(map(kind_of, pytree.tree_leaves(value)))

    values = flatten_batch(quantized, as_batch(*call, quantized))
    try:
        return values, graph_outputs(quantized, values, note)
    except Exception as error:
        failed = next(node for node in run_order(quantized.graph) if node not in seen)
        name = _op_around(failed, names)
        given = "; ".join(seen[source] for source in failed.all_input_nodes) or "nothing"
        reason = str(error).strip().partition("\n")[0]
        raise QuantizeError(
            f"the graph that {quantizer} and convert_pt2e made cannot run: at {name}, {failed.target} fails on {given} "
            f"with {type(error).__name__}: {reason}. No calibration can fix it. Leave the op, or what reads it, "
            f"in float: overrides=OverridePlan((Edit('float', ({name!r},)),))."
        ) from error


def _op_around(node: Node, names: Mapping[int, OpName]) -> str:
    """The op that a node is; of one that only quantizes, the op that makes the value, else the first that reads it."""
    before, after = node, node
    while name_of(before, names) is None and before.args and isinstance(before.args[0], Node):
        before = before.args[0]
    while name_of(after, names) is None and after.users:
        after = next(iter(after.users))
    return name_of(before, names) or name_of(after, names) or node.name


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get(VALUE)
    return value.dtype if isinstance(value, Tensor) else None


_ADVICE = "export capture.program, not the model, to deploy what was measured"

_known: weakref.WeakKeyDictionary[ExportedProgram, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()
"""By captured program, what was said of each quantizer: to annotate takes minutes with some."""


def rewriting_note(capture: Capture, plugin: QuantizerPlugin, here: Counter[str], *, qat: bool) -> str:
    """Says how capture's rewriting changed what a quantizer annotates; empty if it did not.

    The plain export is annotated once for each quantizer, as long as that annotates the captured program alike, which
    is what ``here`` says: see :func:`pt2qa._graph.annotation.annotated_ops`.
    """
    if capture.plain is None:
        return ""
    known = _known.setdefault(capture.program, [])
    # A torchao quantizer gets a new plug-in each time; plug-ins with the same options are equal.
    own = weakref.ref(plugin.quantizer) if isinstance(plugin, GenericPlugin) else plugin
    key = own, qat, here
    note = next((note for other, note in known if other == key), None)
    if note is None:
        note = _compared(capture.plain, capture, plugin, here, qat)
        known.append((key, note))
    return note


def _compared(plain: ExportedProgram, capture: Capture, plugin: QuantizerPlugin, here: Counter[str], qat: bool) -> str:
    graph = copy_to_edit(plain.module(check_guards=False))
    try:
        there = annotated_ops(annotate(graph, plugin, (), capture.names, qat=qat).graph.nodes)
    except Pt2qaError as error:
        return f"{plugin.name} fails on the plain torch.export of the model ({error}); {_ADVICE}"
    changed = sorted((op for op in here | there if here[op] != there[op]), key=lambda op: op not in PRODUCTS)
    if not changed:
        return ""
    kinds = few([f"{op} {there[op]} -> {here[op]}" for op in changed])
    return (
        f"capture's rewriting changed how many ops {plugin.name} annotates, against a plain torch.export: {kinds}; "
        f"{_ADVICE}"
    )
