"""Compares annotations and converted weights with the spec of a backend: which of its lines they break, op by op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from pt2qa._simulator.products import WEIGHTED
from pt2qa._simulator.program import QuantParams, Site
from pt2qa.overrides.annotations import Annotations
from pt2qa.overrides.edits import BATCH_NORMS, limits_of
from pt2qa.overrides.points import GraphNode, Point, own_spec, root_of, rounds_at, spec_facts
from pt2qa.plugins.backend_spec import BackendSpec, OpSpec, Part, SpecLine, TensorSpec

_ARGUMENTS: Final[dict[int, Part]] = {1: "weight", 2: "bias"}


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line of a spec that the annotation of an op breaks.

    ``differs`` says in what: ``dtype``, ``scheme``, ``axis``, ``range`` or ``dynamic``; ``sharing``; ``fusion``.
    ``found`` is what is annotated, as the beginning of a sentence.
    """

    name: str
    line: SpecLine
    differs: tuple[str, ...]
    found: str
    backend: str

    def __str__(self) -> str:
        return f'{self.found}; the spec of {self.backend} says "{self.line}"'


def broken_lines(annotations: Annotations, spec: BackendSpec) -> tuple[BrokenLine, ...]:
    """The lines that annotations break, in graph order.

    Of an op with several kernels, those of the kernel that takes its input, and of these the one with the fewest.
    """
    found: list[BrokenLine] = []
    for node in annotations.graph.nodes.values():
        rows = () if node.constant else spec.rows(node.op)
        if rows:
            by_row = [list(_Op(annotations, node, row, spec.name).broken()) for row in rows]
            nearest: list[BrokenLine] = min(by_row, key=_distance)
            found += nearest
    return tuple(found)


def broken_weights(sites: Sequence[Site], spec: BackendSpec) -> tuple[BrokenLine, ...]:
    """The lines that the weights and biases of a converted graph break, whose annotations are unknown.

    A weight is symmetric if all its zero points are 0. Of an op with several kernels, any may take it.
    """
    found: list[BrokenLine] = []
    for site in sites:
        if site.kind == "activation":
            continue
        lines = [line for row in spec.rows(site.op) if (line := row.line(site.op, site.kind)) is not None]
        asked = _stored(site.params)
        broken = [_differing(line, asked) for line in lines]
        if broken and all(broken):
            differs, line = min(zip(broken, lines, strict=True), key=lambda pair: len(pair[0]))
            found.append(BrokenLine(site.name, line, differs, f"its {site.kind} is {asked}", spec.name))
    return tuple(found)


def _differing(line: SpecLine, asked: TensorSpec) -> tuple[str, ...]:
    """In what a tensor differs from the nearest of what it may be."""
    return min((taken.differing(asked) for taken in line.takes), key=len)


def _stored(params: QuantParams) -> TensorSpec:
    if getattr(torch, params.dtype).is_floating_point:
        return TensorSpec(params.dtype)
    centred = not torch.as_tensor(params.zero_point).any()
    scheme: Literal["symmetric", "affine"] = "symmetric" if centred else "affine"
    return TensorSpec(params.dtype, scheme, params.axis, params.quant_min, params.quant_max)


def _distance(lines: list[BrokenLine]) -> tuple[bool, bool, int]:
    """How far an annotation is from a kernel: the input decides, first of all whether its scale is dynamic."""
    inputs = [one.differs for one in lines if one.line.part == "input"]
    return any("dynamic" in differs for differs in inputs), bool(inputs), len(lines)


def tensor_spec(spec: Any) -> TensorSpec:
    """torchao's spec in the words of :class:`TensorSpec`; without a range of its own, it has that of its dtype."""
    facts = spec_facts(spec)
    if getattr(torch, facts.dtype).is_floating_point:
        return TensorSpec(facts.dtype)
    scheme: Literal["symmetric", "affine"] = "symmetric" if "symmetric" in facts.scheme else "affine"
    axis = facts.axis if facts.scheme.startswith("per_channel") else None
    return TensorSpec(facts.dtype, scheme, axis, *limits_of(own_spec(spec)), facts.dynamic)


@dataclass(frozen=True)
class _Op:
    """An op, and one of the kernels that it may have."""

    annotations: Annotations
    node: GraphNode
    row: OpSpec
    backend: str

    def broken(self) -> Iterator[BrokenLine]:
        """The lines that it breaks; none if nothing is annotated at the op, which then runs in float."""
        edges = [(key, self.node.key) for key in self.node.inputs]
        if not any(self._rounds(point) for point in (*edges, (self._chain()[1], ""))):
            return
        inputs = [point for key in self.node.inputs if (point := self._read(key)) is not None]
        for point in inputs:
            argument = self.node.inputs[point[0]]
            part: Part = _ARGUMENTS.get(argument, "input") if self.node.op in WEIGHTED else "input"
            yield from self._tensor(part, point, self._input(point) if part == "input" else f"its {part}")
        between, last = self._chain()
        if between is not None and (line := self.row.line(self.node.op, "fused")):
            yield self._line(line, ("fusion",), f"it is rounded before the {between}")
        if self._rounds((last, "")):
            after = "" if last == self.node.key else f" after the {self.annotations.graph.nodes[last].op}"
            yield from self._tensor("output", (last, ""), f"its output{after}")
        yield from self._shared(inputs)

    def _tensor(self, part: Part, point: Point, what: str) -> Iterator[BrokenLine]:
        """The line of one tensor, if none of what it may be fits; in what the nearest differs."""
        line = self.row.line(self.node.op, part)
        root = root_of(self.annotations.specs, point)
        if line is not None and root is not None:
            asked = tensor_spec(self.annotations.specs[root])
            differs = _differing(line, asked)
            if differs:
                yield self._line(line, differs, f"{what} is {asked}")

    def _shared(self, inputs: list[Point]) -> Iterator[BrokenLine]:
        line = self.row.line(self.node.op, "scales")
        own = (self.node.key, "")
        points = [*inputs, *([own] if self._rounds(own) else [])]
        groups = self.annotations.groups
        if line is None or len({groups[point] for point in points}) < 2:
            return
        first, *others = points
        names = [
            "its output" if point == own else self._input(point) for point in others if groups[point] != groups[first]
        ]
        text = f"separate scales for {', '.join([self._input(first), *names[:-1]])} and {names[-1]}"
        yield self._line(line, ("sharing",), text)

    def _chain(self) -> tuple[str | None, str]:
        """The activation of this op's kernel before which a value is rounded, if any, and the key of its last op."""
        nodes, last = self.annotations.graph.nodes, self.node
        while len(last.readers) == 1:
            reader = nodes[last.readers[0]]
            if reader.op not in (*self.row.fused, *self.row.fusable, *BATCH_NORMS):
                break
            if self._rounds((last.key, "")) or self._rounds((last.key, reader.key)):
                return reader.op if reader.op in self.row.fused else None, last.key
            last = reader
        return None, last.key

    def _read(self, source: str) -> Point | None:
        """The point that says how the op reads a value: its own or, as of a weight, that of what it reads."""
        return next((p for p in ((source, self.node.key), (source, "")) if self._rounds(p)), None)

    def _rounds(self, point: Point) -> bool:
        return rounds_at(self.annotations.specs, point, self.annotations.graph.nodes)

    def _input(self, point: Point) -> str:
        """What to call an input: by its op if there are several."""
        several = len(self.node.inputs) > 1 and self.node.op not in WEIGHTED
        return f"its input {self.annotations.graph.nodes[point[0]].name}" if several else "its input"

    def _line(self, line: SpecLine, differs: tuple[str, ...], found: str) -> BrokenLine:
        return BrokenLine(self.node.name, line, differs, found, self.backend)
