"""The converted graph with the dynamic scales of the backend's kernels, where they are finer than its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch.fx import GraphModule, Node

from pt2qa._graph.handles import copy_nodes, op_of
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._report.notes import Note
from pt2qa._report.prose import counted
from pt2qa._simulator import quant_ops
from pt2qa._simulator.slice_ops import choose_qparams_per_slice, dequantize_per_slice, quantize_per_slice
from pt2qa.plugins.registry import of_backend

SLICES = {(-1,): "row", (-3,): "pixel", (-3, -2, -1): "image"}


@dataclass(frozen=True, slots=True)
class SlicedInput:
    """An input with one scale in the converted graph, of which the kernel scales each slice.

    The ops that read it, all of one type, read ``dequantize``; ``axes`` are those of a slice, counted from the last.
    """

    source: Node
    dequantize: Node
    op: str
    axes: tuple[int, ...]

    @property
    def slices(self) -> int | None:
        """How many slices the traced value has; None if that depends on the batch."""
        value = self.source.meta.get(VALUE)
        if value is None:
            return None
        sizes = [size for axis, size in enumerate(value.shape, -value.dim()) if axis not in self.axes]
        return prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def sliced_inputs(graph_module: GraphModule, plugin: Any) -> tuple[SlicedInput, ...]:
    """The dynamic inputs of a converted graph to which a plug-in's backend gives a scale for each slice."""
    # A plug-in that does not say has the scales of the converted graph.
    axes_of = of_backend(plugin, "dynamic_axes", lambda node: ())
    found = []
    for node in graph_module.graph.nodes:
        quantize = node.args[0] if quant_ops.is_dequantize(node) else None
        if not isinstance(quantize, Node) or not quant_ops.is_dynamic_per_tensor(quantize):
            continue
        source, choose = quantize.args[0], quant_ops.chosen_by(quantize)
        readers = {(op_of(reader.target), tuple(axes_of(reader))) for reader in node.users}
        if choose is None or not isinstance(source, Node) or len(readers) != 1:
            continue
        ((op, axes),) = readers
        if axes:
            found.append(SlicedInput(source, node, op, axes))
    return tuple(found)


def difference_note(inputs: Sequence[SlicedInput]) -> str:
    """What the converted graph computes otherwise than the kernels; empty if each input is a single slice."""
    told = _count([given for given in inputs if given.slices != 1])
    here = "where this graph has one for the tensor; pair.as_deployed() simulates the kernels"
    return Note(f"{told}, {here}", "kernels") if told else ""


def deployed_note(inputs: Sequence[SlicedInput]) -> str:
    return f"as deployed: {_count(inputs)}, as does this simulation; convert_pt2e has one for the tensor"


def _count(inputs: Sequence[SlicedInput]) -> str:
    kinds = {(given.op, given.axes) for given in inputs}
    slices = " and ".join(sorted({f"each {SLICES.get(axes, 'slice')} of the input of a {op}" for op, axes in kinds}))
    return f"the backend's kernels have a scale for {slices} ({counted(len(inputs), 'input')})" if inputs else ""


def with_slices(graph_module: GraphModule, plugin: Any) -> tuple[GraphModule, Mapping[str, str]]:
    """A copy of a converted graph in which dynamic inputs are quantized slice by slice, as the kernels do it.

    With it, by the name of each node that both graphs have, its name in the converted one.
    """
    result = copy_nodes(graph_module)
    copied = dict(zip(result.graph.nodes, (node.name for node in graph_module.graph.nodes), strict=True))
    made: dict[tuple[Node, tuple[int, ...]], tuple[Node, ...]] = {}
    for given in sliced_inputs(result, plugin):
        _slice(given, made)
    result.graph.eliminate_dead_code()
    result.recompile()
    return result, {node.name: copied[node] for node in result.graph.nodes if node in copied}


def _slice(given: SlicedInput, made: dict[tuple[Node, tuple[int, ...]], tuple[Node, ...]]) -> None:
    """Gives a dequantize node the parameters of slices, in place; inputs that are quantized together stay so."""
    old = given.dequantize
    quantize = old.args[0]
    assert isinstance(quantize, Node)
    limits = quantize.args[3:]
    graph = old.graph
    if (quantize, given.axes) not in made:
        with graph.inserting_before(quantize):
            chosen = graph.call_function(choose_qparams_per_slice, (quantize.args[0], list(given.axes), *limits[:2]))
            params = tuple(graph.call_function(operator.getitem, (chosen, part)) for part in (0, 1))
            new = graph.call_function(quantize_per_slice, (quantize.args[0], *params, list(given.axes), *limits))
        new.meta |= quantize.meta
        made[quantize, given.axes] = (new, *params)
    new, *params_ = made[quantize, given.axes]
    with graph.inserting_before(old):
        replacement = graph.call_function(dequantize_per_slice, (new, *params_, list(given.axes), *limits))
    replacement.meta |= old.meta
    old.replace_all_uses_with(replacement)
