"""Which values share memory, and how long each is needed: what a step may release, and what it may overwrite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.fx import Graph, Node

from pt2qa._graph.handles import attribute_of
from pt2qa._graph.internals.torch import storage_number
from pt2qa._grouping import grouped
from pt2qa._simulator import op_rules, quant_ops
from pt2qa._simulator.program import Slot, Step


def mark_lifetimes(steps: Sequence[Step], outputs: Any, given: Collection[int]) -> None:
    """Writes ``releases``, ``reuse`` and ``reuse_all_on`` into the steps.

    ``given`` are the slots of inputs and constants, whose memory the program does not own.
    """
    # If both sites are on, a duplicate reads the result of the first one.
    last = {slot: step.index for step in steps for slot in (*step.reads, step.duplicate_of) if slot is not None}
    last.update(dict.fromkeys(slots_in(outputs), len(steps)))
    releases = grouped((index, slot) for slot, index in last.items())
    for step in steps:
        step.releases = tuple(releases[step.index])
        if step.out not in last:
            step.releases += (step.out,)
    # With a site off, its result is its source; with it on, the result is new memory, shared with its duplicates.
    sources = [(step.out, step.reads[0]) for step in steps if step.site is not None]
    duplicates = [(step.out, step.duplicate_of) for step in steps if step.duplicate_of is not None]
    overwrite = _overwritable(steps, last, given, sources)
    overwrite_all_on = _overwritable(steps, last, given, duplicates)
    for step in steps:
        if step.in_place is not None or step.site is not None:
            step.reuse = step.index in overwrite
            step.reuse_all_on = step.index in overwrite_all_on


def slots_in(template: Any) -> list[int]:
    """The slots inside a template, in order, repeats included."""
    if isinstance(template, Slot):
        return [template.number]
    if isinstance(template, slice):
        template = (template.start, template.stop, template.step)
    if isinstance(template, dict):
        template = tuple(template.values())
    if isinstance(template, (list, tuple)):
        return [slot for item in template for slot in slots_in(item)]
    return []


def _overwritable(
    steps: Sequence[Step], last: dict[int, int], given: Collection[int], shared: Iterable[tuple[int, int]]
) -> set[int]:
    """Steps whose first input shares memory with no value that is read later, and with no input or constant."""
    parents: dict[int, int] = {}

    def root(slot: int) -> int:
        while parents.get(slot, slot) != slot:
            slot = parents[slot]
        return slot

    for left, right in shared:
        parents[root(left)] = root(right)
    for step in steps:
        if step.site is None and (step.mutates or op_rules.may_share_memory(step.function)):
            for slot in (*step.reads, *step.constants):
                parents[root(slot)] = root(step.out)
    last_of_family: dict[int, int] = defaultdict(int)
    for slot, index in last.items():
        last_of_family[root(slot)] = max(last_of_family[root(slot)], index)
    foreign = {root(slot) for slot in given}
    found = set()
    for step in steps:
        first = step.args[0] if step.args else None
        family = root(first.number) if isinstance(first, Slot) else -1
        read_once = [root(slot) for slot in step.reads].count(family) == 1
        if read_once and family not in foreign and last_of_family[family] == step.index:
            found.add(step.index)
    return found


def aliases_input(node: Node) -> bool:
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


def memory_of(node: Node) -> Node | int:
    """What a value lives in: the node that made it, or the storage of an attribute, which several nodes may read."""
    root = written_value(node)
    module = root.graph.owning_module
    value = None if module is None else attribute_of(module, root)
    return storage_number(value) if isinstance(value, Tensor) else root


UNWRITTEN: Final = "memory that is not written yet"
"""Why such a value has no numbers."""


def unwritten_values(graph: Graph) -> frozenset[Node]:
    """The values that are memory to which nothing was written when they are made: new, a view of such, or rounded.

    They differ from run to run, so they are neither measured nor compared.
    """
    found: set[Node] = set()
    written: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        passes_on = quant_ops.is_quantization(node) or op_rules.only_moves(node.target)
        if op_rules.mutates_first_argument(node.target):
            written.add(written_value(node))
        elif op_rules.is_uninitialised(node.target) or (
            passes_on and isinstance(source, Node) and source in found and written_value(source) not in written
        ):
            found.add(node)
    return frozenset(found)


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
    # Views of the result come from what it is renamed to.
    family, unvisited = set(identical), [*identical - {node}]
    while unvisited:
        member = unvisited.pop()
        relatives = [
            other for other in order if "get_attr" == member.op == other.op and memory_of(other) == memory_of(member)
        ]
        relatives += [user for user in member.users if user.args and user.args[0] is member and aliases_input(user)]
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
