"""A graph run node by node, as far as asked; a value is kept until its last reader and its last comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2qa._graph.internals.torch import pytree, storage_number
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._simulator import op_rules
from pt2qa._simulator.graph_run import run_order
from pt2qa._simulator.strides import copied
from pt2qa.errors import SimulationError


class Walk(Interpreter):
    """One run of a graph.  If it writes to inputs or buffers, these are copies.

    Args:
        letter: what the graph is called in errors.
        graph: the graph.
        values: its flat inputs.
        observed: the nodes whose values are compared, each as often as it is.
    """

    def __init__(self, letter: str, graph: GraphModule, values: Sequence[Any], observed: Sequence[Node]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._letter = letter
        self._writes = any(op_rules.mutates_first_argument(node.target) for node in graph.graph.nodes)
        self.args_iter = iter([copied(each) if self._writes and isinstance(each, Tensor) else each for each in values])
        self._buffers: dict[Any, Tensor] = dict(graph.named_buffers()) if self._writes else {}
        self._copies: dict[Any, Tensor] = {}
        self._nodes = iter(run_order(graph.graph))
        self._readers = {node: len(node.users) for node in graph.graph.nodes}
        self._comparisons = Counter(observed)
        self._kept: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of an observed node, as it was computed; runs the graph that far."""
        while node not in self._kept:
            self._advance()
        return self._kept[node]

    def compared(self, node: Node) -> None:
        """Notes one comparison of a value, which is released after its last."""
        self._comparisons[node] -= 1
        if not self._comparisons[node]:
            del self._kept[node]

    def outputs(self) -> Any:
        """Runs the rest of the graph; what it returns, flat."""
        while (last := self._advance()).op != "output":
            pass
        return self.env[last]

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A constant."""
        value = super().get_attr(target, args, kwargs)
        if target not in self._buffers:
            return value
        if target not in self._copies:
            self._copies[target] = copied(value)
        return self._copies[target]

    def _advance(self) -> Node:
        """Runs the next node, and releases what it is the last to read."""
        node: Node = next(self._nodes)
        if self._writes and op_rules.mutates_first_argument(node.target):
            self._save(self.env[node.all_input_nodes[0]])
        self.env[node] = self._run(node)
        if self._comparisons[node]:
            self._kept[node] = self.env[node]
        for source in node.all_input_nodes:
            self._readers[source] -= 1
        for each in (node, *node.all_input_nodes):
            if not self._readers[each] and each.op != "output":
                self.env.pop(each, None)
        return node

    def _run(self, node: Node) -> Any:
        raise_if_interrupted()
        try:
            return self.run_node(node)
        except Exception as error:
            raise SimulationError(
                f"graph {self._letter} cannot run: {node.target} fails with {type(error).__name__}: {error}. Run the "
                "graph by itself on the batch to see more."
            ) from error

    def _save(self, written: Tensor) -> None:
        """Copies the values that wait for their comparison in memory that is about to be written to."""
        for node, value in self._kept.items():
            tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
            if any(storage_number(tensor) == storage_number(written) for tensor in tensors):
                self._kept[node] = pytree.tree_map_only(Tensor, copied, value)
