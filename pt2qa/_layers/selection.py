"""Which ops and modules a comparison covers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pt2qa._graph.handles import OpName
from pt2qa._near_names import near_names
from pt2qa._simulator.program import Program, Step
from pt2qa.errors import SelectionError

Labelled = Step | OpName
"""Anything with a name, a module and an op type."""


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a module: its path and class name, and the numbers of the op steps inside it.

    ``name`` is the path, followed by ``@1`` and so on for later calls of the same module.
    """

    name: str
    path: str
    kind: str
    steps: tuple[int, ...]


def select(labels: Sequence[Labelled], prefixes: Sequence[str], ops: Collection[str]) -> frozenset[int]:
    """Positions of the ops under any of the module paths and of any of the types; all if both are empty.

    Rejects unmatched selectors, with close matches.
    """
    for prefix in prefixes:
        if not any(_is_under(label, prefix) for label in labels):
            raise _no_match("module or op", prefix, [name for label in labels for name in (label.module, label.name)])
    for op in ops:
        if not any(label.op == op for label in labels):
            raise _no_match("op type", op, [label.op for label in labels])
    return frozenset(
        position
        for position, label in enumerate(labels)
        if (not prefixes or any(_is_under(label, prefix) for prefix in prefixes)) and (not ops or label.op in ops)
    )


def find_blocks(program: Program, wanted: Iterable[str | type]) -> list[Block]:
    """The calls, in graph order, of modules given by path (``layer2``), class, or class name (``BasicBlock``)."""
    blocks: dict[tuple[str, str, str], list[int]] = {}
    for step in program.steps:
        if step.site is None:
            for key, path, kind in step.module_stack:
                blocks.setdefault((key, path, kind.rpartition(".")[2]), []).append(step.index)
    found = []
    for name in (each.__name__ if isinstance(each, type) else each for each in wanted):
        matches = [block for block in blocks if name in (block[1], block[2])]
        if not matches:
            raise _no_match("module path or class", name, [part for block in blocks for part in block[1:]])
        calls: dict[str, int] = {}
        for key, path, kind in matches:
            call = calls[path] = calls.get(path, -1) + 1
            found.append(Block(f"{path}@{call}" if call else path, path, kind, tuple(blocks[key, path, kind])))
    return sorted(dict.fromkeys(found), key=lambda block: block.steps)


def _is_under(label: Labelled, prefix: str) -> bool:
    return any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}/")) for name in (label.module, label.name))


def _no_match(what: str, given: str, known: Iterable[str]) -> SelectionError:
    names = sorted({name for name in known if name})
    return SelectionError(f"no {what} is called {given!r}. Near names: {near_names(given, names, 5)}.")
