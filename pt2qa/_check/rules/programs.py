"""How ``torch.export`` wrote a program: what capture would write differently, or could not."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from torch.fx import Node

from pt2qa._capture.aliases import Aliases
from pt2qa._capture.normalise import inline_regions, keep_scalars, remove_added_zeros, remove_dead_code, write_sources
from pt2qa._check.context import CAPTURED, EVERY_PASS, CheckContext, require
from pt2qa._graph.handles import copy_to_edit, handle_of, is_decomposed, module_of, op_of, ops_of
from pt2qa._graph.internals.nodes import SOURCES, VALUE, module_stack
from pt2qa._report.prose import counted
from pt2qa.errors import Pt2qaError
from pt2qa.plugins import DoesNotApplyError, Found
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="ops that the quantizer misses because of how torch.export wrote the program",
    why="Quantizers find ops by the module that called them. For a subclass of Conv2d, a function such as F.conv2d, or "
    "two calls of one module, torch.export writes a program in which they miss ops, which then stay in float, or fail.",
    fix="quantize the graph of pt2qa.capture(model, args), which computes the same and records what each op stands for",
)
def plain_program(context: CheckContext) -> Iterator[Found]:
    require(context.is_exported, CAPTURED)
    require(not any(decomposed_first.find(context)), "to programs that were decomposed first")
    context.plugin  # noqa: B018  raises where there is none
    fixing = context.fixing_passes
    if error := context.errors.get("annotations"):
        for run, changes in fixing.items():
            if run in (inline_regions, remove_dead_code, remove_added_zeros, keep_scalars):
                continue  # other rules show what they find
            shared = [change for change in changes if change.rule == "shared module"]
            for change in shared or changes:
                why = f"{change.rule}: the quantizer fails unless it is {change.what}"
                if shared:
                    why = f"after pt2qa.capture, {change.what}; here they are one partition with several outputs, and "
                    why += "the quantizer fails"
                yield Found(change.name, f"{why}: {error}")
            if not changes:
                yield Found("", f"the quantizer fails on the sources that torch.export wrote: {error}")
        require(fixing, "where the quantizer fails after pt2qa.capture, too")
        return
    lost = [name for name in context.normalised.ops if name not in context.annotations.ops]
    if not lost:
        return
    here, there = len(context.annotations.ops), len(context.normalised.ops)
    why = f"{context.plugin.name} annotates {counted(here, 'op')} of this program, {there} after pt2qa.capture"
    yield Found("", why, value=inf)
    reasons = _Reasons(context, frozenset(lost))
    for name in lost:
        node = context.nodes.get(name)
        if node is not None:  # else it is in a nested graph, which has its own rule
            yield Found(name, reasons.of(name, node))


_BUT_SOURCES = tuple(run for run in EVERY_PASS if run is not write_sources)


class _Reasons:
    """Why a quantizer misses the ops with these names.

    What the program says about an op may differ harmlessly from what quantizers look for.  So each difference is put
    back alone into the program as capture would write it: an op missed then is missed because of it.
    """

    def __init__(self, context: CheckContext, lost: frozenset[str]) -> None:
        self._subject, self._lost = context, lost
        self._rewritten = ops_of(context.rewritten.module(), context.rewritten.names)
        self._calls = Counter(path for path, _ in {_stack(node)[-1] for node in context.nodes.values() if _stack(node)})
        self._said = {name: text for name in self._rewritten if (text := self._difference(name))}
        others = [change.rule for run in _BUT_SOURCES for change in context.rewritten.changes[run]]
        self._rules = ", ".join(dict.fromkeys(others)) or "op source"
        without = context.annotated_after(*_BUT_SOURCES) if others else None
        # An op annotated with torch.export's sources is not missed because of them.
        self._other_reason = frozenset() if without is None else lost & without.ops.keys()
        groups: dict[str, set[str]] = defaultdict(set)
        for name, text in self._said.items():
            groups[text].add(name)
        self._missed: dict[str, frozenset[str]] = {}
        # The largest first, which usually explain everything: each try costs an annotation.
        waiting = set(lost - self._other_reason)
        for text in sorted(groups, key=lambda text: (len(groups[text]), len(groups[text] & lost)), reverse=True):
            if waiting:
                self._missed[text] = self._missed_with(groups[text])
                waiting -= self._missed[text]

    def of(self, name: str, node: Node) -> str:
        new = self._rewritten[name]
        if new.target != node.target:
            return f"it is written as {node.target}, the quantizer looks for {new.target}"
        if name in self._other_reason:
            return f"it is found only after pt2qa.capture ({self._rules})"
        own = self._said.get(name, "")
        if name in self._missed.get(own, ()):
            return own
        guilty = [text for text, missed in self._missed.items() if name in missed]
        if not guilty:
            return "it is quantized only next to quantized ops, of which several are missed"
        worst = max(guilty, key=lambda text: len(self._missed[text]))
        op = next(op_of(self._rewritten[other].target) for other, text in self._said.items() if text == worst)
        return f"it is quantized only next to a quantized op; for the {op} there, {worst}"

    def _difference(self, name: str) -> str:
        """How the program's description of an op differs from what quantizers look for; empty if it does not."""
        node, source = self._subject.nodes.get(name), self._rewritten[name].meta.get(SOURCES)
        wanted = source[-1][1] if source else None
        if node is None or not (isinstance(wanted, type) or wanted in (operator.add, operator.mul)):
            return ""
        given = node.meta.get(SOURCES)
        if given:
            said, expected = _label(given[-1][1]), _label(wanted)
            return "" if said == expected else f"source_fn_stack says {said}, the quantizer looks for {expected}"
        said, expected = module_of(node)[1] or "nothing", _label(wanted)
        if said != expected:
            why = f"nn_module_stack says {said}, the quantizer looks for exactly {expected}"
            return f"{why} (strict=False writes no source_fn_stack)"
        calls = self._calls[_stack(node)[-1][0]]
        return f"nn_module_stack has {calls} calls of one {said}, which become one partition" if calls > 1 else ""

    def _missed_with(self, names: set[str]) -> frozenset[str]:
        """The ops missed when only these ops keep the sources that torch.export wrote."""
        graph = self._subject.rewritten.module()
        for name, node in ops_of(graph, self._subject.rewritten.names).items():
            if name in names:
                given = self._subject.nodes[name].meta.get(SOURCES)
                node.meta = {key: value for key, value in node.meta.items() if key != SOURCES}
                node.meta |= {SOURCES: given} if given else {}
        try:
            annotated = self._subject.annotate(graph, self._subject.rewritten.names)
        except Pt2qaError:
            return frozenset()  # alone it stops the quantizer, which is not what happened
        return self._lost - annotated.ops.keys()


def _stack(node: Node) -> list[tuple[str, str]]:
    """The modules that called an op, outermost first: path, and a key that differs from call to call."""
    stack: Mapping[str, Any] = module_stack(node)
    return [(str(path), str(key)) for key, (path, _) in stack.items()]


def _label(source: Any) -> str:
    return str(getattr(source, "__name__", source))


@rule(
    severity="error",
    title="a program that was decomposed before it is quantized",
    why="Quantizers match conv2d, linear and batch_norm; run_decompositions() writes convolution, addmm and "
    "native_batch_norm instead. Some quantizers then fail, others leave nearly everything in float.",
    fix="quantize what torch.export.export returns, and decompose (or to_edge) afterwards",
)
def decomposed_first(context: CheckContext) -> Iterator[Found]:
    require(context.is_exported, CAPTURED)
    counts = Counter(op_of(node.target) for node in context.nodes.values() if is_decomposed(node))
    if counts:
        listed = ", ".join(f"{count} {op}" for op, count in counts.items())
        yield Found("", f"{listed}: run_decompositions() came before the quantizer, {_outcome(context)}")


def _outcome(context: CheckContext) -> str:
    if annotations := context.known("annotations"):
        return f"which annotates {counted(len(annotations.ops), 'op')}"
    error = context.errors.get("annotations")
    return "which looks for conv2d, batch_norm and linear" if error is None else f"which fails: {error}"


@rule(
    severity="warning",
    title="additions of zero",
    why="Python's sum([a, b]) begins with 0 + a. Quantizers take it for an addition of two tensors: some fail with a "
    "bare AssertionError, others round the result once more.",
    fix="write a + b instead of sum([a, b]), or quantize the graph of pt2qa.capture, which removes the addition",
)
def added_zero(context: CheckContext) -> Iterator[Found]:
    require(context.is_exported, CAPTURED)
    added = [change.name for change in context.changes if change.rule == "add of zero"]
    fails = added and remove_added_zeros in context.fixing_passes
    for name in added:
        if fails:
            yield Found(name, f"adds 0, and the quantizer fails: {context.errors['annotations']}", "error")
        else:
            yield Found(name, "adds 0; a quantizer that annotates every add rounds its result once more")


@rule(
    severity="note",
    title="ops whose results nothing reads",
    why="Some quantizers fail on an unused convolution with a bare IndexError, others observe values that nothing "
    "reads. pt2qa.capture removes such ops.",
    fix="nothing if that is intended; otherwise use the result in forward",
)
def dead_code(context: CheckContext) -> Iterator[Found]:
    dead = [change.name for change in context.changes if change.rule == "dead code"]
    fails = dead and context.is_exported and remove_dead_code in context.fixing_passes
    for name in dead:
        if not context.is_exported:
            yield Found(name, "capture removed it")
        elif fails:
            why = f"nothing reads it, and the quantizer fails: {context.errors['annotations']}"
            yield Found(name, why, "error", _FIX_DEAD)
        else:
            yield Found(name, "nothing reads it", "warning", _FIX_DEAD)


_FIX_DEAD = "remove it from forward, or quantize the graph of pt2qa.capture, which removes it"


@rule(
    severity="error",
    title="integer arithmetic that the quantizer turns into float",
    why="Some quantizers replace the scalar of every add and mul by a float32 tensor: an index becomes a float "
    "(IndexError), and 16777217 + 1 becomes 16777216.",
    fix="quantize the graph of pt2qa.capture, which keeps such scalars",
)
def integer_scalar(context: CheckContext) -> Iterator[Found]:
    require(context.is_exported, CAPTURED)
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
            why = f"{plugin.name} makes its scalar {before.args[1]} a float32 tensor, in arithmetic of {dtype}"
            yield Found(name, why)


_FIX_WRITE = "compute a new tensor and use that: torch.cat, torch.where or slice_scatter instead of the assignment"


@rule(
    severity="error",
    title="writes to part of a tensor that is read later",
    why="After y[:, :2].mul_(0.1), the graph reads the y from before the write, which is correct as long as both are "
    "in one memory. Once y is rounded, the slice is another tensor and the write is lost.",
    fix=f"quantize the graph of pt2qa.capture, which makes such writes functional; or {_FIX_WRITE}",
)
def partial_write(context: CheckContext) -> Iterator[Found]:
    writes = [change for change in context.changes if change.rule == "partial write"]
    aliases = Aliases(context.graph) if writes else None
    annotations = context.known("annotations")
    rounded = {edge.source for edge in annotations.edges} if annotations else set()
    for change in writes:
        if change.left:
            yield Found(change.name, f"pt2qa.capture could not replace it: {change.left}", "warning", _FIX_WRITE)
        if not context.is_exported:
            continue
        node = context.nodes.get(change.name)
        group = aliases.group(node) if aliases is not None and node is not None else []
        if annotations is None:
            yield Found(change.name, "the tensor that it writes to is read later", "warning")
        elif lost := [name for member in group if (name := context.name_of(member)) in rounded]:
            why = f"the tensor that it writes to is read later, and {context.plugin.name} rounds it at {lost[0]}"
            yield Found(change.name, why)
