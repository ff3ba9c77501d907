"""Runs a :class:`Program`: as the reference, as the quantized model, as anything between, or both in lockstep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2qa.simulator import op_rules
from pt2qa.simulator.fused import CHUNK
from pt2qa.simulator.program import Program, Slot, Step
from pt2qa.simulator.site_functions import is_elementwise


@dataclass(frozen=True, slots=True)
class Event:
    """What one step made, while all of it is still in memory.

    The value of a large site comes in flat pieces, one event each, so that it is rounded and measured while it is in
    the cache; ``shape`` is the shape of the whole.

    Attributes:
        step: an op, or an activation site.
        reference: value in the reference run; at a site the value before rounding.
        quantized: value in the quantized run; at a site the value after rounding.
        isolated: by group number, the value when the group runs quantized on the reference's inputs.
        rounded: at a site, the reference value rounded; None elsewhere.
        shape: shape of the reference value; () where it is no tensor.
        clamped: at a fused site, how many values of the quantized run the clamp moved; None elsewhere.
    """

    step: Step
    reference: Any
    quantized: Any
    isolated: dict[int, Any] = field(default_factory=dict)
    rounded: Tensor | None = None
    shape: tuple[int, ...] = ()
    clamped: int | None = None


class Simulator:
    """One graph that computes the reference, the quantized model, or any choice of sites between.

    Runs are made without gradients, never change their inputs, and keep a value only as long as a later step reads it.
    """

    def __init__(self, program: Program, *, fused: bool = True) -> None:
        self.program = program
        self._fused = fused
        self._off: list[Any] = [None] * program.slots
        self._on: list[Any] = [None] * program.slots
        for constant in program.constants:
            self._off[constant.slot], self._on[constant.slot] = constant.reference, constant.quantized

    def run(self, values: Sequence[Any], on: bool | Collection[int] = True) -> Any:
        """One forward pass.

        Args:
            values: the inputs, flat, in the order of ``program.inputs``.
            on: True for the quantized model, False for the reference, or the indices of the sites to quantize.

        Returns:
            What the graph's output node holds: a tuple or list of values.
        """
        program = self.program
        all_on, all_off = on is True, on is False
        chosen = frozenset() if isinstance(on, bool) else frozenset(on)
        env = self._environment(values, on)
        with torch.no_grad():
            for step in program.steps:
                source = step.reads[0] if step.reads else -1
                if step.site is None:
                    reuse = step.reuse_all_on if all_on else step.reuse
                    env[step.out] = self._call(step, env, reuse)
                elif all_off or not (all_on or step.site in chosen):
                    env[step.out] = env[source]
                elif step.twin is not None and (all_on or program.steps[program.producers[step.twin]].site in chosen):
                    env[step.out] = env[step.twin]
                else:
                    env[step.out] = self._quantize(step, env[source], step.reuse_all_on if all_on else step.reuse)
                for slot in step.releases:
                    env[slot] = None
            return _bind(program.outputs, env)

    def lockstep(
        self,
        values: Sequence[Any],
        visit: Callable[[Event], None],
        *,
        groups: Sequence[Collection[int]] = (),
        rounding: bool = False,
        clamped: bool = False,
        pieces: bool = False,
    ) -> tuple[Any, Any]:
        """Reference and quantized model side by side, every value handed to ``visit`` and dropped when it is read up.

        Args:
            values: the inputs, flat.
            visit: called for every step, in graph order; it must not keep or change the tensors.
            groups: sets of op step numbers that are also run quantized on the reference's inputs.
            rounding: whether to round every site's reference value too (groups need it, it is then on).
            clamped: whether to count the values that each site's clamp moves.
            pieces: whether large sites may come in pieces.

        Returns:
            The outputs of the reference and of the quantized model.
        """
        return _Lockstep(self, groups, rounding or bool(groups), clamped, pieces).run(values, visit)

    # -- pieces --------------------------------------------------------------------------------------------------

    def _environment(self, values: Sequence[Any], on: bool | Collection[int]) -> list[Any]:
        env = list(self._on if on is True else self._off)
        for constant in self.program.constants:
            if not isinstance(on, bool) and constant.site is not None and constant.site in on:
                env[constant.slot] = constant.quantized
            if constant.mutated:
                env[constant.slot] = env[constant.slot].clone()
        for slot, value in zip(self.program.inputs, values, strict=True):
            env[slot] = value.clone() if not self.program.may_share and isinstance(value, Tensor) else value
        return env

    @staticmethod
    def _call(step: Step, env: Sequence[Any], reuse: bool) -> Any:
        function = step.in_place if reuse and step.in_place is not None else step.function
        return function(*_bind(step.args, env), **(_bind(step.kwargs, env) if step.kwargs else {}))

    def _quantize(self, step: Step, value: Tensor, reuse: bool, clamped: list[int] | None = None) -> Tensor:
        function = step.function if self._fused or step.converted is None else step.converted
        return function(value, out=value if reuse and self._fused else None, clamped=clamped)  # type: ignore[no-any-return]

    def in_pieces(self, step: Step, values: Sequence[Tensor]) -> bool:
        """Whether a site with these inputs may be computed piece by piece."""
        large = values[0].numel() > CHUNK and all(value.is_contiguous() for value in values)
        return large and self._fused and is_elementwise(step.function)


class _Lockstep:
    """The state of one side-by-side run."""

    def __init__(
        self, simulator: Simulator, groups: Sequence[Collection[int]], rounding: bool, clamped: bool, pieces: bool
    ) -> None:
        self.simulator, self.program = simulator, simulator.program
        self.rounding, self.clamped, self.pieces = rounding, clamped, pieces
        self.groups = [frozenset(group) for group in groups]
        self.groups_of: dict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(self.groups):
            for index in sorted(group):
                self.groups_of[index].append(number)
        self.site_source = {site.result: site.source for site in self.program.sites if site.result != site.source}
        self.isolated: dict[tuple[int, int], Any] = {}
        self.rounded: dict[int, Tensor] = {}
        self.allocating = {step.index for step in self.program.steps if op_rules.allocates(step.function)}
        self.drop_isolated, self.drop_rounded = self._lifetimes()
        self.read_inside = {key for keys in self.drop_isolated.values() for key in keys}

    def _inside(self, group: int, slot: int) -> bool:
        """Whether a slot's value is made within a group (through a site or not)."""
        producer = self.program.producers.get(self.site_source.get(slot, slot))
        return producer is not None and producer in self.groups[group]

    def _lifetimes(self) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[int]]]:
        last_isolated: dict[tuple[int, int], int] = {}
        last_rounded: dict[int, int] = {}
        for step in self.program.steps:
            for slot in step.reads:
                if step.site is not None:
                    producer = self.program.producers.get(slot)
                    for group in self.groups_of.get(producer, ()) if producer is not None else ():
                        last_isolated[group, slot] = step.index
                    last_rounded.setdefault(step.out, step.index)
                    continue
                for group in self.groups_of.get(step.index, ()):
                    if self._inside(group, slot):
                        last_isolated[group, slot] = step.index
                    elif slot in self.site_source:
                        last_rounded[slot] = step.index
        drop_isolated: dict[int, list[tuple[int, int]]] = defaultdict(list)
        drop_rounded: dict[int, list[int]] = defaultdict(list)
        for key, index in last_isolated.items():
            drop_isolated[index].append(key)
        for slot, index in last_rounded.items():
            drop_rounded[index].append(slot)
        return drop_isolated, drop_rounded

    def run(self, values: Sequence[Any], visit: Callable[[Event], None]) -> tuple[Any, Any]:
        simulator, program = self.simulator, self.program
        reference, quantized = simulator._environment(values, False), simulator._environment(values, True)
        with torch.no_grad():
            for step in program.steps:
                if step.site is not None:
                    self._site(step, reference, quantized, visit)
                else:
                    visit(self._op(step, reference, quantized))
                for slot in step.releases:
                    reference[slot] = quantized[slot] = None
                for key in self.drop_isolated.get(step.index, ()):
                    self.isolated.pop(key, None)
                for slot in self.drop_rounded.get(step.index, ()):
                    self.rounded.pop(slot, None)
            return _bind(program.outputs, reference), _bind(program.outputs, quantized)

    def _site(self, step: Step, reference: list[Any], quantized: list[Any], visit: Callable[[Event], None]) -> None:
        """Rounds a value in all runs that read it."""
        source = step.reads[0]
        ref, quant = reference[source], quantized[source]
        reference[step.out] = ref
        reuse = step.reuse_all_on and quant is not ref
        producer = self.program.producers.get(source)
        groups = self.groups_of.get(producer, ()) if producer is not None else ()
        isolated = {group: self.isolated[group, source] for group in groups if (group, source) in self.isolated}
        inputs = [quant, *([ref] if self.rounding else []), *isolated.values()]
        reuses = [
            reuse,
            *([False] if self.rounding else []),
            *[step.reuse_all_on and self._allocated(source)] * len(isolated),
        ]
        if not (self.pieces and self.simulator.in_pieces(step, inputs)):
            clamped: list[int] = []
            results = [
                self.simulator._quantize(step, value, own, clamped if self.clamped and not number else None)
                for number, (value, own) in enumerate(zip(inputs, reuses, strict=True))
            ]
            visit(self._site_event(step, ref, results, isolated, tuple(ref.shape), clamped))
        else:
            results = [value if own else torch.empty_like(value) for value, own in zip(inputs, reuses, strict=True)]
            flat = [tensor.view(-1).split(CHUNK) for tensor in (ref, *inputs, *results)]
            for ref_piece, *rest in zip(*flat, strict=True):
                clamped = []
                into = rest[len(inputs) :]
                for number, (value, out) in enumerate(zip(rest, into, strict=False)):
                    step.function(value, out=out, clamped=clamped if self.clamped and not number else None)
                visit(self._site_event(step, ref_piece, into, isolated, tuple(ref.shape), clamped))
        quantized[step.out] = results[0]
        if self.rounding:
            self.rounded[step.out] = results[1]
        for group, value in zip(isolated, results[len(results) - len(isolated) :], strict=True):
            self._keep(group, step, value)

    def _site_event(
        self,
        step: Step,
        reference: Tensor,
        results: Sequence[Tensor],
        isolated: dict[int, Any],
        shape: tuple[int, ...],
        clamped: list[int],
    ) -> Event:
        rounded = results[1] if self.rounding else None
        by_group = dict(zip(isolated, results[len(results) - len(isolated) :], strict=True))
        return Event(step, reference, results[0], by_group, rounded, shape, clamped[0] if clamped else None)

    def _op(self, step: Step, reference: list[Any], quantized: list[Any]) -> Event:
        simulator = self.simulator
        same = self.program.may_share and self._reads_the_same(step, reference, quantized)
        isolated = {}
        for group in self.groups_of.get(step.index, ()):
            isolated[group] = self._keep(group, step, self._run_isolated(step, group, reference))
        if same:
            result = ref = simulator._call(step, reference, False)
        else:
            reuse = step.reuse_all_on and self._is_private(step, reference, quantized)
            result = simulator._call(step, quantized, reuse)
            ref = simulator._call(step, reference, step.reuse and self._is_private(step, reference, quantized))
        reference[step.out], quantized[step.out] = ref, result
        return Event(step, ref, result, isolated, shape=tuple(ref.shape) if isinstance(ref, Tensor) else ())

    def _keep(self, group: int, step: Step, value: Any) -> Any:
        """Stores an isolated value where its group reads it again."""
        if (group, step.out) in self.read_inside:
            self.isolated[group, step.out] = value
        return value

    def _run_isolated(self, step: Step, group: int, reference: list[Any]) -> Any:
        env = list(self.simulator._on)
        # A group's own value that nobody reads again may be overwritten; the reference's values may not.
        reuse = step.reuse_all_on and self._inside(group, step.reads[0]) and self._allocated(step.reads[0])
        for slot in step.reads:
            if self._inside(group, slot):
                env[slot] = self.isolated[group, slot]
            elif slot in self.site_source:
                env[slot] = self.rounded[slot]
            else:
                env[slot] = reference[slot]
            if step.mutates and isinstance(env[slot], Tensor):
                env[slot] = env[slot].clone()
        return self.simulator._call(step, env, reuse)

    def _allocated(self, slot: int) -> bool:
        """Whether a value certainly owns its memory."""
        return self.program.producers.get(slot) in self.allocating

    def _reads_the_same(self, step: Step, reference: list[Any], quantized: list[Any]) -> bool:
        return all(reference[slot] is quantized[slot] for slot in (*step.reads, *step.constants))

    def _is_private(self, step: Step, reference: list[Any], quantized: list[Any]) -> bool:
        """Whether overwriting the first input in one run leaves the other run alone."""
        slot = step.reads[0]
        return reference[slot] is not quantized[slot]


def _bind(template: Any, env: Sequence[Any]) -> Any:
    """``template`` with the values of ``env`` in the places of slots."""
    kind = type(template)
    if kind is Slot:
        return env[template.number]
    if isinstance(template, tuple):
        return tuple([_bind(item, env) for item in template])
    if isinstance(template, list):
        return [_bind(item, env) for item in template]
    if isinstance(template, dict):
        return {key: _bind(item, env) for key, item in template.items()}
    if kind is slice:
        return slice(_bind(template.start, env), _bind(template.stop, env), _bind(template.step, env))
    return template


def tensors_equal(left: Any, right: Any) -> bool:
    """Whether two nested results hold the same values; NaN equals NaN."""
    left_leaves, right_leaves = pytree.tree_leaves(left), pytree.tree_leaves(right)
    if len(left_leaves) != len(right_leaves):
        return False
    for a, b in zip(left_leaves, right_leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.dtype != b.dtype or a.shape != b.shape or not (torch.equal(a, b) or _equal_with_nan(a, b)):
                return False
        elif type(a) is not type(b) or a != b:
            return False
    return True


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def graph_values(graph_module: GraphModule, values: Sequence[Any], visit: Callable[[torch.fx.Node, Any], None]) -> None:
    """Runs a graph node by node; ``visit`` sees every value as it is made."""

    class _Recorder(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            if node.op == "call_module" and node.target == "_guards_fn":
                return None
            result = super().run_node(node)
            visit(node, result)
            return result

    with torch.no_grad():
        _Recorder(graph_module).run(*values, enable_io_processing=False)
