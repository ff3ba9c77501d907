"""The modules that prepare inserts after values, and graphs without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.fx import GraphModule, Node

from pt2qa._graph.copies import copy_nodes
from pt2qa._graph.handles import OpName, name_of
from pt2qa._graph.internals.torchao import is_observer, statistics_of


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
