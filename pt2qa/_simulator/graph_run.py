"""Runs a graph node by node, with no more float weights in memory than one op reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from pt2qa._graph.internals.nodes import calls_guards
from pt2qa._graph.internals.torch import QUANTIZED_DECOMPOSED
from pt2qa._grouping import grouped
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._metrics import CHUNK
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.lifetimes import memory_of
from pt2qa._simulator.strides import flat, is_plain
from pt2qa.errors import BatchError


class GraphRun(Interpreter):
    """Runs a graph in the order of :func:`run_order`, without its guards; ``run`` takes and returns flat values."""

    def __init__(self, graph_module: GraphModule, visit: Callable[[Node, Any], Any] = lambda node, value: None) -> None:
        super().__init__(graph_module)
        self._visit = visit

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except IndexError as error:
            raise out_of_range(n.name, error) from error
        instead = self._visit(n, value)
        return value if instead is None else instead

    def run(self, *values: Any) -> Any:  # type: ignore[override]
        """Runs the graph; each value is released after its last reader."""
        return deque(self.steps(*values), maxlen=1).pop()

    def steps(self, *values: Any) -> Iterator[Any]:
        """The value of each node as it is computed, that of the output last."""
        order = run_order(self.graph)
        last = {source: node for node in order for source in node.all_input_nodes}
        releases = grouped((node, source) for source, node in last.items())
        self.env, self.args_iter = {}, iter(values)
        for node in order:
            raise_if_interrupted()
            self.env[node] = self.run_node(node)
            yield self.env[node]
            for source in releases[node]:
                del self.env[source]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_op(target, *args, **kwargs)


def out_of_range(name: str, error: IndexError) -> BatchError:
    """What an op says of an index that its table does not have, as an error of the batch."""
    return BatchError(f"the batch has an index, at {name}, that the model has no entry for: {error}. Check its ids.")


def run_order(graph: Graph) -> list[Node]:
    """The nodes of a graph but its guards; a constant is dequantized right before the first op that reads it.

    Exported graphs read all constants first, and dequantize them there: a float copy of all weights at once.
    """
    written = {memory_of(node) for node in graph.nodes if op_rules.mutates_first_argument(node.target)}
    order: list[Node] = []
    waiting: set[Node] = set()

    def append(node: Node) -> None:
        for source in node.all_input_nodes:
            if source in waiting:
                waiting.remove(source)
                append(source)
        order.append(node)

    for node in graph.nodes:
        if quant_ops.is_quantization(node) and all(
            source in waiting or (source.op == "get_attr" and memory_of(source) not in written)
            for source in node.all_input_nodes
        ):
            waiting.add(node)
        elif not calls_guards(node):
            append(node)
    return order


_PER_TENSOR: Final = frozenset(
    getattr(op, overload)
    for op in (QUANTIZED_DECOMPOSED.quantize_per_tensor, QUANTIZED_DECOMPOSED.dequantize_per_tensor)
    for overload in ("default", "tensor")
)
_PER_CHANNEL: Final = frozenset(
    {QUANTIZED_DECOMPOSED.quantize_per_channel.default, QUANTIZED_DECOMPOSED.dequantize_per_channel.default}
)


def call_op(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an op of a graph returns; computed in pieces if it quantizes or dequantizes a large value.

    Each op is half a dozen passes over memory that is new each time; of a piece, all of them are in cache.  Every step
    (multiplication, rounding, sum, clamp, cast) is exact or correctly rounded for each element by itself, so the bits
    are those of the whole value, and so are the strides of a plain one.
    """
    value, *params = args or (None,)
    if not isinstance(value, Tensor) or value.numel() <= CHUNK or not is_plain(value):
        return function(*args, **kwargs)
    by_channel = function in _PER_CHANNEL and _has_channels_first(value, params)
    if not by_channel and function not in _PER_TENSOR:
        return function(*args, **kwargs)
    size = max(1, CHUNK // value[0].numel()) if by_channel else CHUNK
    result: Tensor | None = None
    for start in range(0, len(value) if by_channel else value.numel(), size):
        piece = slice(start, start + size)
        own = [each[piece] if by_channel and isinstance(each, Tensor) else each for each in params]
        made = function((value if by_channel else flat(value))[piece], *own, **kwargs)
        if result is None:
            result = value.new_empty_strided(value.shape, value.stride(), dtype=made.dtype)
        (result if by_channel else flat(result))[piece].copy_(made)
    return result


def _has_channels_first(value: Tensor, params: Sequence[Any]) -> bool:
    """Whether each channel is one block of memory and has a scale and a zero point of its own."""
    scales, zero_points, axis, *_ = params
    return axis == 0 and value.is_contiguous() and len(scales) == len(zero_points) == len(value)
