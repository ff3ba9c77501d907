"""Which calls of modules a comparison covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pt2qa._report.selection import no_match
from pt2qa._simulator.program import Program


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a module: its path and class name, and the numbers of the op steps inside it.

    ``name`` is the path, followed by ``@1`` and so on for later calls of the same module.
    """

    name: str
    path: str
    kind: str
    steps: tuple[int, ...]


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
            raise no_match("module path or class", name, [part for block in blocks for part in block[1:]])
        calls: dict[str, int] = {}
        for key, path, kind in matches:
            call = calls[path] = calls.get(path, -1) + 1
            found.append(Block(f"{path}@{call}" if call else path, path, kind, tuple(blocks[key, path, kind])))
    return sorted(dict.fromkeys(found), key=lambda block: block.steps)
