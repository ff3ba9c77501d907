"""How often each module of a model is called, and how many of its ops are quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from torch.fx import GraphModule

from pt2qa._annotations.rows import ModuleCalls
from pt2qa._graph.handles import OpName, handle_of, walk
from pt2qa._graph.internals.nodes import clean_path, module_stack
from pt2qa._report.prose import few


def module_calls(
    graph: GraphModule, names: Mapping[int, OpName], present: Collection[str], quantized: Collection[str]
) -> tuple[ModuleCalls, ...]:
    """The modules of a captured graph in the order in which they are called, then those that are never called.

    A module is known by the ops that it calls, or by the parameters that it holds: one that has neither is not listed.
    ``present`` are the ops that are left in the graph that is quantized, ``quantized`` those that read a rounded value.
    """
    calls: dict[str, set[str]] = defaultdict(set)
    types: dict[str, str] = {}
    ops: dict[str, list[str]] = defaultdict(list)
    for placed in walk(graph):
        handle = handle_of(placed.node)
        if placed.node.op != "call_function" or handle is None or handle not in names:
            continue
        for key, (raw_path, kind) in module_stack(placed.node).items():
            path = clean_path(raw_path)
            calls[path].add(str(key))
            types[path] = str(getattr(kind, "__qualname__", kind)).rpartition(".")[2]
            ops[path].append(names[handle].name)
    called = [
        ModuleCalls(
            path,
            types[path],
            len(keys),
            sum(name in present for name in ops[path]),
            sum(name in quantized for name in ops[path]),
            "",
        )
        for path, keys in calls.items()
        if path
    ]
    return (*called, *_never_called(graph, names, set(calls)))


def _never_called(graph: GraphModule, names: Mapping[int, OpName], called: Collection[str]) -> list[ModuleCalls]:
    """Modules that hold parameters or buffers of their own and call no op."""
    state = graph.state_dict(keep_vars=True)
    # One module under two paths is called by one of them.
    theirs = {id(tensor) for name, tensor in state.items() if name.rpartition(".")[0] in called}
    tensors: dict[str, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        path = name.rpartition(".")[0]
        if path and path not in called and id(tensor) not in theirs:
            tensors[path].append(name)
    readers: dict[str, list[str]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            handles = [handle_of(user) for user in node.users]
            readers[str(node.target).rpartition(".")[0]] += [
                names[h].name for h in handles if h is not None and h in names
            ]
    return [
        ModuleCalls(path, "", 0, 0, 0, f"never called; {_read_by(readers[path])}") for path, found in tensors.items()
    ]


def _read_by(readers: list[str]) -> str:
    names = list(dict.fromkeys(readers))
    return f"its parameters are read by {few(names)}" if names else "nothing reads its parameters"
