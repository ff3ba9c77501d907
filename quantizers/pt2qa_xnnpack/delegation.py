"""Asks XNNPACK's partitioner which ops of a converted graph it leaves to portable kernels.

To bring a whole model to the edge dialect takes five times as long as to quantize it. What the partitioner takes
depends on an op, its arguments, and the rank and dtype of what it reads. So it is asked about a program that has each
such op once in a process, side by side, for the sizes of the example inputs; that takes a second or two. Nothing is
compiled.
Products with quantized weights depend on what is around them, and have a rule of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from pt2qa.plugins import DoesNotApplyError
from pt2qa_xnnpack.internals import captured_size, executorch_release, is_delegated, op_name, value_of
from pt2qa_xnnpack.plugin import PRODUCTS

_INPUT = "read_by_op_"
"""How the inputs of the program that is asked about are called, apart from its constants."""

_answers: dict[str, tuple[str, ...]] = {}
"""By what the partitioner looks at, the kernels that compute what it leaves; nothing of it changes in a process."""


@dataclass(frozen=True, slots=True)
class Undelegated:
    """An op between delegated ones that XNNPACK does not take as a whole; ``kernels`` compute what it leaves."""

    name: str
    kernels: tuple[str, ...]


def undelegated_ops(program: Any, quantized: GraphModule) -> Iterator[Undelegated]:
    """The ops of a lowered graph that XNNPACK leaves, and that read something of a delegate and are read by one.

    Args:
        program: the :class:`pt2qa._simulator.program.Program` of a pair.
        quantized: the converted graph that it was lowered from.
    """
    values = _values(program, quantized)
    constants = {constant.slot for constant in program.constants}
    asked = {step.index: _key(step, values, constants) for step in program.steps if _is_asked(step, program, values)}
    first = {key: program.steps[index] for index, key in reversed(asked.items()) if key not in _answers}
    if first:
        _answers.update(zip(first, _kernels(list(first.values()), program, values), strict=True))
    left = {index for index, key in asked.items() if _answers[key]}
    between = _after(program, left) & _before(program, left)
    yield from (Undelegated(program.steps[index].name, _answers[asked[index]]) for index in sorted(left & between))


def _values(program: Any, quantized: GraphModule) -> dict[int, Any]:
    """A traced value for each slot of a program; a site has that of the value that it rounds."""
    nodes = {node.name: node for node in quantized.graph.nodes}
    found = dict(zip(program.inputs, map(value_of, quantized.graph.find_nodes(op="placeholder")), strict=True))
    # Rounding changes neither dtype nor shape, and the rounded values of all weights are much memory.
    found |= {each.slot: each.stored if each.site is None else each.reference.detach() for each in program.constants}
    for step in program.steps:
        found[step.out] = found[step.reads[0]] if step.site is not None else value_of(nodes[step.node])
    return found


def _is_asked(step: Any, program: Any, values: Mapping[int, Any]) -> bool:
    """Whether the partitioner can say of an op alone whether it takes it."""
    if step.site is not None or not all(isinstance(values[slot], Tensor) for slot in (step.out, *step.reads)):
        return False
    if step.op == "max_pool2d" and len(step.args) < 3 and executorch_release() < (1, 5):
        return False  # the partitioner fails at it: rule xnnpack-pool-stride
    sites = {constant.slot: constant.site for constant in program.constants}
    return step.op not in PRODUCTS or all(sites[slot] is None for slot in step.constants)


def _key(step: Any, values: Mapping[int, Any], constants: Collection[int]) -> str:
    """What the partitioner looks at."""

    def told(slot: int) -> str:
        if not isinstance(values[slot], Tensor):
            return str(values[slot])
        kind = "constant" if slot in constants else "value"
        return f"{kind} {values[slot].dtype} {values[slot].dim()}"

    return f"{step.function} {_filled((step.args, step.kwargs), told)}"


def _filled(part: Any, fill: Callable[[int], Any]) -> Any:
    """Arguments of a step with something in place of each slot, and the CPU in place of each device."""
    if isinstance(part, list | tuple):
        return type(part)(_filled(item, fill) for item in part)
    if isinstance(part, dict):
        return {key: _filled(item, fill) for key, item in part.items()}
    if isinstance(part, torch.device):
        return torch.device("cpu")
    return fill(part.number) if type(part).__name__ == "Slot" else part


def _kernels(steps: list[Any], program: Any, values: Mapping[int, Any]) -> list[tuple[str, ...]]:
    """For each op, the portable kernels that compute what XNNPACK leaves of it; empty if it takes all."""
    root, graph, inputs, results = nn.Module(), Graph(), dict[Node, Tensor](), list[Node]()
    constants = {constant.slot for constant in program.constants}
    for step in steps:

        def source(slot: int) -> Any:
            if not isinstance(values[slot], Tensor):
                return captured_size(values[slot]) if isinstance(values[slot], torch.SymInt) else values[slot]
            if slot in constants:
                root.register_buffer(f"constant_{slot}", values[slot].cpu())
                return graph.get_attr(f"constant_{slot}")
            sizes = [captured_size(size) for size in values[slot].shape]
            node = graph.placeholder(f"{_INPUT}{len(inputs)}")
            inputs[node] = torch.zeros(sizes, dtype=values[slot].dtype)
            return node

        # Inputs come first in a graph, so they are made before the op that reads them.
        with graph.inserting_before(results[0] if results else None):
            args, kwargs = _filled((step.args, step.kwargs), source)
        results.append(graph.call_function(step.function, args, kwargs))
    graph.output(tuple(results))
    # Those of the first op were each put at the front, so the graph takes them in another order.
    given = [inputs[node] for node in graph.find_nodes(op="placeholder")]
    outputs = _partitioned(GraphModule(root, graph), given)
    depending = set[Node]()
    for node in outputs[0].graph.nodes:
        if node.name.startswith(_INPUT) or not depending.isdisjoint(node.all_input_nodes):
            depending.add(node)
    return [tuple(sorted(_left(output, set(depending)))) for output in outputs]


def _left(node: Node, unseen: set[Node]) -> set[str]:
    """The ops outside of delegates from which a value is computed, among those that are unseen; removes them."""
    if node not in unseen:
        return set()
    unseen.remove(node)
    own = set() if is_delegated(node) else {op_name(node)} - {""}
    return own.union(*(_left(source, unseen) for source in node.all_input_nodes))


def _partitioned(graph_module: GraphModule, inputs: list[Tensor]) -> tuple[Node, ...]:
    """The outputs of a graph in the edge dialect, whose nodes know whether the partitioner took them."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    class _Answer(Exception):
        pass

    class _Asked(XnnpackPartitioner):  # type: ignore[misc]  # executorch has no type information
        def partition(self, exported_program: Any) -> Any:
            raise _Answer(super().partition(exported_program).tagged_exported_program.graph.output_node().args[0])

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(graph_module, tuple(inputs))
            to_edge_transform_and_lower(exported, partitioner=[_Asked()])
    except _Answer as answer:
        outputs: tuple[Node, ...] = answer.args[0]
        return outputs
    except Exception as error:
        # Behind this, torch prints the node of the program that is asked about.
        text = " ".join(f"{type(error).__name__}: {error}".split()).partition(" While executing")[0]
        raise DoesNotApplyError(f"to a model with an op that ExecuTorch cannot lower: {text[:200]}") from error
    raise AssertionError("to_edge_transform_and_lower asks its partitioner")


def _after(program: Any, left: set[int]) -> set[int]:
    """The steps that read something that a delegate computes, directly or not."""
    found, reached = set[int](), set[int]()
    for step in program.steps:
        if any(slot in reached for slot in step.reads):
            found.add(step.index)
        if step.index in found or step.index not in left:
            reached.add(step.out)
    return found


def _before(program: Any, left: set[int]) -> set[int]:
    """The steps that a delegate reads, directly or not."""
    found, reached = set[int](), set[int]()
    for step in reversed(program.steps):
        if step.out in reached:
            found.add(step.index)
        if step.index in found or step.index not in left:
            reached.update(step.reads)
    return found
