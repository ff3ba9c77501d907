"""Direct consumers of a value, the op responsible for its error, what an op reads, and which ops a module calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pt2qa._grouping import grouped
from pt2qa._report.selection import no_match
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.products import PRODUCTS, Read, reads_of, state_of
from pt2qa._simulator.program import Program, Step


class Reading:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.regions = {region.index: region.steps for region in program.regions}
        self.quantized = {step.index for step, reads in reads_of(program) if _quantizes(step.op, reads)}
        self.readers = program.readers()
        self.returned = frozenset(slots_in(program.outputs))

    def answers_for(self, op: Step) -> str:
        """Name of the op whose quantization causes the isolated error of a value that stays in float.

        That is the first op of its region that has rounded weights or multiplies rounded values.  Empty if there is
        none, since the error then comes from the values that the region reads, and if only the region itself reads the
        value: no kernel ever writes it.
        """
        own, readers = self.regions[op.region], self.readers[op.out]
        if op.out not in self.returned and readers and all(reader.index in own for reader in readers):
            return ""
        return next(
            (step.name for step in map(self.program.steps.__getitem__, own) if step.index in self.quantized), ""
        )

    def sources(self, step: Step) -> tuple[int | None, ...]:
        """The steps whose values the region of an op, or of a site's value, reads; None stands for model inputs.

        Of duplicate sites, the one that computes the value is used.
        """
        if step.site is not None:
            made = self._producer(step.reads[0])
            if made is None or self.program.steps[made].site is not None:
                return (made,)
            step = self.program.steps[made]
        own = self.regions[step.region]
        slots = (slot for index in own for slot in self.program.steps[index].reads)
        return tuple(source for source in dict.fromkeys(map(self._producer, slots)) if source not in own)

    def _producer(self, slot: int) -> int | None:
        index = self.program.producers.get(slot)
        first = None if index is None else self.program.steps[index].duplicate_of
        return index if first is None else self._producer(first)


def nearest_before(program: Program, shown: Collection[str]) -> dict[str, tuple[str, ...]]:
    """For each op, the nearest ops before it that are ``shown``, by name: those whose values it reads, directly or
    through ops that are not.
    """
    own = {name: (name,) for name in shown}
    inputs = zip(program.inputs, program.input_names, strict=True)
    nearest: dict[int, tuple[str, ...]] = {slot: own.get(name, ()) for slot, name in inputs}
    found: dict[str, tuple[str, ...]] = {}
    for step in program.steps:
        nearest[step.out] = tuple(dict.fromkeys(name for slot in step.reads for name in nearest.get(slot, ())))
        if step.site is None:
            found[step.name] = nearest[step.out]
            nearest[step.out] = own.get(step.name, nearest[step.out])
    return found


def _quantizes(op: str, reads: Sequence[Read]) -> bool:
    weights = any(read.constant and read.rounded for read in reads)
    return weights or (op in PRODUCTS and state_of(op, reads) != "float")


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
    ops = (step for step in program.steps if step.site is None)
    blocks = grouped(
        ((key, path, kind.rpartition(".")[2]), step.index) for step in ops for key, path, kind in step.module_stack
    )
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
