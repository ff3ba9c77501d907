"""Modules and weights that forward does not use exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, memory_of
from pt2qa._check.context import CheckContext
from pt2qa._graph.handles import attribute_of, module_of
from pt2qa._graph.internals.nodes import VALUE, clean_path, module_stack
from pt2qa.plugins import Found
from pt2qa.plugins.rules import rule


@rule(
    severity="warning",
    title="modules that forward never calls",
    why="A layer that was meant to be there is not, and settings for it by name have no effect. Heads that only "
    "training uses are stored for nothing.",
    fix="call the module in forward, or delete it from the model before it is captured (del model.head)",
    needs=("model", "capture"),
)
def module_never_called(context: CheckContext) -> Iterator[Found]:
    """The outermost ones; those whose result is discarded are dead code."""
    model, program = context.model, context.capture.program
    names = program.graph_signature.inputs_to_parameters
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # A tied weight is read under one of its names.
    read = {
        id(parameters[names[node.name]])
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in names and node.users
    }
    dead = {change.name.rpartition("/")[0] for change in context.changes if change.rule == "dead code"}
    reported: list[str] = []
    for path, module in model.named_modules():
        own = list(module.parameters())
        within = any(path.startswith(f"{outer}.") for outer in reported)
        called_in_vain = any(f"{name}.".startswith(f"{path}.") for name in dead)
        if not path or not own or within or called_in_vain or any(id(parameter) in read for parameter in own):
            continue
        reported.append(path)
        count = sum(parameter.numel() for parameter in own)
        yield Found(path, f"{type(module).__name__} with {count:,} parameters that forward never reads", value=count)


@rule(
    severity="note",
    title="modules that forward calls more than once",
    why="Each call has its own observers after pt2qa.capture. In the programs that torch.export writes, quantizers may "
    "take all calls for one (plain-program), and some annotate only the first call of a convolution.",
    fix="nothing if that is intended",
    needs=("graph",),
)
def shared_module(context: CheckContext) -> Iterator[Found]:
    """The outermost ones; a warning if the quantizer rounds the weights in some calls only."""
    calls = _calls(context.nodes)
    for path, ops_of_calls in calls.items():
        count = len(ops_of_calls)
        if count < 2 or any(len(calls[outer]) >= count for outer in _outer(path) if outer in calls):
            continue
        taken = _taken(context, list(ops_of_calls.values()))
        what = f"called {count} times"
        if 0 < taken < count:
            why = f"{what}, and {context.plugin.name} quantizes the weights in {taken} of these calls only"
            yield Found(path, why, "warning", _FIX_WEIGHTS)
        else:
            yield Found(path, f"{what}; each call has its own scales, settings by module name apply to all of them")


def _taken(context: CheckContext, calls: list[list[str]]) -> int:
    """In how many calls of a module all its weights are rounded; 0 without weights or annotations."""
    annotations = context.known("annotations")
    weighted = [[name for name in ops if _reads_weight(context.nodes[name])] for ops in calls]
    if annotations is None or not any(weighted):
        return 0
    readers = {edge.reader for edge in annotations.edges if edge.kind == "weight"}
    return sum(all(name in readers for name in ops) for ops in weighted)


def _calls(nodes: Mapping[str, Node]) -> dict[str, dict[str, list[str]]]:
    """By module path, the ops of each of its calls; torch.export gives every call its own key."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, node in nodes.items():
        for key, (path, _) in module_stack(node).items():
            if clean_path(path):
                found[clean_path(path)][key].append(name)
    return found


def _outer(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _reads_weight(node: Node) -> bool:
    return any(source.op == "get_attr" and source.meta[VALUE].dim() > 1 for source in node.all_input_nodes)


_FIX_WEIGHTS = "give each call a module of its own (copy.deepcopy), or expect the float time of the other calls"


@rule(
    severity="note",
    title="weights that ops of several modules read",
    why="Each reader gets its own rounded copy. If one of them stays in float, such as an embedding tied to the last "
    "linear, the weight is stored twice, and a change of one copy does not affect the other.",
    fix="nothing if that is intended; otherwise quantize all readers or none, by settings of the quantizer",
    needs=("graph",),
)
def shared_weight(context: CheckContext) -> Iterator[Found]:
    """Those of calls of one module are reported by shared-module."""
    for constants in constants_by_memory(context.graph).values():
        readers = [reader for constant in constants for reader in _readers(constant)]
        # An op that no module called counts as its own place.
        places = {module_of(reader)[0] or reader.name for reader in readers}
        if not _is_weight(constants[0]) or len(places) < 2:
            continue
        names = ", ".join(dict.fromkeys(context.name_of(reader) for reader in readers))
        also = ", ".join(dict.fromkeys(str(constant.target) for constant in constants[1:]))
        called = f" (also called {also})" if also else ""
        yield Found(str(constants[0].target), f"one tensor{called}, read by {names}")


def _is_weight(constant: Node) -> bool:
    value = constant.meta.get(VALUE)
    return value is not None and value.dim() > 1 and value.is_floating_point()


def constants_by_memory(graph: GraphModule) -> dict[int, list[Node]]:
    """The ``get_attr`` nodes of the tensors of a graph, by a number for their memory, in graph order."""
    found: dict[int, list[Node]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attribute_of(graph, node)
        memory = memory_of(value) if isinstance(value, Tensor) else None
        if memory is not None:
            found[memory].append(node)
    return found


def _readers(constant: Node) -> list[Node]:
    """The ops that read a constant and something else; its views, which read nothing else, are skipped."""
    found: list[Node] = []
    for user in constant.users:
        if user.op != "call_function":
            continue
        found += [user] if len(user.all_input_nodes) > 1 else _readers(user)
    return list(dict.fromkeys(found))


@rule(
    severity="note",
    title="buffers that forward writes to",
    why="Each run starts with what the run before left there. pt2qa starts every batch from the captured state; an app "
    "that runs the quantized model does not, and writes values that were rounded.",
    fix="nothing for counters; make state that outputs depend on an input and an output of forward",
    needs=("graph",),
)
def written_buffer(context: CheckContext) -> Iterator[Found]:
    graph = context.graph
    buffers = graph.graph.find_nodes(op="get_attr")
    for node in Aliases(graph).written(buffers):
        name = str(node.target)
        if not name.endswith("num_batches_tracked"):  # of a batch norm in training mode, which train-mode reports
            yield Found(name, "forward writes to it")
