"""The quantizer itself: whether it fits the model, and finds what it is configured to find."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from pt2qa._capture.program import capture
from pt2qa._check.context import CheckContext, UnavailableError
from pt2qa._check.rules.programs import decomposed_first
from pt2qa._graph.copies import copy_to_edit
from pt2qa._graph.handles import handle_of
from pt2qa._graph.internals.nodes import module_stack
from pt2qa._graph.internals.torch import OpOverload
from pt2qa._near_names import question
from pt2qa._simulator.op_rules import functional_spelling, mutates_first_argument
from pt2qa.errors import PluginError, Pt2qaError, QuantizeError
from pt2qa.overrides import Annotations
from pt2qa.plugins import DoesNotApplyError, Found, GenericPlugin, Severity, called_modules, modules_of
from pt2qa.plugins.rules import rule


@rule(
    severity="error",
    title="the quantizer cannot annotate the model",
    why="prepare_pt2e would stop here. Quantizers stumble over modules that are called more than once, dead code, sums "
    "that begin with 0, and settings that name what the model does not have.",
    fix="where the message names a setting, correct the setting; else take the graph that pt2qa.capture makes, which "
    "writes such models so that quantizers can read them",
)
def quantizer_fails(context: CheckContext) -> Iterator[Found]:
    """The error that resolving the quantizer, or annotating with it, raised."""
    if context.quantizer is None and context.given != "pair":
        raise DoesNotApplyError("without a quantizer: give quantizer=")
    if is_foreign(context.quantizer):
        raise DoesNotApplyError("to quantizers of another package")
    try:
        context.annotations  # noqa: B018  annotating is what may fail
    except UnavailableError:
        if context.given in ("program", "graph") and (context.fixing_passes or any(decomposed_first.find(context))):
            raise DoesNotApplyError("where another rule names what the quantizer stumbles over") from None
        for what in ("quantizer", "annotations"):
            if what in context.failures:
                yield Found("", context.failures[what])
                return
        raise


@rule(
    severity="error",
    title="quantizer and prepare come from different packages",
    why="Each package keeps annotations in classes of its own: prepare_pt2e of torchao then sees none or fails at the "
    "first, and the model stays in float (pytorch#160095).",
    fix="take the quantizer that derives from torchao.quantization.pt2e.quantizer.Quantizer: those of torchao and "
    "executorch do, those of torch.ao do not",
)
def foreign_quantizer(context: CheckContext) -> Iterator[Found]:
    """A quantizer that derives from another package's ``Quantizer``."""
    if context.quantizer is None:
        known = context.given == "pair" and context.pair.recipe is not None
        raise DoesNotApplyError("to quantizers that made a pair" if known else "without a quantizer: give quantizer=")
    if not is_foreign(context.quantizer):
        return
    try:
        context.plugin  # noqa: B018  it is refused, and the reason is kept
    except UnavailableError:
        yield Found("", context.failures["quantizer"])


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


_SETTING = re.compile(r"(module_name|module_type|operator_type)\w*config")
"""What quantizers of torchao and executorch call the dicts of their settings: ``module_name_config`` and the like."""


class Filter(NamedTuple):
    """One entry of a quantizer's settings: the dict that holds it, what it names (``module_name`` ...), and its key."""

    attribute: str
    kind: str
    key: Any


@rule(
    severity="error",
    title="settings of the quantizer that match nothing",
    why="A quantizer passes over a filter that holds no op: what was meant to be quantized in another way is quantized "
    "as everything else, or stays in float, without a word.",
    fix="name the module as the model's attributes do, without a prefix such as L['self']; "
    "pt2qa.capture(model, args).names lists every op with its module",
    needs=("graph",),
)
def unmatched_filter(context: CheckContext) -> Iterator[Found]:
    """Entries of the quantizer's settings that match no op of the graph; names as errors, with close matches."""
    graph = context.graph
    try:
        quantizer = context.plugin.build(graph, qat=context.qat)
    except PluginError as error:
        raise DoesNotApplyError("to quantizers that refuse the model; see quantizer-fails") from error
    filters = list(filters_of(quantizer, set()))
    if not isinstance(context.plugin, GenericPlugin):
        # A plug-in's own settings for a type of op are fine, whether the model has such an op or not.
        filters = [one for one in filters if one.kind == "module_name"]
    if not filters:
        raise DoesNotApplyError("to quantizers without filters by name or type")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for one in filters:
        if not any(_MATCHES[one.kind](one.key, node) for node in nodes):
            why = f"{one.attribute} holds {_text(one.key)}, and no op of the graph passes it"
            if one.kind == "module_name":
                yield Found("", why + _near(one.key, nodes))
            else:
                yield Found("", why, "warning", "take the setting out, or name what the model calls")


def filters_of(quantizer: Any, seen: set[int]) -> Iterator[Filter]:
    """The entries of a quantizer's settings, and of the quantizers that it is composed of."""
    from torchao.quantization.pt2e.quantizer import Quantizer

    seen.add(id(quantizer))
    for attribute, value in vars(quantizer).items():
        kind = _SETTING.fullmatch(attribute)
        if kind and isinstance(value, Mapping):
            yield from (Filter(attribute, kind[1], key) for key in value if _IS_KEY[kind[1]](key))
        inner = value if isinstance(value, list | tuple) else (value,)
        for other in inner:
            if isinstance(other, Quantizer) and id(other) not in seen:
                yield from filters_of(other, seen)


def _near(path: str, nodes: list[Node]) -> str:
    """The end of the sentence: paths that would have matched, or why none can."""
    known = dict.fromkeys(name for node in nodes for name in called_modules(node))
    containers = {name for node in nodes for name in modules_of(node)} - known.keys()
    bare = re.sub(r"^(L\['self'\]|L__self__|self)\.?", "", path)
    if bare in known:
        return f"; without its prefix, {bare!r} would"
    if bare in containers:
        inside = [name for name in known if name.startswith(f"{bare}.")]
        return f": it is a container that forward does not call; name what is in it, such as {inside[0]!r}"
    near = question(bare, known, 3)
    return f"; {near}" if near else ""


def _text(key: Any) -> str:
    return key.__qualname__ if isinstance(key, type) else repr(key) if isinstance(key, str) else str(key)


def _in_module_type(cls: type, node: Node) -> bool:
    wanted = f"{cls.__module__}.{cls.__qualname__}"
    kinds = [kind for _, kind in module_stack(node).values()]
    return any(kind is cls or kind == wanted for kind in kinds)


def _is_op(op: Any, node: Node) -> bool:
    return node.target is op or getattr(node.target, "overloadpacket", None) is op


_MATCHES: Mapping[str, Callable[[Any, Node], bool]] = {
    "module_name": lambda path, node: path in called_modules(node),
    "module_type": _in_module_type,
    "operator_type": _is_op,
}

_IS_KEY: Mapping[str, Callable[[Any], bool]] = {
    "module_name": lambda key: isinstance(key, str),
    "module_type": lambda key: isinstance(key, type),
    "operator_type": callable,
}


@rule(
    severity="warning",
    title="in-place ops that the quantizer does not know",
    why="Quantizers look for patterns op by op, before anything is made functional: out += x; relu_(out) is another "
    "pattern than relu(out + x) (executorch#22159).",
    fix="write the op out of place in forward: out = out * gate in the place of out *= gate, without inplace=True",
    needs=("annotations", "graph"),
)
def in_place_spelling(context: CheckContext) -> Iterator[Found]:
    """In-place ops around which different edges are rounded once every op is out of place."""
    written = dict(_in_place(context))
    if not written:
        raise DoesNotApplyError("to graphs without in-place ops")
    graph = copy_to_edit(context.graph)
    _spell_out_of_place(graph, {node.name for node in written.values()})
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


def _in_place(context: CheckContext) -> Iterator[tuple[str, Node]]:
    """The in-place ops that can be written out of place."""
    names: Mapping[int, object] = context.names
    for node in context.graph.graph.nodes:
        if node.op != "call_function" or not mutates_first_argument(node.target) or handle_of(node) not in names:
            continue
        assert isinstance(node.target, OpOverload)
        if functional_spelling(node.target) is not None:
            yield context.name_of(node), node


def _spell_out_of_place(graph: GraphModule, written: Collection[str]) -> None:
    """Replaces the targets of in-place ops by their out-of-place ones; edits ``graph``.

    The graph may then compute something else if ops share memory: it is for annotating only.
    """
    for node in graph.graph.nodes:
        if node.name in written:
            assert isinstance(node.target, OpOverload)
            node.target = functional_spelling(node.target)


def _roundings(annotations: Annotations, name: str) -> set[str]:
    """What is rounded next to an op, in words, except for constants."""
    constants = {node.name for node in annotations.graph.nodes.values() if node.constant}
    edges = [edge for edge in annotations.edges if name in (edge.source, edge.reader) and edge.source not in constants]
    return {
        f"{edge.source} as {edge.reader} reads it" if edge.reader else f"the output of {edge.source}" for edge in edges
    }


@rule(
    severity="warning",
    title="ops that are annotated in one mode of torch.export only",
    why="torch.export runs the Python of forward, or analyses it with strict=True. A branch on torch.compiler's state, "
    "or a fast path such as that of nn.TransformerEncoderLayer with frozen weights, makes two models of one.",
    fix="capture it in the mode that annotates more, and use that mode wherever the model is exported",
    needs=("capture", "annotations"),
)
def strict_differs(context: CheckContext) -> Iterator[Found]:
    """Ops that are annotated in only one mode of ``torch.export``, even after capture."""
    if context.given != "model":
        raise DoesNotApplyError("to graphs: which mode made them is done")
    here = context.annotations
    try:
        shapes = context.dynamic_shapes
        captured = capture(context.model, context.args, context.keywords, dynamic_shapes=shapes, strict=True)
    except Pt2qaError as error:
        raise DoesNotApplyError("to models that torch.export cannot take with strict=True") from error
    if captured.names == context.capture.names:
        return
    there = context.annotate(captured.module(), captured.names)
    yield from _only(here, there, "strict=False", "note")
    yield from _only(there, here, "strict=True", "warning")


def _only(one: Annotations, other: Annotations, mode: str, severity: Severity) -> Iterator[Found]:
    """Ops annotated in one mode only, grouped by kind."""
    names = [op for name, op in one.ops.items() if name not in other.ops]
    counts = Counter(op.op for op in names)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    fix = f"capture it with strict={mode == 'strict=True'}: pt2qa.capture(model, args, {mode})"
    for op in names:
        yield Found(
            op.name, f"is annotated where the model is exported with {mode} alone, among {listed}", severity, fix
        )
