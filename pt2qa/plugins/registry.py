"""Finding plug-ins: by entry point, by text, by object."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final

from pt2qa._printable import did_you_mean
from pt2qa.errors import PluginError
from pt2qa.plugins.backend_spec import BackendSpec
from pt2qa.plugins.code import Base, edited_quantizer_code
from pt2qa.plugins.options import options_of, parse_options, with_options
from pt2qa.plugins.protocol import Backend, GenericPlugin, QuantizerPlugin

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from pt2qa.overrides.plan import OverridePlan
    from pt2qa.plugins.rules import Rule

GROUP = "pt2qa.quantizers"
BACKENDS = "pt2qa.backends"
"""Entry points of backends without a quantizer: each names an instance with default options."""

_KINDS: Final[dict[str, tuple[str, type, str]]] = {
    GROUP: ("quantizer", QuantizerPlugin, "name, summary and build(graph, *, qat)"),
    BACKENDS: ("backend", Backend, "the members of pt2qa.plugins.Backend"),
}


def available() -> dict[str, QuantizerPlugin]:
    """The installed plug-ins that load, by name, each with its default options.

    >>> set(available()) >= {"x86", "xnnpack"}
    True
    """
    return _load_all(GROUP)[0]


def backends() -> dict[str, Backend]:
    """What lowers and runs models, by name: that of each plug-in that has one, and those without a quantizer.

    >>> set(backends()) >= {"x86", "xnnpack"}
    True
    """
    of_plugins = {name: backend_of(plugin) for name, plugin in available().items()}
    return {name: each for name, each in {**of_plugins, **_load_all(BACKENDS)[0]}.items() if each is not None}


def unavailable() -> dict[str, str]:
    """The installed plug-ins that do not load: name to reason. One broken plug-in never hides the others.

    >>> "x86" in unavailable()
    False
    """
    return {name: reason for group in _KINDS for name, reason in _load_all(group)[1].items()}


def quantizer(name: str, **options: object) -> QuantizerPlugin:
    """An installed plug-in with some of its options set.

    Args:
        name: name of its entry point in the group ``pt2qa.quantizers``.
        options: the plug-in's own; see ``pt2qa quantizers``.

    Returns:
        The plug-in, which :func:`pt2qa.quantize` takes.

    Raises:
        PluginError: no such plug-in, one that does not load, an unknown option, a value that the option does not take.

    >>> quantizer("x86", reduce_range=True).name
    'x86'
    """
    entries = _entries(GROUP)
    if name not in entries:
        listed = ", ".join(entries) or f"none: no installed package has an entry point in the group {GROUP}"
        raise PluginError(f"no quantizer is named {name!r}{did_you_mean(name, entries)} Installed: {listed}")
    plugin: QuantizerPlugin = with_options(_load(name, entries[name], GROUP), options)
    return plugin


def resolve(spec: object) -> QuantizerPlugin:
    """The plug-in for a user's description of a quantizer.

    Args:
        spec: a name (``"xnnpack"``), a name with options (``"xnnpack:per_channel=false,mode=dynamic"``), a plug-in, or
            any torchao ``Quantizer`` object.

    Raises:
        PluginError: it is none of these; the message says what it is.

    >>> resolve("x86:reduce_range=true").name
    'x86'
    """
    if isinstance(spec, str):
        name, _, text = spec.partition(":")
        plugin = quantizer(name.strip())
        return with_options(plugin, parse_options(plugin, text))
    if isinstance(spec, QuantizerPlugin) and not isinstance(spec, type):
        return spec
    return GenericPlugin(spec)


def spec_of(plugin: object) -> BackendSpec | None:
    """What a plug-in's backend takes; None if nothing states it.

    A torchao quantizer object without a spec of its own has that of the plug-in that knows its class.

    Args:
        plugin: as :func:`pt2qa.quantize` takes a quantizer, but no name.

    >>> spec_of(resolve("xnnpack")).name
    'XNNPACK'
    """
    found: BackendSpec | None = of_backend(plugin, "spec")
    return found


def edit_before_convert(plugin: object) -> Callable[[GraphModule], list[tuple[Node, str]]] | None:
    """What a plug-in's backend needs of a calibrated graph, found as its spec is; None if nothing."""
    edit = of_backend(plugin, "before_convert")
    return None if edit is None else edit()


def of_backend(plugin: object, member: str, default: Any = None) -> Any:
    """An optional member about a backend: a plug-in's own, or for a quantizer object that of the one that knows it."""
    if getattr(plugin, member, None) is None and isinstance(plugin, GenericPlugin):
        plugin = _plugin_of_backend(plugin.quantizer)
    return getattr(plugin, member, default)


def _plugin_of_backend(quantizer: object) -> QuantizerPlugin | None:
    """The installed plug-in that knows the quantizer's class; of a composed one, the only one that knows a part's.

    Parts that none knows, such as torchao's quantizer of embeddings, go with any backend.
    """
    if parts := getattr(quantizer, "quantizers", ()):
        known = [plugin for part in parts if (plugin := _plugin_of_backend(part)) is not None]
        return known[0] if known and all(other == known[0] for other in known) else None
    # A class of the package that a known one is from, such as torchao's for ARM, may be for another backend.
    plugins = {path: plugin for plugin in available().values() for path in getattr(plugin, "quantizer_classes", ())}
    packages = {path.partition(".")[0] for path in plugins}
    stock = [cls for cls in type(quantizer).__mro__ if cls.__module__.partition(".")[0] in packages]
    return plugins.get(f"{stock[0].__module__}.{stock[0].__qualname__}") if stock else None


def _load_all(group: str) -> tuple[dict[str, Any], dict[str, str]]:
    loaded, broken = dict[str, Any](), dict[str, str]()
    for name, entries in _entries(group).items():
        try:
            loaded[name] = _load(name, entries, group)
        except PluginError as error:
            broken[name] = str(error)
    return loaded, broken


def _entries(group: str) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        same = found.setdefault(entry.name, [])
        # An editable install and a stray build folder may both list the same plug-in.
        if entry.value not in [other.value for other in same]:
            same.append(entry)
    return found


def _load(name: str, entries: list[EntryPoint], group: str) -> Any:
    kind, protocol, has = _KINDS[group]
    if len(entries) > 1:
        offers = " and ".join(_origin(entry) for entry in entries)
        raise PluginError(f"{kind} {name!r} is offered by {offers}: uninstall one of them")
    origin = _origin(entries[0])
    try:
        plugin = entries[0].load()
    except Exception as error:
        raise PluginError(f"{kind} {name!r} ({origin}) cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(plugin, type) or not isinstance(plugin, protocol) or not dataclasses.is_dataclass(type(plugin)):
        raise PluginError(
            f"{kind} {name!r} ({origin}) is not a plug-in: got {plugin!r}, expected an instance of a frozen "
            f"dataclass with {has}"
        )
    if group == GROUP and (own := getattr(plugin, "name", "")) != name:
        raise PluginError(f"{kind} {name!r} ({origin}) calls itself {own!r}: the two names must be equal")
    options_of(plugin)
    return plugin


def _origin(entry: EntryPoint) -> str:
    return f"{entry.value} of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


LEVELS = ("float", "observer")
"""What every backend supports: ops in float, and other observers."""


def levels_of(plugin: Any) -> tuple[str, ...]:
    """The kinds of edit worth trying op by op with a plug-in's backend.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> "float" in levels_of(pt2qa.quantizer("xnnpack"))
    True
    """
    return tuple(getattr(plugin, "levels", LEVELS))


def fusable_of(plugin: Any) -> tuple[tuple[str, str], ...] | None:
    """Pairs of op types that the backend runs as one kernel; None if the plug-in does not declare them.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> ("conv2d", "hardtanh") in fusable_of(pt2qa.quantizer("xnnpack"))
    True
    """
    pairs = of_backend(plugin, "fusable")
    return None if pairs is None else tuple((first, second) for first, second in pairs)


def unsupported_reason(plugin: Any, kind: str, node: Node) -> str:
    """Why an op cannot take an edit; empty if it can, or if the plug-in does not say.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.
        kind: of the edit, such as ``float``.
        node: the op in the captured graph.

    >>> linear = next(node for node in capture.module().graph.nodes if "linear" in str(node.target))
    >>> unsupported_reason(pt2qa.quantizer("xnnpack"), "float", linear)
    ''
    """
    own = getattr(plugin, "unsupported_reason", None)
    return "" if own is None else str(own(kind, node))


def rules_of(plugin: Any) -> tuple[Rule, ...]:
    """The rules that a plug-in adds to the structure check, specific to its backend.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> {type(rule).__name__ for rule in rules_of(pt2qa.quantizer("xnnpack"))}
    {'Rule'}
    """
    return tuple(of_backend(plugin, "rules", tuple)())


def backend_of(plugin: Any) -> Backend | None:
    """What lowers and runs a plug-in's models; None if it has nothing.

    Args:
        plugin: a quantizer plug-in, such as :func:`pt2qa.quantizer` returns.

    >>> backend_of(pt2qa.quantizer("xnnpack")).name
    'ExecuTorch with XNNPACK'
    """
    found: Backend | None = of_backend(plugin, "backend")
    return found


def quantizer_code(plugin: Any, plan: OverridePlan, graph: GraphModule, *, qat: bool = False) -> str:
    """A plan as Python source for an export flow without pt2qa.

    Args:
        plugin: the plug-in; if it writes no code, the result is a quantizer that edits another one's annotations.
        plan: the edits.
        graph: the captured float graph, with handles.
        qat: for ``prepare_qat_pt2e``; a plug-in whose own method does not take it counts as one that writes no code.

    Raises:
        SelectionError: the plan names an op that the graph does not have.
        PluginError: the backend does not support an edit.
        QuantizeError: an edit changes nothing, or cannot be made.

    >>> code = quantizer_code(pt2qa.quantizer("xnnpack"), pt2qa.OverridePlan(()), capture.module())
    >>> code.splitlines()[-1]
    'quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))'
    """
    own = getattr(plugin, "quantizer_code", None)
    if own is not None and not qat:
        return str(own(plan, graph))
    if own is not None and "qat" in inspect.signature(own).parameters:
        return str(own(plan, graph, qat=True))
    base = Base((), "quantizer", "quantizer is the one that you configured")
    return edited_quantizer_code(plan, graph, base, plugin, qat=qat)
