"""Which ops read a parameter or buffer, whatever name it has: tied weights are one tensor under two names."""

from __future__ import annotations

import operator
from collections import defaultdict

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._capture.aliases import memory_of


def constants_by_memory(graph: GraphModule) -> dict[int, list[Node]]:
    """The ``get_attr`` nodes of the tensors of a graph, by a number for their memory, in graph order."""
    found: dict[int, list[Node]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(str(node.target))(graph)
        memory = memory_of(value) if isinstance(value, Tensor) else None
        if memory is not None:
            found[memory].append(node)
    return found


def readers_of(constant: Node) -> list[Node]:
    """The ops that read a constant beside something else; its views, which read nothing else, are looked through."""
    found: list[Node] = []
    for user in constant.users:
        if user.op != "call_function":
            continue
        found += [user] if len(user.all_input_nodes) > 1 else readers_of(user)
    return list(dict.fromkeys(found))
