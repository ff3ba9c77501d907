"""The quantizer itself: whether it fits the model, and finds what it is configured to find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import Node

from pt2qa._check.context import NO_QUANTIZER, CheckContext, require
from pt2qa._check.rules.programs import decomposed_first
from pt2qa._graph.handles import copy_to_edit, name_of
from pt2qa._graph.internals.nodes import module_stack
from pt2qa._graph.internals.torch import OpOverload
from pt2qa._printable import question
from pt2qa._simulator.lifetimes import written_value
from pt2qa._simulator.op_rules import functional_spelling, mutates_first_argument
from pt2qa.errors import PluginError, Pt2qaError, QuantizeError
from pt2qa.overrides import Annotations
from pt2qa.plugins import DoesNotApplyError, Found, GenericPlugin, Severity, called_modules, modules_of
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="the quantizer cannot annotate the model",
    why="prepare_pt2e would fail here. Quantizers fail on modules that are called more than once, dead code, sums that "
    "begin with 0, and settings for modules that the model does not have.",
    fix="if the message names a setting, correct it; otherwise quantize the graph of pt2qa.capture, which rewrites "
    "such models",
)
def quantizer_fails(context: CheckContext) -> Iterator[Found]:
    require(context.quantizer is not None or context.given == "pair", NO_QUANTIZER)
    require(not is_foreign(context.quantizer), "to quantizers of another package")
    try:
        context.annotations  # noqa: B018  annotating is what may fail
    except DoesNotApplyError:
        if context.is_exported and (context.fixing_passes or any(decomposed_first.find(context))):
            raise DoesNotApplyError("where another rule reports why the quantizer fails") from None
        failed = [str(context.errors[what]) for what in ("quantizer", "annotations") if what in context.errors]
        if not failed:
            raise
        yield Found("", failed[0])


@rule(
    severity="error",
    title="quantizer and prepare come from different packages",
    why="Each package keeps annotations in its own classes, so torchao's prepare_pt2e sees none or fails at the first "
    "one, and the model stays in float (pytorch#160095).",
    fix="use a quantizer that derives from torchao.quantization.pt2e.quantizer.Quantizer, as those of torchao and "
    "executorch do; those of torch.ao do not",
)
def foreign_quantizer(context: CheckContext) -> Iterator[Found]:
    if context.quantizer is None:
        known = context.given == "pair" and context.pair.recipe is not None
        raise DoesNotApplyError("to quantizers that made a pair" if known else NO_QUANTIZER)
    if is_foreign(context.quantizer) and context.known("plugin") is None:
        yield Found("", str(context.errors["quantizer"]))


def is_foreign(quantizer: Any) -> bool:
    """Whether an object annotates graphs as a quantizer does, but not for torchao's ``prepare_pt2e``.

    >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer
    >>> is_foreign(X86InductorQuantizer()), is_foreign("x86"), is_foreign(None)
    (False, False, False)
    """
    from torchao.quantization.pt2e.quantizer import Quantizer

    if quantizer is None or isinstance(quantizer, (str, type, Quantizer)):
        return False
    named = any(base.__name__ == "Quantizer" for base in type(quantizer).__mro__)
    return named or (hasattr(quantizer, "annotate") and not hasattr(quantizer, "build"))


class Filter(NamedTuple):
    """One entry of a quantizer's settings: the dict that holds it, what it names (``module_name`` ...), and its key."""

    attribute: str
    kind: str
    key: Any


@rule(
    severity="error",
    title="quantizer settings that match no op",
    why="Quantizers do not report a filter that matches no op: what it was meant for is quantized like everything "
    "else, or stays in float.",
    fix="name the module by its path in the model, without a prefix such as L['self']; pt2qa.capture(model, "
    "args).names lists every op with its module",
    needs=("graph",),
)
def unmatched_filter(context: CheckContext) -> Iterator[Found]:
    graph = context.graph
    try:
        quantizer = context.plugin.build(graph, qat=context.qat)
    except PluginError as error:
        raise DoesNotApplyError("to quantizers that refuse the model; see quantizer-fails") from error
    filters = list(filters_of(quantizer, set()))
    if not isinstance(context.plugin, GenericPlugin):
        # A plug-in's own settings for a type of op are fine, whether the model has such an op or not.
        filters = [one for one in filters if one.kind == "module_name"]
    require(filters, "to quantizers without filters by name or type")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for one in filters:
        if not any(_KINDS[one.kind][1](one.key, node) for node in nodes):
            key = one.key.__qualname__ if isinstance(one.key, type) else one.key
            named = repr(key) if isinstance(one.key, str) else str(key)
            why = f"{one.attribute} has {named}, which matches no op of the graph"
            if one.kind == "module_name":
                yield Found("", why + _near(one.key, nodes))
            else:
                yield Found("", why, "warning", "remove the setting, or name what the model calls")


def filters_of(quantizer: Any, seen: set[int]) -> Iterator[Filter]:
    """The entries of a quantizer's settings, and of the quantizers that it is composed of."""
    from torchao.quantization.pt2e.quantizer import Quantizer

    seen.add(id(quantizer))
    for attribute, value in vars(quantizer).items():
        # What quantizers of torchao and executorch call the dicts of their settings: module_name_config and the like.
        kind = re.fullmatch(r"(module_name|module_type|operator_type)\w*config", attribute)
        if kind and isinstance(value, Mapping):
            yield from (Filter(attribute, kind[1], key) for key in value if isinstance(key, _KINDS[kind[1]][0]))
        inner = value if isinstance(value, list | tuple) else (value,)
        for other in inner:
            if isinstance(other, Quantizer) and id(other) not in seen:
                yield from filters_of(other, seen)


def _near(path: str, nodes: list[Node]) -> str:
    """The end of the sentence: paths that match, or why none can."""
    known = dict.fromkeys(name for node in nodes for name in called_modules(node))
    containers = {name for node in nodes for name in modules_of(node)} - known.keys()
    bare = re.sub(r"^(L\['self'\]|L__self__|self)\.?", "", path)
    if bare in known:
        return f"; without the prefix, {bare!r} does"
    if bare in containers:
        inside = [name for name in known if name.startswith(f"{bare}.")]
        return f": it is a container that forward does not call; name what is in it, such as {inside[0]!r}"
    near = question(bare, known, 3)
    return f"; {near}" if near else ""


def _in_module_type(cls: type, node: Node) -> bool:
    wanted = f"{cls.__module__}.{cls.__qualname__}"
    kinds = [kind for _, kind in module_stack(node).values()]
    return any(kind is cls or kind == wanted for kind in kinds)


_KINDS: Mapping[str, tuple[Any, Callable[[Any, Node], bool]]] = {
    "module_name": (str, lambda path, node: path in called_modules(node)),
    "module_type": (type, _in_module_type),
    "operator_type": (Callable, lambda op, node: op in (node.target, getattr(node.target, "overloadpacket", None))),
}
"""By what a setting goes: of what class its keys are, and whether one matches an op."""


@rule(
    severity="warning",
    title="in-place ops that the quantizer does not match",
    why="Quantizers match patterns of ops before the graph is made functional: out += x; relu_(out) is another pattern "
    "than relu(out + x) (executorch#22159).",
    fix="write the op out of place in forward: out = out * gate instead of out *= gate, and no inplace=True",
    needs=("annotations", "graph"),
)
def in_place_spelling(context: CheckContext) -> Iterator[Found]:
    written = {name: node for name, node in context.nodes.items() if _out_of_place(node) is not None}
    keys = {node.name for node in require(written, "to graphs without in-place ops").values()}
    # If ops share memory, this graph computes something else: it is only annotated.
    graph = copy_to_edit(context.graph)
    for node in graph.graph.nodes:
        if node.name in keys:
            node.target = _out_of_place(node)
    try:
        after = context.annotate(graph, context.names)
    except QuantizeError as error:
        reason = f"where the quantizer fails on the same ops out of place: {error}"
        raise DoesNotApplyError(reason.rstrip(".")) from error
    for name, node in written.items():
        here, there = (_roundings(annotations, name) for annotations in (context.annotations, after))
        parts = [f"does not round {', '.join(sorted(there - here))}"] if there - here else []
        parts += [f"rounds {', '.join(sorted(here - there))}"] if here - there else []
        if parts:
            yield Found(name, f"written {node.target}, the quantizer {' and '.join(parts)}, unlike out of place")


@rule(
    severity="error",
    title="writes to an input that quantization loses",
    why="Where the quantizer rounds an input that an op writes to, the converted model writes to the rounded copy. The "
    "input, such as a state or a cache, keeps its values, and nothing fails.",
    fix="return the new value of the input instead of writing to it",
    needs=("annotations", "graph"),
)
def lost_write(context: CheckContext) -> Iterator[Found]:
    writers = {name: node for name, node in context.nodes.items() if mutates_first_argument(node.target)}
    writers = {name: node for name, node in writers.items() if written_value(node).op == "placeholder"}
    edges = {(edge.source, edge.reader) for edge in context.annotations.edges}
    for name, node in require(writers, "to graphs that write to no input").items():
        value, rounded = name, False
        while node.op != "placeholder":  # through views, and what wrote before
            reader, [node] = value, node.all_input_nodes[:1]
            value = name_of(node, context.names) or ""
            rounded |= not edges.isdisjoint([(value, reader), (value, "")])
        if rounded:
            yield Found(name, f"writes to a rounded copy of {value}, which keeps its values")


def _out_of_place(node: Node) -> OpOverload | None:
    """The same op out of place; None if it is not in place, or cannot be written so."""
    target = node.target
    if node.op == "call_function" and isinstance(target, OpOverload) and mutates_first_argument(target):
        return functional_spelling(target)
    return None


def _roundings(annotations: Annotations, name: str) -> set[str]:
    """What is rounded next to an op, in words, except for constants."""
    constants = {node.name for node in annotations.graph.nodes.values() if node.constant}
    edges = [edge for edge in annotations.edges if name in (edge.source, edge.reader) and edge.source not in constants]
    return {
        f"{edge.source} as {edge.reader} reads it" if edge.reader else f"the output of {edge.source}" for edge in edges
    }


@rule(
    severity="warning",
    title="ops that are annotated in only one mode of torch.export",
    why="torch.export runs the Python code of forward or, with strict=True, analyses it. A branch on torch.compiler's "
    "state, or a fast path such as that of nn.TransformerEncoderLayer with frozen weights, gives two different graphs.",
    fix="capture it in the mode that annotates more, and export it in that mode everywhere",
    needs=("capture", "annotations"),
)
def strict_differs(context: CheckContext) -> Iterator[Found]:
    require(context.given == "model", "to graphs, which were exported in one mode")
    here = context.annotations
    try:
        captured = context.captured(strict=True)
    except Pt2qaError as error:
        raise DoesNotApplyError("to models that torch.export cannot take with strict=True") from error
    if captured.names == context.capture.names:
        return
    there = context.annotate(captured.module(), captured.names)
    yield from _only(here, there, "strict=False", "note")
    yield from _only(there, here, "strict=True", "warning")


def _only(one: Annotations, other: Annotations, mode: str, severity: Severity) -> Iterator[Found]:
    names = [op for name, op in one.ops.items() if name not in other.ops]
    listed = ", ".join(f"{count} {kind}" for kind, count in Counter(op.op for op in names).items())
    fix = f"capture it with {mode}: pt2qa.capture(model, args, {mode})"
    for op in names:
        yield Found(op.name, f"is annotated only if exported with {mode} ({listed} in all)", severity, fix)
