"""Observers of a prepared graph: their calibration, proof that each saw some batches, and graphs without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2qa._capture.inputs import detached
from pt2qa._capture.program import Capture
from pt2qa._graph.handles import OpName, copy_nodes, name_of
from pt2qa._graph.internals.nodes import ANNOTATION
from pt2qa._graph.internals.torch import pytree
from pt2qa._graph.internals.torchao import is_observer, set_statistics, statistics_of
from pt2qa._ranks import active, everywhere
from pt2qa._report.prose import few
from pt2qa._simulator.batches import as_call
from pt2qa._simulator.data import Data
from pt2qa.errors import QuantizeError


def find_observers(prepared: GraphModule) -> dict[str, Node]:
    """The observers of a prepared graph and of those nested in it, by attribute name, with a node that calls each."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    return {
        target: node
        for path, graph in modules.items()
        if isinstance(graph, GraphModule)
        for node in graph.graph.nodes
        if node.op == "call_module" and is_observer(modules.get(target := f"{path}.{node.target}".lstrip(".")))
    }


def observed_value(observer: Node, names: Mapping[int, OpName]) -> str:
    """What an observer sees: the op or input that produces the value, or the name of the weight."""
    source = unobserved(observer)
    return str(source.target) if source.op == "get_attr" else name_of(source, names) or source.name


def unobserved(observer: Node) -> Node:
    """The op, input or weight whose value an observer sees, directly or behind other observers."""
    source = observer.args[0]
    assert isinstance(source, Node)
    return unobserved(source) if source.op == "call_module" else source


def saw_nonfinite(prepared: GraphModule, names: Mapping[int, OpName]) -> list[str]:
    """What those observers saw whose range is NaN or infinite."""
    broken = []
    for target, node in find_observers(prepared).items():
        learned = statistics_of(prepared.get_submodule(target))
        ends = [learned[end] for end in ("min_val", "max_val") if end in learned]
        if not all(bool(end.isfinite().all()) for end in ends):
            broken.append(observed_value(node, names))
    return list(dict.fromkeys(broken))


def without(graph_module: GraphModule, is_gone: Callable[[nn.Module], bool]) -> GraphModule:
    """A copy of a graph, and of those nested in it, without the calls of some modules that pass on their input.

    The parameters are the same; a graph that calls none of these modules is returned as is.
    """
    stripped = copy_nodes(graph_module)
    graphs = [part for part in stripped.modules() if isinstance(part, GraphModule)]
    gone = [
        node
        for part in graphs
        for node in part.graph.find_nodes(op="call_module")
        if is_gone(part.get_submodule(str(node.target)))
    ]
    for node in gone:
        node.replace_all_uses_with(node.args[0])
        node.graph.erase_node(node)
    for part in graphs:
        part.recompile()
    return stripped if gone else graph_module


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs."""


def read_calls(capture: Capture, graph: GraphModule, data: Data) -> Iterator[Call]:
    """The calibration batches as calls of a graph, each checked as it is read."""
    for batch in data:
        args, kwargs = as_call(batch, graph)
        capture.check_batch(args, kwargs)
        yield args, kwargs


def calibrate(prepared: GraphModule, calls: Iterable[Call], names: Mapping[int, OpName]) -> None:
    observers = find_observers(prepared)
    modules = {target: prepared.get_submodule(target) for target in observers}
    seen: set[nn.Module] = set()
    observing: dict[nn.Module, Any] = {}

    def begin(module: nn.Module, args: Any) -> None:
        observing[module] = args[0] if args else None

    def note(module: nn.Module, args: Any, output: Any) -> None:
        observing.pop(module, None)
        if not (args and isinstance(args[0], Tensor) and not args[0].numel()):
            seen.add(module)

    def failed_at() -> str:
        found = (target for target, module in modules.items() if module in observing)
        return next((_observed(observers[at], observing[modules[at]], names) for at in found), "")

    hooks = [module.register_forward_pre_hook(begin) for module in set(modules.values())]
    hooks += [module.register_forward_hook(note) for module in set(modules.values())]
    number = -1
    try:
        for number, call in enumerate(calls):
            run_batch(prepared, call, number, failed_at)
    finally:
        for hook in hooks:
            hook.remove()
    batches = share_observed(modules, seen, number + 1)
    missed = {observed_value(node, names) for target, node in observers.items() if modules[target] not in seen}
    if missed:
        raise QuantizeError(
            f"{len(missed)} of {len(observers)} observers never saw a value in {batches} calibration batches: "
            f"{few(sorted(missed))}. Calibrate with batches that reach these ops."
        )


def share_observed(modules: Mapping[str, nn.Module], seen: set[nn.Module], batches: int) -> int:
    """Gives the observers what those of other ranks saw, adds to ``seen`` those that did, and counts all batches."""
    if active() is None:
        return batches
    # By place in the graph: names may be numbered otherwise in another process.
    each = list(dict.fromkeys(modules.values()))
    parts = everywhere((batches, [statistics_of(module) for module in each], [module in seen for module in each]))
    for place, module in enumerate(each):
        set_statistics(module, [(count, statistics[place]) for count, statistics, _ in parts])
    seen |= {module for _, _, did in parts for module, saw in zip(each, did, strict=True) if saw}
    return sum(count for count, _, _ in parts)


def shared_calibration() -> Iterator[str]:
    """What a reader must know of a calibration by several ranks."""
    if (ranks := active()) is not None:
        yield (
            f"calibrated by {ranks.size} processes: ranges are those of all data, and histograms and moving averages "
            "depend on how it was divided"
        )


def _observed(observer: Node, value: Any, names: Mapping[int, OpName]) -> str:
    """What an observer failed on, and what to do about it."""
    what = f"the observer of {observed_value(observer, names)} failed"
    if not isinstance(value, Tensor):
        return what
    if value.is_floating_point() and not bool(value.isfinite().all()):
        why = "on values that are NaN or infinite, for which no scale fits"
    elif value.is_floating_point():
        why = f"on values of shape {tuple(value.shape)}: what the quantizer asks for does not fit them"
    else:
        why = f"on values of {value.dtype}, which are not floating-point and need no scale"
    asking = sorted(filter(None, (name_of(node, names) for node in _asking(observer))))
    edit = f'pt2qa.Edit("float", ({", ".join(map(repr, asking))},))'
    where = f"Keep {few(asking)} in float, overrides=pt2qa.OverridePlan(({edit},)), or fix" if asking else "Fix"
    return f"{what} {why}. {where} the quantizer"


def _asking(observer: Node) -> Iterator[Node]:
    """The ops that are annotated to round what an observer sees: that which makes it, and those that read it."""
    source = unobserved(observer)
    if getattr(source.meta.get(ANNOTATION), "output_qspec", None) is not None:
        yield source
    readers = list(source.users)
    for node in readers:
        if node.op == "call_module":
            readers += node.users
        elif (getattr(node.meta.get(ANNOTATION), "input_qspec_map", None) or {}).get(source) is not None:
            yield node


def run_batch(graph: GraphModule, call: Call, number: int, failed_at: Callable[[], str] = lambda: "") -> Any:
    """What a graph returns for a batch; an error reports NaN and infinity in it, or else what ``failed_at`` returns."""
    args, kwargs = detached(call)  # which a model may write to
    try:
        with torch.no_grad():
            return graph(*args, **kwargs)
    except Exception as error:
        batch = f"calibration batch {number} (counted from 0)"
        for node, value in zip(graph.graph.find_nodes(op="placeholder"), pytree.tree_leaves(call), strict=True):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
                what = "NaN" if bool(value.isnan().any()) else "infinity"
                raise QuantizeError(
                    f"{batch} holds {what} in the input {node.target}, for which no scale fits. Leave it out, or "
                    "calibrate with inputs that are finite."
                ) from error
        why = f"{type(error).__name__}: {error}"
        if where := failed_at():
            raise QuantizeError(f"{batch}: {where} ({why}).") from error
        raise QuantizeError(f"{batch} failed with {why}; see the traceback above.") from error
