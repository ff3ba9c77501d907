"""How ``torch.export`` wrote a program: what capture would write differently, or could not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from torch.fx import Node

from pt2qa._capture.aliases import Aliases
from pt2qa._capture.normalise import inline_regions, keep_scalars, remove_added_zeros, remove_dead_code
from pt2qa._check.context import CheckContext
from pt2qa._check.missed_ops import Reasons
from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import handle_of, is_decomposed, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._report.prose import counted
from pt2qa.plugins import DoesNotApplyError, Found
from pt2qa.plugins.rules import rule

_REPORTED_ELSEWHERE = (inline_regions, remove_dead_code, remove_added_zeros, keep_scalars)
"""Passes of capture whose findings other rules show."""


@rule(
    severity="error",
    title="ops that the quantizer misses because of how torch.export wrote the program",
    why="Quantizers find ops by the module that called them. torch.export writes a subclass of Conv2d, a function such "
    "as F.conv2d, or two calls of one module so that they find less than there is, or fail; what they do not find "
    "stays in float without a word.",
    fix="quantize the graph of pt2qa.capture(model, args), which computes the same and says of every op what it "
    "stands for",
)
def plain_program(context: CheckContext) -> Iterator[Found]:
    """What makes the quantizer fail; or each op that it would annotate after ``pt2qa.capture``, with the reason."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    if any(decomposed_first.find(context)):
        raise DoesNotApplyError("to programs that were decomposed first")
    context.plugin  # noqa: B018  raises where there is none
    fixing = context.fixing_passes
    error = context.failures.get("annotations")
    for run, changes in fixing.items():
        if run in _REPORTED_ELSEWHERE:
            continue
        shared = [change for change in changes if change.rule == "shared module"]
        for change in shared or changes:
            what = f"{change.rule}: capture would have it {change.what}"
            if shared:
                what = f"after pt2qa.capture, {change.what}; here they make one partition with several outputs"
            yield Found(change.name, f"{what}, and the quantizer fails: {error}")
        if not changes:
            yield Found("", f"the quantizer fails on the sources that torch.export wrote: {error}")
    if error:
        if not fixing:
            raise DoesNotApplyError("where the quantizer fails on pt2qa.capture's spelling, too")
        return
    lost = [name for name in context.normalised.ops if name not in context.annotations.ops]
    if not lost:
        return
    here, there = len(context.annotations.ops), len(context.normalised.ops)
    why = f"{context.plugin.name} annotates {counted(here, 'op')} of this program, {there} after pt2qa.capture"
    yield Found("", why, value=inf)
    reasons = Reasons(context, frozenset(lost))
    for name in lost:
        node = context.nodes.get(name)
        if node is not None:  # else it is in a nested graph, which has its own rule
            yield Found(name, reasons.of(name, node))


@rule(
    severity="error",
    title="a program that was decomposed before it is quantized",
    why="Quantizers know conv2d, linear and batch_norm; run_decompositions() writes convolution, addmm and "
    "native_batch_norm instead. Some quantizers then fail, and others leave nearly everything in float "
    "without a word.",
    fix="quantize what torch.export.export returns, and decompose (or to_edge) afterwards",
)
def decomposed_first(context: CheckContext) -> Iterator[Found]:
    """One finding that counts the ops that only decomposition produces."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    counts = Counter(op_of(node.target) for node in context.nodes.values() if is_decomposed(node))
    if counts:
        listed = ", ".join(f"{count} {op}" for op, count in counts.items())
        yield Found("", f"{listed}: run_decompositions() came before the quantizer, {_outcome(context)}")


def _outcome(context: CheckContext) -> str:
    if context.known_annotations is not None:
        return f"which annotates {len(context.known_annotations.ops)} ops"
    error = context.failures.get("annotations")
    return "which looks for conv2d, batch_norm and linear" if error is None else f"which fails: {error}"


@rule(
    severity="warning",
    title="additions of zero",
    why="Python's sum([a, b]) begins with 0 + a. Quantizers take that for an addition of two tensors: one fails with "
    "a bare AssertionError, another rounds the result once more.",
    fix="write a + b in the place of sum([a, b]), or make the graph with pt2qa.capture, which removes the addition",
)
def added_zero(context: CheckContext) -> Iterator[Found]:
    """Additions that capture would remove; an error if the quantizer fails on them."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    added = [change.name for change in context.changes if change.rule == "add of zero"]
    if added and remove_added_zeros in context.fixing_passes:
        error = context.failures["annotations"]
        yield from (Found(name, f"adds 0, and the quantizer fails: {error}", "error") for name in added)
        return
    yield from (Found(name, "adds 0; a quantizer that takes every add rounds its result once more") for name in added)


@rule(
    severity="note",
    title="ops whose results nothing reads",
    why="Some quantizers fail on an unused convolution with a bare IndexError, and others put observers behind "
    "what nobody reads. pt2qa.capture removes such ops.",
    fix="nothing where that is meant; else use the result in forward",
)
def dead_code(context: CheckContext) -> Iterator[Found]:
    """What capture removed or, in a plain program, would remove; an error if the quantizer fails on it."""
    dead = [change.name for change in context.changes if change.rule == "dead code"]
    if context.given not in ("program", "graph"):
        yield from (Found(name, "capture removed it") for name in dead)
        return
    if dead and remove_dead_code in context.fixing_passes:
        error = context.failures["annotations"]
        yield from (
            Found(name, f"nothing reads it, and the quantizer fails: {error}", "error", _FIX_DEAD) for name in dead
        )
        return
    yield from (Found(name, "nothing reads it", "warning", _FIX_DEAD) for name in dead)


_FIX_DEAD = "take it out of forward, or make the graph with pt2qa.capture, which removes it"


@rule(
    severity="error",
    title="integer arithmetic that the quantizer turns into float",
    why="Some quantizers replace the scalar of every add and mul by a float32 tensor: an index becomes a float "
    "(IndexError), and 16777217 + 1 becomes 16777216.",
    fix="make the graph with pt2qa.capture, which keeps such scalars",
)
def integer_scalar(context: CheckContext) -> Iterator[Found]:
    """Additions and products of integers (or doubles) whose scalar the quantizer replaces."""
    if context.given not in ("program", "graph"):
        raise DoesNotApplyError("to programs that pt2qa.capture made")
    plugin = context.plugin
    scalars = {change.name for change in context.changes if change.rule == "scalar"}
    if not scalars:
        return
    graph = copy_to_edit(context.graph)
    try:
        transformed = plugin.build(graph, qat=context.qat).transform_for_annotation(graph)
    except Exception as error:
        raise DoesNotApplyError("where the quantizer fails; see quantizer-fails") from error
    after = {handle_of(node): node for node in transformed.graph.nodes}
    for name in scalars & context.nodes.keys():
        before = context.nodes[name]
        new = after.get(handle_of(before))
        if new is not None and not isinstance(before.args[1], Node) and isinstance(new.args[1], Node):
            dtype = str(before.meta[VALUE].dtype).removeprefix("torch.")
            yield Found(
                name, f"{plugin.name} makes its scalar {before.args[1]} a float32 tensor, in arithmetic of {dtype}"
            )


_FIX_WRITE = (
    "compute the new tensor and use that: torch.cat, torch.where or slice_scatter in the place of the assignment"
)


@rule(
    severity="error",
    title="writes to a part of a tensor that is read later on",
    why="After y[:, :2].mul_(0.1) the graph goes on to read y from before the write. In one memory that is right; once "
    "y is rounded, the slice is another tensor, the write is lost, and the quantized model computes something else.",
    fix=f"make the graph with pt2qa.capture, which makes such writes functional; or {_FIX_WRITE}",
)
def partial_write(context: CheckContext) -> Iterator[Found]:
    """Writes that are lost if the tensor is rounded: all in a plain program, else those that capture had to leave."""
    writes = [change for change in context.changes if change.rule == "partial write"]
    aliases = Aliases(context.graph) if writes else None
    annotations = context.known_annotations
    rounded = None if annotations is None else {edge.source for edge in annotations.edges}
    for change in writes:
        if change.left:
            yield Found(change.name, f"capture could not write it another way: {change.left}", "warning", _FIX_WRITE)
        if context.given not in ("program", "graph"):
            continue
        node = context.nodes.get(change.name)
        group = aliases.group(node) if aliases is not None and node is not None else []
        if rounded is None:
            yield Found(change.name, "the tensor that it writes to is read later on", "warning")
        elif lost := [name for member in group if (name := context.name_of(member)) in rounded]:
            why = f"the tensor that it writes to is read later on, and {context.plugin.name} rounds it at {lost[0]}"
            yield Found(change.name, why)
