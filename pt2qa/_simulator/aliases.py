"""Which values of a graph share memory, for rewriting in-place ops."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from pt2qa._simulator import op_rules, quant_ops


def aliases_input(node: Node) -> bool:
    """Whether the node's value may share memory with its first argument."""
    return (
        node.op == "call_function"
        and not quant_ops.is_quantization(node)
        and (op_rules.mutates_first_argument(node.target) or op_rules.may_share_memory(node.target))
    )


def written_value(node: Node) -> Node:
    """The value that an in-place op changes, seen through any views of it."""
    while aliases_input(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def has_living_alias(node: Node, order: Mapping[Node, int]) -> bool:
    """Whether a value that shares memory with what an in-place op writes to is read after the write.

    The written value itself and the results of earlier in-place ops on it do not count: they can be renamed.
    """
    written = node.args[0]
    assert isinstance(written, Node)
    identical, base = {node}, written
    while op_rules.mutates_first_argument(base.target) and isinstance(base.args[0], Node):
        identical.add(base)
        base = base.args[0]
    identical.add(base)
    family, unvisited = set(identical), [base]
    while unvisited:
        member = unvisited.pop()
        relatives = [user for user in member.users if user.args and user.args[0] is member and aliases_input(user)]
        if aliases_input(member) and member.args and isinstance(member.args[0], Node):
            relatives.append(member.args[0])
        new = [relative for relative in relatives if relative not in family]
        family.update(new)
        unvisited += new
    return any(
        order[user] > order[node]
        for member in family - identical
        if not (op_rules.mutates_first_argument(member.target) and member.args[0] in identical)
        for user in member.users
    )
