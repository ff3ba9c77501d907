"""A graph run node by node, as far as asked; a value is kept until its last reader and its last comparison."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.internals.torch import pytree, storage_number
from pt2qa._simulator import op_rules
from pt2qa._simulator.graph_run import GraphRun
from pt2qa._simulator.strides import copied
from pt2qa.errors import SimulationError


class Walk(GraphRun):
    """One run of a graph, which writes to copies of its inputs; the caller keeps its buffers.

    ``letter`` is what the graph is called in errors, ``observed`` are the nodes whose values are compared, each as
    often as it is.
    """

    def __init__(self, letter: str, graph: GraphModule, values: Sequence[Any], observed: Sequence[Node]) -> None:
        super().__init__(graph)
        self._letter = letter
        self._writes = any(op_rules.mutates_first_argument(node.target) for node in graph.graph.nodes)
        self._steps = self.steps(*(copied(x) if self._writes and isinstance(x, Tensor) else x for x in values))
        self._comparisons = Counter(observed)
        self._kept: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of an observed node, as it was computed; runs the graph that far."""
        while node not in self._kept:
            next(self._steps)
        return self._kept[node]

    def compared(self, node: Node) -> None:
        """Notes one comparison of a value, which is released after its last."""
        self._comparisons[node] -= 1
        if not self._comparisons[node]:
            del self._kept[node]

    def outputs(self) -> Any:
        """Runs the rest of the graph; what it returns, flat."""
        return deque(self._steps, maxlen=1).pop()

    def run_node(self, n: Node) -> Any:
        if self._writes and op_rules.mutates_first_argument(n.target):
            self._save(self.env[n.all_input_nodes[0]])
        try:
            value = super().run_node(n)
        except Exception as error:
            raise SimulationError(
                f"graph {self._letter} cannot run: {n.target} fails with {type(error).__name__}: {error}. Run the "
                "graph by itself on the batch to see more."
            ) from error
        if self._comparisons[n]:
            self._kept[n] = value
        return value

    def _save(self, written: Tensor) -> None:
        """Copies the values that wait for their comparison in memory that is about to be written to."""
        for node, value in self._kept.items():
            tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
            if any(storage_number(tensor) == storage_number(written) for tensor in tensors):
                self._kept[node] = pytree.tree_map_only(Tensor, copied, value)
