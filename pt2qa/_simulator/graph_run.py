"""Runs a graph node by node, with no more float weights in memory than one op reads."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Interpreter, Node

from pt2qa._graph.internals.nodes import calls_guards
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.lifetimes import memory_of
from pt2qa._simulator.quant_pieces import call_op


class GraphRun(Interpreter):
    """Runs a graph in the order of :func:`run_order`, without its guards; ``run`` takes and returns flat values."""

    def __init__(self, graph_module: GraphModule, visit: Callable[[Node, Any], Any] = lambda node, value: None) -> None:
        super().__init__(graph_module)
        self._visit = visit

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        instead = self._visit(n, value)
        return value if instead is None else instead

    def run(self, *values: Any) -> Any:  # type: ignore[override]
        """Runs the graph; each value is released after its last reader."""
        return deque(self.steps(*values), maxlen=1).pop()

    def steps(self, *values: Any) -> Iterator[Any]:
        """The value of each node as it is computed, that of the output last."""
        order = run_order(self.graph)
        last = {source: node for node in order for source in node.all_input_nodes}
        releases: dict[Node, list[Node]] = defaultdict(list)
        for source, node in last.items():
            releases[node].append(source)
        self.env, self.args_iter = {}, iter(values)
        for node in order:
            raise_if_interrupted()
            self.env[node] = self.run_node(node)
            yield self.env[node]
            for source in releases[node]:
                del self.env[source]

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_op(target, *args, **kwargs)


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
