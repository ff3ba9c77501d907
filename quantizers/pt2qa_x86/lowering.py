"""From a converted graph to oneDNN's int8 kernels, and a walk over the lowered graph.

Inductor compiles the lowered graph: it calls the same oneDNN kernels and generates code for the ops between them.  A
walk node by node calls them without a compiler, and sees each value.

Imported when a model is lowered, since torch takes long to import.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2qa.errors import DeploymentError
from pt2qa.plugins import Ran, handle_of, onednn_has_vnni, op_type, ops_by_name
from pt2qa_x86.backend import NOT_SAVED
from pt2qa_x86.internals import argument, kernel_of, lowered_graph, mark_of, op_of, written

_QUANTIZE = "quantized_decomposed::quantize_per_tensor"


@dataclass(frozen=True)
class X86Program:
    """A lowered model; see :class:`pt2qa.plugins.DeployedProgram`.

    Attributes:
        graph: the converted graph, with marks.
        wanted: names of the nodes to observe.
        first: what was lowered for the example batch.
    """

    graph: GraphModule = field(repr=False)
    wanted: tuple[str, ...]
    first: Lowered = field(repr=False)
    _others: dict[tuple[Any, ...], Lowered] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def taps(self) -> Mapping[str, str]:
        """Why each tap cannot be observed; empty for those that can."""
        return {name: self.first.lost.get(name, "") for name in self.wanted}

    @property
    def delegated(self) -> frozenset[int]:
        """Handles of the ops that oneDNN's quantized kernels compute."""
        return self.first.delegated

    @property
    def facts(self) -> tuple[str, ...]:
        """What ran: instruction set, kernels, batch shapes."""
        kernels = ", ".join(f"{name} ({count})" for name, count in self.first.kernels.items()) or "none"
        left = ", ".join(f"{op} ({count})" for op, count in self.first.in_float.items()) or "none"
        return (
            instruction_set(),
            f"oneDNN kernels, as torch.compile with freezing calls them: {kernels}; all other ops run in ATen's "
            "kernels, where Inductor would compile them",
            f"ops with quantized weights that stay in float: {left}",
            f"lowered for each shape of the inputs: {1 + len(self._others)}",
        )

    def run(self, inputs: Sequence[Any]) -> Ran:
        """Walks over the lowered graph, which is made anew for inputs of other shapes."""
        lowered = self._lowered_for(inputs)
        outputs, values = lowered.run(inputs)
        return Ran(outputs, values)

    def save(self, folder: Path) -> None:
        """Refuses."""
        raise DeploymentError(f"{folder}: {NOT_SAVED}")

    def _lowered_for(self, inputs: Sequence[Any]) -> Lowered:
        shape = _shape_of(inputs)
        if shape == self.first.shape:
            return self.first
        if shape not in self._others:
            found = lowered_for(self.graph, inputs, self.wanted)
            if found.lost != self.first.lost:
                changed = sorted(name for name, _ in found.lost.items() ^ self.first.lost.items())
                raise DeploymentError(
                    f"inputs of shape {_sizes(inputs)}: Inductor fuses other ops than for the example batch: "
                    f"{', '.join(changed)}. Give batches of one shape"
                )
            self._others[shape] = found
        return self._others[shape]


def lower(graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str]) -> X86Program:
    """See :meth:`pt2qa.plugins.Backend.lower`.

    Args:
        graph: the converted graph with marks, by which ``taps`` name its nodes.
        inputs: an example batch, flat.
        taps: the nodes to observe.
    """
    return X86Program(graph, tuple(taps), lowered_for(graph, inputs, taps))


def instruction_set() -> str:
    """The instructions with which oneDNN multiplies int8 here."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    said = (
        "with VNNI" if onednn_has_vnni() else "without VNNI: sums of two products of uint8 and int8 saturate at 16 bits"
    )
    which = f"oneDNN limited to {limit}" if limit else torch.backends.cpu.get_cpu_capability()
    return f"instruction set: {which}, {said}"


# -- one shape of the inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lowered:
    """A model lowered for inputs of one shape.

    Attributes:
        shape: of the inputs.
        module: the lowered graph.
        nodes: by tap, the node that has its value.
        lost: by tap, why it has no value.
        delegated: handles of the ops that oneDNN's kernels compute.
        kernels: how often each of them is called.
        in_float: how many ops of each type have quantized weights and no such kernel.
    """

    shape: tuple[Any, ...]
    module: GraphModule
    nodes: Mapping[str, Node]
    lost: Mapping[str, str]
    delegated: frozenset[int]
    kernels: Mapping[str, int]
    in_float: Mapping[str, int]

    def run(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """Outputs, and the observed values by tap."""
        return _walked(self.module, self.nodes, inputs, lambda value: value)


def lowered_for(graph: GraphModule, inputs: Sequence[Any], taps: Sequence[str]) -> Lowered:
    """Lowers a converted graph, and finds the taps in it.

    Raises:
        DeploymentError: torchao cannot lower it, or the lowered graph does not run.
    """
    try:
        with torch.no_grad():
            module = lowered_graph(graph, inputs)
    except Exception as error:
        raise DeploymentError(
            f"torchao could not lower the model for x86: {type(error).__name__}: {str(error) or 'no message'}"
        ) from error
    marks = _Marks(graph, module)
    found = {name: marks.find(name) for name in taps}
    lost = {name: node for name, node in found.items() if isinstance(node, str)}
    nodes = {name: node for name, node in found.items() if isinstance(node, Node)}
    lost |= _misfits(graph, inputs, module, nodes)
    nodes = {name: node for name, node in nodes.items() if name not in lost}
    kernels = [node for node in module.graph.nodes if kernel_of(node)]
    handles = frozenset(handle for node in kernels for handle in marks.replaced_by(node))
    left = Counter(
        op_type(node) for node in graph.graph.nodes if _has_quantized_weights(node) and handle_of(node) not in handles
    )
    return Lowered(_shape_of(inputs), module, nodes, lost, handles, Counter(map(kernel_of, kernels)), left)


def _misfits(
    graph: GraphModule, inputs: Sequence[Any], module: GraphModule, nodes: Mapping[str, Node]
) -> dict[str, str]:
    """Taps whose value in the lowered graph has another shape or type than in the converted one."""
    original = {name: node for node in graph.graph.nodes if (name := mark_of(node)) in nodes}
    _, wanted = _walked(graph, original, inputs, _kind)
    _, kinds = _walked(module, nodes, inputs, _kind)
    return {
        name: f"the lowered graph has {_said(kinds[name])} for it, the converted one {_said(wanted[name])}"
        for name in nodes
        if kinds[name] != wanted[name]
    }


def _kind(value: Any) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else type(value)


def _said(kind: Any) -> str:
    return f"{str(kind[0]).removeprefix('torch.')} of shape {kind[1]}" if isinstance(kind, tuple) else kind.__name__


def _shape_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((tuple(each.shape), each.dtype) if isinstance(each, Tensor) else each for each in inputs)


def _sizes(inputs: Sequence[Any]) -> str:
    return ", ".join(str(tuple(each.shape)) for each in inputs if isinstance(each, Tensor))


def _walked(
    module: GraphModule, nodes: Mapping[str, Node], inputs: Sequence[Any], keep: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A graph's outputs, and what ``keep`` makes of the values of some nodes, by name."""
    walk = _Walk(module, nodes, keep)
    with torch.no_grad():
        outputs = walk.run(*inputs, enable_io_processing=False)
    return tuple(outputs), walk.kept


class _Walk(Interpreter):
    """Runs a graph node by node; what an op writes to is copied first, so that every value stays what it was.

    A weight is dequantized for the first op that reads it, since graphs dequantize all of them first.
    """

    def __init__(self, module: GraphModule, nodes: Mapping[str, Node], keep: Callable[[Any], Any]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._nodes, self._wanted = nodes, set(nodes.values())
        self._kept = dict[Node, Any]()
        self._keep = keep

    @property
    def kept(self) -> dict[str, Any]:
        return {name: self._kept[node] for name, node in self._nodes.items()}

    def run_node(self, n: Node) -> Any:
        if n not in self._wanted and _is_weight(n):
            return None
        for weight in n.all_input_nodes:
            if _is_weight(weight) and self.env[weight] is None:
                for each in (*weight.all_input_nodes, weight):
                    self.env[each] = super().run_node(each)
        value = super().run_node(n)
        if n in self._wanted:
            self._kept[n] = self._keep(value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = written(target)
        args = tuple(_copied(each) if number in positions else each for number, each in enumerate(args))
        try:
            return target(*args, **kwargs)
        except Exception as error:
            raise DeploymentError(f"{target} failed on these inputs: {type(error).__name__}: {error}") from error


def _copied(value: Any) -> Any:
    """A copy as oneDNN wants it: contiguous, with the channels last in images."""
    if not isinstance(value, Tensor):
        return value
    return value.clone(memory_format=torch.channels_last if value.dim() == 4 else torch.contiguous_format)


# -- which node of the lowered graph has which value -------------------------------------------------------------------


class _Marks:
    """Finds the nodes of a converted graph again in the lowered one."""

    def __init__(self, graph: GraphModule, module: GraphModule) -> None:
        self._original = {name: node for node in graph.graph.nodes if (name := mark_of(node))}
        self._names = {op.node: name for name, op in ops_by_name(graph).items()}
        self._lowered: dict[str, list[Node]] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and (name := mark_of(node)) in self._original:
                self._lowered.setdefault(name, []).append(node)
        placeholders = (each.graph.find_nodes(op="placeholder") for each in (module, graph))
        self._same: dict[Node, Node] = dict(zip(*placeholders, strict=True))
        self._before: dict[Node, int] = {}
        for number, node in enumerate(graph.graph.nodes):
            self._before[node] = reduce(or_, map(self._before.__getitem__, node.all_input_nodes), 1 << number)

    def find(self, name: str) -> Node | str:
        """The node that has the value of a converted graph's node, or why there is none."""
        original = self._original[name]
        nodes = self._lowered.get(name, [])
        if not nodes:
            return self._where(original)
        # An op that was decomposed has its mark on all parts; the last one has its value. Copies of a node are equal.
        last = [node for node in nodes if not any(mark_of(user) == name for user in node.users)]
        if len({(node.target, str(node.args), str(node.kwargs)) for node in last}) != 1:
            return "the lowered graph computes it in several parts"
        node = last[0]
        if _differs(original, node):
            return "the lowered graph rounds it with another scale"
        if not self._reads_the_same(original, node):
            return "the lowered graph computes it from other values"
        return node

    def replaced_by(self, kernel: Node) -> list[int]:
        """Handles of the ops that a fused kernel computes: from its value up to those that are still there."""
        ops = [self._original[name]] if (name := mark_of(kernel)) in self._original else []
        for op in ops:
            ops += [node for node in op.all_input_nodes if mark_of(node) not in self._lowered and node not in ops]
        return [handle for op in ops if (handle := handle_of(op)) is not None]

    def _where(self, original: Node) -> str:
        """Which ops' kernels compute a node on the way."""
        found, queue, seen = dict[str, None](), list(original.users), set[Node]()
        for node in queue:
            if node in seen:
                continue
            seen.add(node)
            if mark_of(node) not in self._lowered:
                queue += node.users
                continue
            op = node.all_input_nodes[0] if op_of(node) == _QUANTIZE else node
            name = self._names.get(op, op.name)
            found["its kernel returns it rounded" if op is original else f"the kernel of {name} computes it"] = None
        return " and ".join(found) or "the lowered graph does not compute it"

    def _reads_the_same(self, original: Node, node: Node) -> bool:
        """Whether a node is computed from nothing but what the original reads, and from all of it."""
        parts, constant, sources = [node], False, list[Node]()
        for part in parts:
            for each in part.all_input_nodes:
                constant |= each.op == "get_attr"
                if each in self._same:
                    sources.append(self._same[each])
                elif mark_of(each) in self._original and mark_of(each) != mark_of(node):
                    sources.append(self._original[mark_of(each)])
                elif each not in parts:
                    parts.append(each)
        return all(self._is_before(source, original) for source in sources) and all(
            any(self._is_before(source, each) for source in sources) or (constant and _is_constant(each))
            for each in original.all_input_nodes
        )

    def _is_before(self, source: Node, node: Node) -> bool:
        """Whether a node is another one or computed from it."""
        return self._before[source] & self._before[node] == self._before[source]


def _differs(original: Node, node: Node) -> bool:
    """Whether a node rounds with another scale or zero point than the original, where these are numbers."""
    if op_of(original) != _QUANTIZE:
        return False
    wanted = argument(original, "scale"), argument(original, "zero_point")
    if kernel_of(node):
        return (argument(node, "output_scale"), argument(node, "output_zero_point")) != wanted
    found = argument(node, "scale"), argument(node, "zero_point")
    return op_of(node) == _QUANTIZE and not isinstance(wanted[0], Node) and found != wanted


def _has_quantized_weights(node: Node) -> bool:
    weights = [each for each in node.all_input_nodes if each.op == "call_function" and _is_constant(each)]
    return handle_of(node) is not None and any(op_of(each).startswith("quantized_decomposed::") for each in weights)


def _is_weight(node: Node) -> bool:
    """Whether a node dequantizes a constant."""
    return op_of(node).startswith("quantized_decomposed::dequantize") and all(
        each.op == "get_attr" for each in node.all_input_nodes
    )


def _is_constant(node: Node) -> bool:
    """Whether a node depends on no input."""
    return node.op == "get_attr" or (node.op == "call_function" and all(map(_is_constant, node.all_input_nodes)))
