"""Modules and weights that forward does not use exactly once, and batch norms that prepare cannot fold, or must not."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import Aliases, memory_of
from pt2qa._check.context import CheckContext, require
from pt2qa._check.rules.capturing import trains
from pt2qa._graph.handles import attribute_of, copy_without_values, handle_of, module_of, op_of
from pt2qa._graph.internals.nodes import VALUE, clean_path, module_stack
from pt2qa._graph.internals.torchao import fold_batch_norms
from pt2qa._simulator.products import CONVOLUTIONS
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
        if count < 2 or any(len(calls[outer]) >= count for outer in calls if path.startswith(f"{outer}.")):
            continue
        taken = _taken(context, list(ops_of_calls.values()))
        what = f"called {count} times"
        if 0 < taken < count:
            why = f"{what}, and {context.plugin.name} quantizes the weights in {taken} of these calls only"
            fix = "give each call a module of its own (copy.deepcopy), or expect the float time of the other calls"
            yield Found(path, why, "warning", fix)
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


def _reads_weight(node: Node) -> bool:
    return any(source.op == "get_attr" and source.meta[VALUE].dim() > 1 for source in node.all_input_nodes)


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
        value = constants[0].meta.get(VALUE)
        if value is None or value.dim() < 2 or not value.is_floating_point() or len(places) < 2:
            continue
        names = ", ".join(dict.fromkeys(context.name_of(reader) for reader in readers))
        also = ", ".join(dict.fromkeys(str(constant.target) for constant in constants[1:]))
        called = f" (also called {also})" if also else ""
        yield Found(str(constants[0].target), f"one tensor{called}, read by {names}")


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


_FOLDING = CONVOLUTIONS | {"linear"}
_QAT = "to quantization-aware training, whose prepare folds no batch norm"


@rule(
    severity="error",
    title="batch norms that are folded although something else reads the weight or the value",
    why="prepare_pt2e multiplies a batch norm into the weight before it. Other readers of that weight, or of the value "
    "before the batch norm, then compute with the wrong numbers, before anything is rounded.",
    fix="give each use a convolution of its own (copy.deepcopy), or apply the batch norm to the sum instead",
    needs=("graph",),
)
def invalid_fold(context: CheckContext) -> Iterator[Found]:
    require(not context.qat, _QAT)
    graph = context.graph
    norms = [node for node in graph.graph.nodes if _folds(node)]
    require(norms, "to models without a batch norm after a convolution or linear")
    normed = {norm.args[0] for norm in norms}
    for constants in constants_by_memory(graph).values():
        pairs = [(constant, user) for constant in constants for user in constant.users if user.op == "call_function"]
        readers = [user for constant, user in pairs if op_of(user.target) in _FOLDING and user.args[1] is constant]
        folded = [reader for reader in readers if reader in normed]
        if not folded:
            continue
        others = [reader for reader in readers if reader not in normed]
        users = [user for reader in folded for user in reader.users]
        own, bypassed = [user for user in users if _folds(user)], [user for user in users if not _folds(user)]
        weight = str(constants[0].target)
        name = context.name_of(folded[0])
        if len({tuple(map(str, norm.args[1:5])) for norm in own}) > 1:
            yield Found(name, f"different batch norms follow the one weight {weight}: {_listed(context, own)}")
        elif why := _bias_at_fault(folded):
            yield Found(name, f"{weight} is used {len(folded)} times, {why}")
        elif others:
            yield Found(name, f"its batch norm is folded into {weight}, which {_listed(context, others)} reads too")
        elif bypassed:
            yield Found(name, f"its batch norm is folded into it, but {_listed(context, bypassed)} reads it without")


def _folds(node: Node) -> bool:
    """Whether a node is a batch norm that prepare folds into its producer."""
    before = node.args[0] if node.op == "call_function" and op_of(node.target) == "batch_norm" else None
    if not isinstance(before, Node) or before.op != "call_function" or op_of(before.target) not in _FOLDING:
        return False
    # prepare leaves a linear with more than two dimensions alone.
    return op_of(before.target) != "linear" or before.meta[VALUE].dim() == 2


def _bias_at_fault(folded: list[Node]) -> str:
    """What is wrong with the biases of several uses of one weight: torchao folds at the first use only."""
    biases = {reader.args[2] if len(reader.args) > 2 else None for reader in folded}
    if len(folded) > 1 and biases == {None}:
        return "without a bias: prepare writes the batch norm into a new bias, and zeros into that at the next use"
    if len(biases) > 1:
        return "with different biases: prepare folds the batch norm only into the first"
    return ""


def _listed(context: CheckContext, nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys("the output" if node.op == "output" else context.name_of(node) for node in nodes))


@rule(
    severity="warning",
    title="batch norms that cannot be folded",
    why="A batch norm is free only if it is multiplied into the weight of the convolution or linear before it. "
    "Elsewhere it runs in float, between a dequantize and a quantize; and as soon as one is left, convert_pt2e spends "
    "about ten seconds looking for QAT patterns.",
    fix="put the batch norm directly after a convolution (conv, norm, relu instead of norm, relu, conv), or expect its "
    "time in float",
    needs=("graph",),
)
def unfoldable_batch_norm(context: CheckContext) -> Iterator[Found]:
    require(not context.qat, _QAT)
    require(any(_is_batch_norm(node) for node in context.graph.graph.nodes), "to models without batch norm")
    for node in _unfolded(context.graph):
        before = node.all_input_nodes[0]
        op = "an input" if before.op == "placeholder" else op_of(before.target)
        rank = f" with {before.meta[VALUE].dim()} dimensions" if op == "linear" else ""
        yield Found(context.name_of(node), f"it reads {op}{rank}, and stays a float op")


def _unfolded(graph: GraphModule) -> list[Node]:
    # What is folded depends on no weight.
    folded = copy_without_values(graph)
    with warnings.catch_warnings():
        # of linears that it does not fold, which this rule looks for
        warnings.filterwarnings("ignore", message="Not fusing linear")
        fold_batch_norms(folded)
    left = {handle_of(node) for node in folded.graph.nodes if _is_batch_norm(node)}
    return [node for node in graph.graph.nodes if _is_batch_norm(node) and handle_of(node) in left]


def _is_batch_norm(node: Node) -> bool:
    return node.op == "call_function" and op_of(node.target) == "batch_norm" and not trains(node)
