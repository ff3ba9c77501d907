"""Handles: numbers that identify the ops of one model in every graph made from it.

A handle is ``node.meta["custom"]["numeric_debug_handle"]``. torch and torchao copy that field: it survives
``ExportedProgram.module()``, ``copy.deepcopy``, re-export, ``torch.export.save`` and ``load``, ``prepare_pt2e`` and
``convert_pt2e``.  Node names do not; so people read a name made of module path, op and ordinal (:class:`OpName`).
"""

from __future__ import annotations

import copy
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from pt2qa._graph.internals.flow_runtime import module_of as module_of
from pt2qa._graph.internals.flow_runtime import numbered, stem_of
from pt2qa._graph.internals.flow_runtime import op_of as op_of
from pt2qa._graph.internals.nodes import CUSTOM, HANDLE, STACK_TRACE
from pt2qa._graph.internals.torch import HigherOrderOperator
from pt2qa._grouping import grouped

OUTPUTS = "output_handles"
"""Where an op with several outputs notes their handles: a saved program gives every output the op's own metadata."""

PART = "recurrent_part"
"""Where a part of a recurrent op that capture took apart notes which op that was, and which step it computes."""

BODIES = {
    "cond": ("true", "false"),
    "while_loop": ("cond", "body"),
    "map": ("body",),
    "scan": ("body",),
    "wrap_with_set_grad_enabled": ("body",),
    "wrap_with_autocast": ("body",),
}
"""What the nested graphs of a higher-order op are called, in the order of its arguments."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*(?:\n(?! *File ")([^\n]*))?')
"""A frame of a stack trace: file, line, and what stands there, which is missing where Python cannot read the file."""

_LIBRARIES = ("torch", "torchao", "executorch")
_DECOMPOSED = ("convolution", "native_batch_norm_legit_no_training", "native_batch_norm_legit")
_PRODUCTS = ("addmm", "mm")
_QUANTIZATION = ("quantize_", "dequantize_", "choose_qparams", "fake_quantize", "fused_moving_avg_obs_fake_quant")


@dataclass(frozen=True, slots=True)
class OpName:
    """A readable name, instead of the node's.

    Attributes:
        name: unique in the model, such as ``layer1.0.conv1/conv2d``; inputs keep their own name.
        module: path of the module that called the op; empty at the root.
        module_type: class name of that module; empty if unknown.
        op: what the op does, without overload and in-place underscore: ``conv2d``, ``relu``; ``input`` for an input.
        part_of: for a part of a recurrent op that capture decomposed, that op's name; else empty.
        step: which step of the sequence such a part computes, from 0 in the order of computation; else -1.
    """

    name: str
    module: str
    module_type: str
    op: str
    part_of: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class Placed:
    """A node, and the higher-order op in whose nested graph it is: in the body ``true`` of a ``cond``, say."""

    node: Node
    graph_module: GraphModule
    owner: Node | None
    body: str


def handle_of(node: Node) -> int | None:
    """The handle of a node, or None.

    >>> from torch.fx import Graph
    >>> x = Graph().placeholder("x")
    >>> print(handle_of(x))
    None
    >>> x.meta["custom"] = {"numeric_debug_handle": 3}
    >>> handle_of(x)
    3
    """
    handle = custom_of(node).get(HANDLE)
    producer = node.args[0] if node.target is operator.getitem else None
    if isinstance(producer, Node):
        outputs = custom_of(producer).get(OUTPUTS)
        if outputs is not None and outputs["of"] == str(producer.target):
            handle = outputs.get(str(node.args[1]))
    return handle if isinstance(handle, int) else None


def output_handle(node: Node) -> int | None:
    """The handle of an output of an op, even if the op was rewritten: ``chunk`` to ``split_with_sizes_copy``.

    Only the value can say whether the output is still the same.  None if the node is no output.
    """
    producer = node.args[0] if node.target is operator.getitem else None
    handle = custom_of(producer).get(OUTPUTS, {}).get(str(node.args[1])) if isinstance(producer, Node) else None
    return handle if isinstance(handle, int) else None


def assign_handles(source: GraphModule | ExportedProgram) -> None:
    """Numbers every user input and every op of a program or its graph from 0 in graph order, in place.

    The ops of a nested graph (of ``cond``, ``while_loop``, ``map``, ``scan``) follow the op that owns it.  Parameters
    and buffers get none: in QAT torchao copies their metadata to new ops, which would then claim the same handle.
    """
    graph_module = source.graph_module if isinstance(source, ExportedProgram) else source
    inputs = set(user_inputs(source))
    remove_handles(graph_module)
    ops = (each.node for each in walk(graph_module) if each.node.op == "call_function" or each.node in inputs)
    for number, node in enumerate(ops):
        # New dicts: an op in a no_grad or autocast region shares its metadata with the getitem outside of it.
        node.meta = {**node.meta, CUSTOM: {**custom_of(node), HANDLE: number}}
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            outputs = custom_of(node.args[0]).setdefault(OUTPUTS, {"of": str(node.args[0].target)})
            outputs[str(node.args[1])] = number


def remove_handles(graph_module: GraphModule) -> None:
    for placed in walk(graph_module):
        custom = {key: value for key, value in custom_of(placed.node).items() if key not in (HANDLE, OUTPUTS)}
        placed.node.meta.pop(CUSTOM, None)
        if custom:
            placed.node.meta[CUSTOM] = custom


def input_handles(source: GraphModule | ExportedProgram) -> dict[Node, int]:
    """The handles of a graph's inputs; input number i has handle i even if its metadata was lost.

    ``torch.export.save`` writes no metadata of inputs, and re-export with ``strict=True`` drops it; ops keep theirs.
    Inputs have none if an op has such a number: those handles do not come from :func:`assign_handles`, but from
    torchao's ``generate_numeric_debug_handle``, say, which numbers the ops alone.
    """
    graph_module = source.graph_module if isinstance(source, ExportedProgram) else source
    inputs = user_inputs(source)
    ops = {
        handle_of(placed.node)
        for placed in walk(graph_module)
        if placed.node.op == "call_function" and not is_quantization(placed.node)
    }
    ours = not ops <= {None} and ops.isdisjoint(range(len(inputs)))
    by_place = {node: number for number, node in enumerate(inputs)} if ours else {}
    own = {node: number for node in inputs if (number := handle_of(node)) is not None}
    return {**by_place, **own}


def user_inputs(source: GraphModule | ExportedProgram) -> list[Node]:
    placeholders = source.graph.find_nodes(op="placeholder")
    if isinstance(source, GraphModule):
        return placeholders
    specs = source.graph_signature.input_specs
    return [node for node, spec in zip(placeholders, specs, strict=True) if spec.kind is InputKind.USER_INPUT]


def walk(
    graph_module: GraphModule, owner: Node | None = None, body: str = "", seen: set[int] | None = None
) -> Iterator[Placed]:
    """Every node of a graph, those of nested graphs right after the op that owns them; each graph once."""
    seen = {id(graph_module)} if seen is None else seen
    for node in graph_module.graph.nodes:
        yield Placed(node, graph_module, owner, body)
        for label, nested in nested_graphs(node, graph_module):
            if id(nested) not in seen:
                seen.add(id(nested))
                yield from walk(nested, node, label, seen)


def nested_graphs(node: Node, graph_module: GraphModule) -> list[tuple[str, GraphModule]]:
    """The nested graphs that a higher-order op runs, each with its name; empty for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return []
    found = [body for arg in node.args if isinstance(body := attribute_of(graph_module, arg), GraphModule)]
    labels = BODIES.get(op_of(node.target), ())
    return [(labels[i] if i < len(labels) else f"graph{i}", body) for i, body in enumerate(found)]


def computed_from(ends: Collection[Node], given: Container[Node] = ()) -> set[Node]:
    """The nodes of which some are computed, these included, as far back as to what is ``given``."""
    found, ahead = set(ends), list(ends)
    while ahead:
        new = [node for node in ahead.pop().all_input_nodes if node not in found and node not in given]
        found.update(new)
        ahead += new
    return found


def attribute_of(graph_module: GraphModule, node: object) -> Any:
    """What a node reads from the graph module; None of anything else."""
    is_read = isinstance(node, Node) and node.op == "get_attr"
    return operator.attrgetter(str(node.target))(graph_module) if is_read else None  # type: ignore[attr-defined]


def names_of(source: GraphModule | ExportedProgram) -> dict[int, OpName]:
    """The names of a graph's ops, by handle.

    A name is the module path, the op and, from the second one on, an ordinal: ``fc/linear``, ``rnn/linear_1``, ``add``
    at the root.  Outputs of an op with several are ``rnn/lstm[0]``; ops in a nested graph follow its owner:
    ``block/cond.true/linear``.  Ordinals count in the order of handles, so that nothing depends on the names of nodes
    or on in-place spelling.  Take the names from the captured program: a graph that lost ops on the way counts
    differently.
    """
    graph_module = source.graph_module if isinstance(source, ExportedProgram) else source
    placed_by_handle = {number: Placed(node, graph_module, None, "") for node, number in input_handles(source).items()}
    parts: dict[GraphModule, dict[Node, int]] = {}
    for placed in walk(graph_module):
        handle = handle_of(placed.node)
        if placed.node.op != "call_function" or handle is None:
            continue
        if placed.graph_module not in parts:
            parts[placed.graph_module] = parts_of(placed.graph_module.graph)
        if parts[placed.graph_module][placed.node] == 0 and (
            handle not in placed_by_handle or is_quantization(placed_by_handle[handle].node)
        ):
            placed_by_handle[handle] = placed
    namer = _Namer()
    return {handle: namer.name(placed_by_handle[handle]) for handle in sorted(placed_by_handle)}


def parts_of(graph: Graph) -> dict[Node, int]:
    """For every op with a handle, which part of its op it is: 0 if its value leaves the op, 1, 2, ... for the others.

    A quantizer, prepare or a decomposition may write one op as several, which then all have its handle:
    ``adaptive_avg_pool2d`` as ``pad``, ``slice`` and ``avg_pool2d``.  The op's value is that of the last one that
    anything else reads.  The others are numbered in graph order, those that depend on no input last, because convert
    may have computed them.
    """
    parts: dict[int, list[Node]] = defaultdict(list)
    depends: set[Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if not depends.isdisjoint(sources) or (not sources and node.op != "get_attr"):
            depends.add(node)
        if node.op == "call_function" and (handle := handle_of(node)) is not None:
            parts[handle].append(node)
    found: dict[Node, int] = {}
    for own in parts.values():
        # What only rounds comes last, then what is constant; the sort keeps the order of the graph.
        own.sort(key=lambda node: (is_quantization(node), node not in depends))
        ops = [node for node in own if not is_quantization(node) and node in depends] or own
        inside = {node for node in own if not is_quantization(node)}
        value = next((node for node in reversed(ops) if not inside.issuperset(node.users)), ops[-1])
        found |= {node: number for number, node in enumerate([value, *(node for node in own if node is not value)])}
    return found


def part_name(name: str, node: Node, number: int) -> str:
    """The name of a part of the op ``name``; ``number`` is that of :func:`parts_of`.

    >>> part_name("pool", torch.fx.Graph().call_function(torch.ops.aten.pad.default), 1)
    'pool:pad1'
    """
    return f"{name}:{op_of(node.target)}{number}" if number else name


def is_part_name(text: str, name: str) -> bool:
    return text == name or text.startswith(f"{name}:")


def stems_of(source: GraphModule) -> dict[Node, str]:
    """The names of a graph's ops, without their ordinals; handles are not needed."""
    namer = _Namer()
    for placed in walk(source):
        if placed.node.op == "call_function":
            namer.name(placed)
    return namer.stems


def name_of(node: Node, names: Mapping[int, OpName]) -> str | None:
    handle = handle_of(node)
    return names[handle].name if handle is not None and handle in names else None


def ops_of(graph_module: GraphModule, names: Mapping[int, OpName]) -> dict[str, Node]:
    """The ops of a graph by name; of one that was written as several, the last part."""
    named = ((name_of(node, names), node) for node in graph_module.graph.nodes if node.op == "call_function")
    return {name: node for name, node in named if name is not None}


def source_line(node: Node, *, code: bool = False) -> str:
    """The innermost line of the user's files that made a node, ``net.py:12``; empty if unknown.

    With ``code``, the code follows: ``net.py:12: y = self.conv(x)``.
    """
    frames = _FRAME.findall(str(node.meta.get(STACK_TRACE) or ""))
    own = [(path, line, text) for path, line, text in frames if not _is_library(path)]
    if not own:
        return ""
    path, line, text = own[-1]
    place = f"{PurePath(path).name}:{line}"
    return f"{place}: {text.strip()}" if code and text else place


class _Namer:
    """Assigns names in the order of the requests."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._names: dict[Node, str] = {}
        self._modules: dict[Node, tuple[str, str]] = {}
        self.stems: dict[Node, str] = {}

    def name(self, placed: Placed) -> OpName:
        node, owner = placed.node, placed.owner
        op = "input" if node.op == "placeholder" else op_of(node.target)
        # strict=False knows no module inside a nested graph, so the name leaves it out.
        within = f"{self._names[owner]}.{placed.body}" if owner in self._names else ""
        self.stems[node] = str(node.target) if op == "input" else stem_of(node, self._names, within)
        module = module_of(node)
        producer = node.args[0] if node.target is operator.getitem else None
        if isinstance(producer, Node) and producer in self._modules:
            module = self._modules[producer]
        elif owner in self._modules and not module[0]:
            module = self._modules[owner]
        self._names[node], self._modules[node] = numbered(self.stems[node], self._used), module
        part = custom_of(node).get(PART, {"of": "", "step": -1})
        return OpName(self._names[node], *module, op, part["of"], part["step"])


def _is_library(path: str) -> bool:
    """Whether a file belongs to torch or is no file, such as generated code."""
    parts = PurePath(path).parts
    if path.startswith("<"):
        return True
    return "site-packages" in parts and parts[parts.index("site-packages") + 1] in _LIBRARIES


def custom_of(node: Node) -> dict[str, Any]:
    """What torch and torchao copy to new nodes: the handle, and pt2qa's other notes."""
    custom = node.meta.get(CUSTOM)
    return custom if isinstance(custom, dict) else {}


def is_decomposed(node: Node) -> bool:
    """Whether only ``run_decompositions`` writes such an op: a model calls conv2d, linear and batch_norm."""
    if node.op != "call_function":
        return False
    op = op_of(node.target).strip("_")
    return op in _DECOMPOSED or (op in _PRODUCTS and module_of(node)[1] == "Linear")


def is_quantization(node: Node) -> bool:
    """Whether a node is an op of quantization by its name, which a captured model may have too."""
    return node.op == "call_function" and op_of(node.target).startswith(_QUANTIZATION)


_Exported = TypeVar("_Exported", GraphModule, ExportedProgram)


def copy_to_edit(given: _Exported) -> _Exported:
    """A copy that shares the parameters, whose values are not to be changed; buffers are copied.

    ``prepare`` and quantizers set new parameters where they need other values, as to fold a batch norm.
    """
    held = given.parameters() if isinstance(given, GraphModule) else given.state_dict.values()
    return copy.deepcopy(given, {id(each): each for each in held if isinstance(each, nn.Parameter)})


def copy_nodes(graph_module: GraphModule) -> GraphModule:
    """A copy whose nodes can be edited, those of nested graphs too; all parameters and buffers are shared."""
    copied = GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    copied.meta.update(graph_module.meta)
    for name, nested in list(copied.named_children()):
        if isinstance(nested, GraphModule):
            setattr(copied, name, copy_nodes(nested))
    return copied


def copy_without_values(graph_module: GraphModule) -> GraphModule:
    """A copy whose parameters and buffers are on the meta device, for edits that depend on no value."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in graph_module.buffers()}
    for parameter in graph_module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(graph_module, memo)


def share_constants(graph_module: GraphModule, like: GraphModule) -> None:
    """Gives a graph the constants of another where they are equal, in place, so that each is in memory once."""
    known = grouped((_key(constant), constant) for constant in _constants(like).values())
    for target, constant in _constants(graph_module).items():
        equal = next((each for each in known.get(_key(constant), ()) if torch.equal(each, constant)), None)
        if equal is not None:
            module, _, name = target.rpartition(".")
            setattr(graph_module.get_submodule(module), name, equal)


def _constants(graph_module: GraphModule) -> dict[str, Tensor]:
    """What the graph reads of the module, but for parameters, by name."""
    targets = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    read = {target: operator.attrgetter(target)(graph_module) for target in sorted(targets)}
    return {target: x for target, x in read.items() if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)}


def _key(constant: Tensor) -> Any:
    return constant.dtype, constant.shape, constant.stride(), constant.device, str(constant.flatten()[:64].tolist())
