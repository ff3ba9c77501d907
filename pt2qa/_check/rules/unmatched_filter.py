"""Filters of a quantizer that nothing in the model passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import Node

from pt2qa._check.context import CheckContext
from pt2qa._graph.internals.nodes import module_stack
from pt2qa._near_names import did_you_mean
from pt2qa.errors import PluginError
from pt2qa.plugins import DoesNotApplyError, Found, GenericPlugin, Rule, called_modules, modules_of

_SETTING = re.compile(r"(module_name|module_type|operator_type)\w*config")
"""What quantizers of torchao and executorch call the dicts of their settings: ``module_name_config`` and the like."""


class Filter(NamedTuple):
    """One entry of a quantizer's settings: the dict that holds it, what it names (``module_name`` ...), and its key."""

    attribute: str
    kind: str
    key: Any


def find(context: CheckContext) -> Iterator[Found]:
    """Entries of the quantizer's settings that hold no op of the graph; names as errors with near ones."""
    graph = context.graph
    try:
        quantizer = context.plugin.build(graph, qat=context.qat)
    except PluginError as error:
        raise DoesNotApplyError("to quantizers that refuse the model; see quantizer-fails") from error
    filters = list(filters_of(quantizer, set()))
    if not isinstance(context.plugin, GenericPlugin):
        # What a plug-in sets for a type of op is its own way to do what it was asked, whether the model has one or not.
        filters = [one for one in filters if one.kind == "module_name"]
    if not filters:
        raise DoesNotApplyError("to quantizers without filters by name or type")
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for one in filters:
        if not any(_MATCHES[one.kind](one.key, node) for node in nodes):
            why = f"{one.attribute} holds {_text(one.key)}, and no op of the graph passes it"
            if one.kind == "module_name":
                yield Found("", why + _near(one.key, nodes).removesuffix("."))
            else:
                yield Found("", why, "warning", "take the setting out, or name what the model calls")


def filters_of(quantizer: Any, seen: set[int]) -> Iterator[Filter]:
    """The entries of a quantizer's settings, and of those of the quantizers that it is composed of."""
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
    return did_you_mean(bare, known)


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

RULE = Rule(
    id="unmatched-filter",
    severity="error",
    title="settings of the quantizer that match nothing",
    why="A quantizer passes over a filter that holds no op: what was meant to be quantized in another way is quantized "
    "as everything else, or stays in float, without a word.",
    fix="name the module as the model's attributes do, without a prefix such as L['self']; "
    "pt2qa.capture(model, args).names lists every op with its module",
    needs=("graph",),
    find=find,
)
