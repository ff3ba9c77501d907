"""Settings for single modules or op types: checked against the graph, and sorted by precedence.

A plug-in with such settings has two options: ``modules``, a mapping from module paths, and ``op_types``, a mapping from
op names. The values are mappings of option names to values, or None, which keeps that part in float. The deepest named
module takes precedence, then the op type, then the plug-in's own options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar

from pt2qa._graph.internals.nodes import clean_path, module_stack
from pt2qa._printable import did_you_mean
from pt2qa._report.prose import few
from pt2qa.errors import PluginError
from pt2qa.plugins.options import name_of, with_options

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

Overrides = Mapping[str, Mapping[str, object] | None]
_OPTIONS: Final = {"module": "modules", "op type": "op_types"}
_LISTED: Final = 12
_ROOT: Final = "L['self']."


class _Scoped(Protocol):
    """A plug-in with options for single modules and op types."""

    @property
    def modules(self) -> Overrides: ...

    @property
    def op_types(self) -> Overrides: ...


_P = TypeVar("_P", bound=_Scoped)


@dataclass(frozen=True, slots=True)
class Scope(Generic[_P]):
    """One module or op type with its own settings.

    Attributes:
        kind: whether ``name`` is a module's path or an op's name.
        name: as the user wrote it.
        settings: the plug-in with the options for this scope; None if everything in it stays in float.
        ops: names of the ops in it that the backend can configure.
        paths: for a module, the paths by which the graph knows it. A ``ModuleList`` leaves no trace in a graph; only
            the modules in it do.
    """

    kind: Literal["module", "op type"]
    name: str
    settings: _P | None
    ops: tuple[str, ...]
    paths: tuple[str, ...]

    @property
    def option(self) -> str:
        """Its option and key: ``modules['head']``."""
        return f"{_OPTIONS[self.kind]}[{self.name!r}]"

    def holds(self, node: Node) -> bool:
        """Whether an op belongs to this scope."""
        return _holds(self.kind, self.name, node)


def check_overrides(plugin: _Scoped) -> None:
    """Checks the entries of ``modules`` and ``op_types``; for a plug-in's ``__post_init__``.

    Args:
        plugin: a plug-in with ``modules`` and ``op_types``.

    Raises:
        PluginError: an entry is neither None nor a mapping of valid options to valid values.

    >>> pt2qa.quantizer("x86", modules={"head": 8})
    Traceback (most recent call last):
    pt2qa.errors.PluginError: ...
    """
    for option, entries in (("modules", plugin.modules), ("op_types", plugin.op_types)):
        for name, override in entries.items():
            if not isinstance(name, str):
                raise PluginError(f"quantizer {name_of(plugin)!r}: {option}: got the key {name!r}, expected a name")
            _settings(plugin, option, name, override)


def scopes_in(plugin: _P, graph: GraphModule, ops: Collection[str]) -> tuple[Scope[_P], ...]:
    """The scopes of a plug-in in a graph, in order of precedence: deepest module first, then op types.

    Args:
        plugin: a plug-in with ``modules`` and ``op_types``.
        graph: the captured float graph.
        ops: names of the ops that the backend can configure, as :func:`op_type` returns them.

    Raises:
        PluginError: the graph does not have a module, or the backend quantizes nothing in it; the backend does not
            quantize an op type, or the graph does not have it. The message lists similar names.

    >>> plugin = pt2qa.quantizer("x86", modules={"0": None})
    >>> len(scopes_in(plugin, capture.module(), ["linear"]))
    1
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    deepest_first = sorted(plugin.modules, key=lambda path: -path.count("."))
    return (
        *(_scope(plugin, "module", path, plugin.modules[path], calls, ops) for path in deepest_first),
        *(_scope(plugin, "op type", name, override, calls, ops) for name, override in plugin.op_types.items()),
    )


def modules_of(node: Node) -> tuple[str, ...]:
    """Paths of the modules around an op, outermost first, without the root: ``("blocks", "blocks.0", "blocks.0.fc")``.

    This includes containers, which are not among the :func:`called_modules`.

    Args:
        node: an op of a captured graph.

    >>> linear = next(node for node in capture.module().graph.nodes if "linear" in str(node.target))
    >>> modules_of(linear)
    ('0',)
    """
    parts = [clean_path(path).split(".") for path in called_modules(node)]
    return tuple(dict.fromkeys(".".join(path[:end]) for path in parts for end in range(1, len(path) + 1)))


def called_modules(node: Node) -> tuple[str, ...]:
    """Paths of the called modules around an op, outermost first, as torchao's name filters compare them.

    Args:
        node: an op of a captured graph.

    >>> linear = next(node for node in capture.module().graph.nodes if "linear" in str(node.target))
    >>> called_modules(linear)
    ('0',)
    """
    paths = [path.removeprefix(_ROOT) for path, _ in module_stack(node).values()]
    return tuple(path for path in paths if path)


def op_type(node: Node) -> str:
    """A node's op without namespace, overload and in-place underscore: ``add`` for ``aten.add_.Tensor``.

    Args:
        node: an op of a captured graph.

    >>> graph = torch.fx.Graph()
    >>> op_type(graph.call_function(torch.ops.aten.add_.Tensor, (graph.placeholder("x"), 1)))
    'add'
    """
    from pt2qa._graph.handles import op_of

    return op_of(node.target)


def _settings(plugin: _P, option: str, name: str, override: Mapping[str, object] | None) -> _P | None:
    if override is None:
        return None
    where = f"quantizer {name_of(plugin)!r}: {option}[{name!r}]"
    if not isinstance(override, Mapping):
        raise PluginError(f"{where}: got {override!r}, expected a mapping of options, or None to leave it in float")
    for nested in {"modules", "op_types"}.intersection(override):
        raise PluginError(f"{where}: {nested} cannot be set within {option}")
    try:
        return with_options(plugin, {"modules": {}, "op_types": {}, **override})
    except PluginError as error:
        raise PluginError(f"{option}[{name!r}]: {error}") from error


def _scope(
    plugin: _P,
    kind: Literal["module", "op type"],
    name: str,
    override: Mapping[str, object] | None,
    calls: list[Node],
    ops: Collection[str],
) -> Scope[_P]:
    where = f"quantizer {name_of(plugin)!r}: {_OPTIONS[kind]}[{name!r}]"
    if kind == "op type" and name not in ops:
        raise PluginError(f"{where}: cannot be set{did_you_mean(name, ops)} It takes {', '.join(ops)}")
    nodes = [node for node in calls if _holds(kind, name, node)]
    held = tuple(dict.fromkeys(map(op_type, nodes)))
    if not nodes:
        raise PluginError(f"{where}: {_absent(kind, name, calls, ops)}")
    settable = tuple(op for op in held if op in ops)
    if not settable:
        raise PluginError(
            f"{where}: nothing in it is quantized on its own: it holds {few(held, _LISTED)}. "
            f"Settings apply to {', '.join(ops)}"
        )
    return Scope(kind, name, _settings(plugin, _OPTIONS[kind], name, override), settable, _known_as(kind, name, nodes))


def _known_as(kind: str, name: str, nodes: list[Node]) -> tuple[str, ...]:
    if kind != "module":
        return ()
    outermost = (
        next(path for path in called_modules(n) if f"{clean_path(path)}.".startswith(f"{name}.")) for n in nodes
    )
    return tuple(dict.fromkeys(outermost))


def _holds(kind: str, name: str, node: Node) -> bool:
    return name in modules_of(node) if kind == "module" else name == op_type(node)


def _absent(kind: str, name: str, calls: list[Node], ops: Collection[str]) -> str:
    if kind == "op type":
        counts = Counter(op for node in calls if (op := op_type(node)) in ops)
        held = ", ".join(f"{op} ({count})" for op, count in counts.items()) or "nothing that could be quantized"
        return f"the graph has no {name}; it has {held}"
    known = dict.fromkeys(path for node in calls for path in modules_of(node))
    holding = tuple(dict.fromkeys(path for node in calls if op_type(node) in ops for path in modules_of(node)))
    return (
        f"no op of the graph comes from a module of this path{did_you_mean(name.removeprefix(_ROOT), known)} "
        f"Modules with something to quantize: {few(holding, _LISTED) or 'none'}"
    )
