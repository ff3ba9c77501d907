"""Programs that were decomposed before they are quantized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import module_of, op_of
from pt2qa.plugins import DoesNotApplyError, Found, Rule

_DECOMPOSED = ("convolution", "native_batch_norm_legit_no_training", "native_batch_norm_legit")
_PRODUCTS = ("addmm", "mm")


def find(context: CheckContext) -> Iterator[Found]:
    """One finding that counts the ops which only decomposition writes."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    counts = Counter(op_of(node.target) for node in context.nodes.values() if _is_decomposed(node))
    if counts:
        listed = ", ".join(f"{count} {op}" for op, count in counts.items())
        yield Found("", f"{listed}: run_decompositions() came before the quantizer, {_outcome(context)}")


def _is_decomposed(node: Node) -> bool:
    if node.op != "call_function":
        return False
    op = op_of(node.target).strip("_")
    return op in _DECOMPOSED or (op in _PRODUCTS and module_of(node)[1] == "Linear")


def _outcome(context: CheckContext) -> str:
    if context.known_annotations is not None:
        return f"which annotates {len(context.known_annotations.ops)} ops"
    error = context.failures.get("annotations")
    return "which looks for conv2d, batch_norm and linear" if error is None else f"which fails: {error}"


RULE = Rule(
    id="decomposed-first",
    severity="error",
    title="a program that was decomposed before it is quantized",
    why="Quantizers know conv2d, linear and batch_norm; run_decompositions() writes convolution, addmm and "
    "native_batch_norm instead. Some quantizers then fail, and others leave nearly everything in float "
    "without a word.",
    fix="quantize what torch.export.export returns, and decompose (or to_edge) afterwards",
    find=find,
)
