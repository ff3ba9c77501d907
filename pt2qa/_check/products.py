"""The ops that multiply matrices: how much of each is quantized and how, and those that multiply integers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.handles import OpName, name_of, op_of, walk
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._graph.internals.torch import pytree, size_hint, sizes_of
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.accumulate import limits
from pt2qa._simulator.products import (
    PRODUCTS,
    WEIGHTED,
    FlopCounter,
    Read,
    State,
    own_multiply_adds,
    reads_of,
    state_of,
)
from pt2qa._simulator.program import Constant, Program, QuantParams, Site, Slot, Step
from pt2qa._weights.analysis import params_of
from pt2qa._weights.sums import SumsOfWeights
from pt2qa.overrides import points
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.points import COMPARED, Point, root_of


@dataclass(frozen=True, slots=True)
class Product:
    """An op that multiplies matrices.

    Attributes:
        macs: its multiply-adds for the example inputs.
        share: its share of the model's multiply-adds, 0..1.
        owner: name of the higher-order op whose nested graph contains it; empty at the top.
        annotated: whether the quantizer annotated it; None if no annotation is known.
        state: which of its operands are rounded: all, its input, its weight, none.
    """

    name: str
    op: str
    node: Node
    macs: int
    share: float
    owner: str
    annotated: bool | None
    state: State


def products_of(
    graph: GraphModule, names: Mapping[int, OpName], annotations: Annotations | None, converted: Program | None
) -> tuple[Product, ...]:
    """The ops of a float graph and its nested graphs that multiply something by an activation, in graph order.

    What is rounded follows from the annotations or, in a converted graph, from its sites.
    """
    if converted is not None:
        read = [(step.name, step.op, reads) for step, reads in reads_of(converted, nested=True)]
    else:
        read = [] if annotations is None else list(_annotated_reads(annotations))
    states = {name: state_of(op, reads) for name, op, reads in read}
    annotated = None if annotations is None else annotations.ops.keys()
    found: list[tuple[str, Node, int, str]] = []
    for placed in walk(graph):
        node, name = placed.node, name_of(placed.node, names)
        if node.op == "call_function" and name is not None and op_of(node.target) in PRODUCTS:
            inside = "" if placed.owner is None else name_of(placed.owner, names) or ""
            found.append((name, node, multiply_adds(node), inside))
    total = sum(macs for _, _, macs, _ in found) or 1
    products = []
    for name, node, macs, owner in found:
        known = None if annotated is None else name in annotated
        state = states.get(name, "float")
        if known is False and state == "quantized":
            # The ops before it may still round their outputs.
            state = "input only" if any(source.op == "get_attr" for source in node.all_input_nodes) else "float"
        products.append(Product(name, op_of(node.target), node, macs, macs / total, owner, known, state))
    return tuple(products)


def multiply_adds(node: Node) -> int:
    """The multiply-adds of a matrix product for the sizes it was traced with, by torch's formulas or our own."""
    args, kwargs = pytree.tree_map_only(Node, lambda source: source.meta.get(VALUE), (node.args, node.kwargs))
    args, kwargs = pytree.tree_map(_sized, (args, kwargs))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    op = op_of(node.target)
    if len(tensors) < 2:
        return 0
    own = own_multiply_adds(op, tensors)
    if own is not None:
        return own
    assert callable(node.target)
    counter = FlopCounter()
    with torch.no_grad(), counter:
        try:
            node.target(*args, **kwargs)
        except RuntimeError:
            # A data-dependent size counts as 1, which may be too small for the op: its share is unknown.
            return 0
    return counter.total // 2


def _sized(value: Any) -> Any:
    """A traced value without data and without symbolic sizes, so that counting adds no guard to a program."""
    if isinstance(value, Tensor):
        return torch.empty(sizes_of(value), dtype=value.dtype, device="meta")
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _annotated_reads(annotations: Annotations) -> Iterator[tuple[str, str, tuple[Read, ...]]]:
    """Name and type of each op with what it reads, rounded as a quantizer annotated it."""
    nodes = annotations.graph.nodes
    for node in nodes.values():
        specs = {source: spec_read(annotations, source, node.key) for source in node.inputs}
        reads = [Read(at, nodes[source].constant, specs[source] is not None) for source, at in node.inputs.items()]
        yield node.name, node.op, tuple(reads)


def own_spec(annotations: Annotations, point: Point) -> Any | None:
    """The spec that a point resolves to; None if it has none, leads nowhere, or rounds nothing."""
    root = root_of(annotations.specs, point)
    if root is None or not points.is_quantized(annotations.specs[root], annotations.graph.nodes[point[0]]):
        return None
    return points.own_spec(annotations.specs[root])


def spec_read(annotations: Annotations, source: str, reader: str) -> Any | None:
    """The spec with which an op reads a value; None if it reads it in float.  Both go by their fx names."""
    for point in ((source, reader), (source, "")):
        if (spec := own_spec(annotations, point)) is not None:
            return spec
    # A constant may be rounded before it is reshaped.
    node = annotations.graph.nodes[source]
    deeper = node.inputs if node.constant else ()
    return next((spec for one in deeper if (spec := spec_read(annotations, one, source)) is not None), None)


def differing(one: Any, other: Any) -> tuple[str, ...]:
    """The attributes of :data:`COMPARED` in which two specs differ."""
    return tuple(name for name in COMPARED if getattr(one, name, None) != getattr(other, name, None))


FEW_CHANNELS = 0.1
"""Share of a weight's channels up to which their rounding moves the layer's output by little."""


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """A convolution or linear whose weight is quantized to integers with known scales; computed on the CPU.

    ``bias_params`` and ``input_params`` are None if these stay float, ``channel_axis`` is that of the weight's output
    channels.  ``output_scale`` is the largest scale with which its output is rounded, directly or after elementwise ops
    and ops that move values; nan if it stays float or each batch sets the scale.
    """

    name: str
    weight: Constant
    weight_params: QuantParams
    channel_axis: int
    bias: Constant | None
    bias_params: QuantParams | None
    input_params: QuantParams | None
    output_scale: float
    sums: SumsOfWeights

    @property
    def weights(self) -> Tensor:
        """The float weights, output channels first, each channel flat: float32 of shape (channels, rest)."""
        weight: Tensor = self.weight.reference
        return weight.detach().movedim(self.channel_axis, 0).flatten(1)

    @property
    def scales(self) -> Tensor:
        """One weight scale for each output channel: float64 of shape (channels,)."""
        scale = torch.as_tensor(self.weight_params.scale).cpu().double().flatten()
        return scale.expand(self.weight.reference.shape[self.channel_axis]) if scale.numel() == 1 else scale

    @property
    def integers(self) -> Tensor:
        """The integer weights, zero point subtracted: float64 of the weight's shape, output channels first."""
        moved = self.weight.quantized.detach().cpu().double().movedim(self.channel_axis, 0)
        return torch.round(moved / self.scales.view(-1, *[1] * (moved.dim() - 1)))

    @property
    def largest(self) -> Tensor:
        """The largest absolute weight of each output channel: float64 of shape (channels,)."""
        return self.sums.of(self.weight, self.channel_axis).largest.cpu()

    @property
    def zero(self) -> Tensor:
        """Whether all integers of each output channel are zero: booleans of shape (channels,)."""
        return self.sums.of(self.weight, self.channel_axis).zero.cpu()

    @property
    def visible(self) -> Tensor:
        """Whether each output channel can change the rounded output: booleans of shape (channels,).

        A channel whose ``sum(|w|) * max(|x|)`` stays below half a step of the output adds nothing but its bias to it,
        quantized or not: pretrained models have such channels where training switched a batch norm off.  All are
        visible if the range of the input or the scale of the output is unknown.
        """
        if self.input_params is None or math.isnan(self.output_scale):
            return torch.ones(len(self.weights), dtype=torch.bool)
        input_reach = max(abs(end) for end in limits(self.input_params))
        # One weight may suffice, so that few channels are read again.
        hidden = self.largest * input_reach < self.output_scale / 2
        reach = self.weights[hidden].cpu().double().abs().sum(1) * input_reach
        hidden[hidden.clone()] = reach < self.output_scale / 2
        return ~hidden


def integer_products(pair: QuantizedPair, sums: SumsOfWeights) -> tuple[IntegerProduct, ...]:
    """The convolutions and linears of a pair with quantized weights, in graph order."""
    constants = {constant.slot: constant for constant in pair.program.constants}
    readers = pair.program.readers()
    found = (_product(pair, step, constants, readers, sums) for step in pair.program.steps if step.op in WEIGHTED)
    return tuple(product for product in found if product is not None)


def _product(
    pair: QuantizedPair,
    step: Step,
    constants: Mapping[int, Constant],
    readers: Mapping[int, Sequence[Step]],
    sums: SumsOfWeights,
) -> IntegerProduct | None:
    slots = [part.number if isinstance(part, Slot) else -1 for part in (*step.args, None, None)][:3]
    weight, bias = constants.get(slots[1]), constants.get(slots[2])
    params = params_of(pair, weight)
    if weight is None or params is None or params.scale is None or not isinstance(weight.reference, Tensor):
        return None
    # The op for all convolutions has an argument for transposing.
    axis = int("transpose" in step.op or (step.op == "convolution" and bool(step.args[6])))
    if params.axis not in (None, axis) or params.block:
        return None
    given = next((site.params for site in pair.sites if site.result == slots[0]), None)
    scale = _output_scale(step, readers, pair.sites)
    return IntegerProduct(step.name, weight, params, axis, bias, params_of(pair, bias), given, scale, sums)


def _output_scale(step: Step, readers: Mapping[int, Sequence[Step]], sites: Sequence[Site]) -> float:
    """The largest scale among the sites reached without another product; nan without any."""
    scales, seen, open_slots = [], {step.out}, [step.out]
    while open_slots:
        for reader in readers.get(open_slots.pop(), []):
            if reader.site is not None:
                scales.append(sites[reader.site].params.largest_scale)
            elif reader.op not in WEIGHTED and reader.out not in seen:
                seen.add(reader.out)
                open_slots.append(reader.out)
    return max((scale for scale in scales if not math.isnan(scale)), default=math.nan)
