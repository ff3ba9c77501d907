"""Runs reference and quantized model side by side: visits each value once computed, releases it after its last reader.

Large values pass through memory as rarely as possible: the pointwise ops after an op, and the site after them, run
piece by piece, so that a piece is still in the cache when it is rounded and measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pt2qa._grouping import grouped
from pt2qa._interrupts import raise_if_interrupted
from pt2qa._metrics import CHUNK, Range, value_range
from pt2qa._simulator import op_rules
from pt2qa._simulator.fused import RoundingStats, is_elementwise
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Simulator, bind
from pt2qa._simulator.stored import Stored, read
from pt2qa._simulator.strides import flat, is_plain


@dataclass(frozen=True, slots=True)
class Event:
    """The values of one step, while they are in memory.

    Large values may come in flat pieces, one event each; ``shape`` is the shape of the whole.

    Attributes:
        reference: value in the reference run; at a site, the value before rounding.
        quantized: value in the quantized run; at a site, the value after rounding.
        isolated: by group number, the value when the group runs quantized on the reference's inputs.
        rounded: at a site, the reference value after rounding; None elsewhere.
        shape: shape of the reference value; () if it is not a tensor.
        clamped: at a fused site, how many values of the quantized run the clamp moved; None elsewhere.
        ranges: of ``reference`` and ``quantized``, if rounding needed them; empty elsewhere.
    """

    step: Step
    reference: Any
    quantized: Any
    isolated: dict[int, Any] = field(default_factory=dict)
    rounded: Tensor | None = None
    shape: tuple[int, ...] = ()
    clamped: int | None = None
    ranges: tuple[Range, ...] = ()


Visit = Callable[[Event], None]

_Key = tuple[int | None, int]
"""The slot of a value of one group; None in place of the group: of the reference, rounded."""


class Lockstep:
    """Runs the reference and the quantized model side by side, batch after batch."""

    def __init__(
        self,
        simulator: Simulator,
        *,
        groups: Sequence[Collection[int]] = (),
        rounding: bool = False,
        ranges: bool = False,
        pieces: bool = False,
        counted: Callable[[Step, Tensor], Tensor] | None = None,
    ) -> None:
        """``groups`` are sets of op step numbers that also run quantized on the reference's inputs.

        ``rounding`` is always on if there are groups; it rounds every site's reference value too.  ``ranges`` also
        counts the values that each clamp moves.  ``pieces``: large values may come in pieces, and those of steps that
        run together alternate.  ``counted``: the elements of a step's value among which clamped ones are counted; all
        if None.
        """
        self.simulator, self.program = simulator, simulator.program
        self.visit: Visit = lambda event: None
        self.rounding, self.ranges, self.pieces, self.counted = rounding or bool(groups), ranges, pieces, counted
        self.groups = [frozenset(group) for group in groups]
        self.groups_of = grouped((index, number) for number, group in enumerate(self.groups) for index in sorted(group))
        # By the result of each site: the value that it rounds, or that a site before it rounds.
        self.site_source = {site.result: self.program.unrounded(site.source) for site in self.program.sites}
        self.alone: dict[_Key, Any] = {}
        self.allocating = {step.index for step in self.program.steps if op_rules.allocates(step.function)}
        self.drop = self._lifetimes()
        self.needed = {key for keys in self.drop.values() for key in keys}
        self.reference: list[Any] = []
        self.quantized: list[Any] = []

    def _inside(self, group: int, slot: int) -> bool:
        producer = self.program.producers.get(self.site_source.get(slot, slot))
        return producer is not None and producer in self.groups[group]

    def _lifetimes(self) -> dict[int, list[_Key]]:
        """By step, what no later one reads."""
        last: dict[_Key, int] = {}
        for step in self.program.steps:
            for slot in step.reads:
                if step.site is not None:
                    for group in self._groups_of_producer(slot):
                        last[group, slot] = step.index
                    if slot in self.site_source:
                        last[None, slot] = step.index
                    last.setdefault((None, step.out), step.index)
                    continue
                for group in self.groups_of.get(step.index, ()):
                    if self._inside(group, slot):
                        last[group, slot] = step.index
                    elif slot in self.site_source:
                        last[None, slot] = step.index
        return grouped((index, key) for key, index in last.items())

    def _groups_of_producer(self, slot: int) -> Sequence[int]:
        producer = self.program.producers.get(self.site_source.get(slot, slot))
        return () if producer is None else self.groups_of.get(producer, ())

    def run(self, values: Sequence[Any], visit: Visit) -> tuple[Any, Any]:
        """The outputs of both; ``visit`` is called for every step, in order, and must not keep or change tensors."""
        self.visit, environment = visit, self.simulator.environment
        self.reference, self.quantized = environment(values, False), environment(values, True)
        done = -1
        with torch.no_grad():
            for step in self.program.steps:
                raise_if_interrupted()
                if step.index > done:
                    done = self._advance(step)
                for slot in step.releases:
                    self.reference[slot] = self.quantized[slot] = None
                for key in self.drop.get(step.index, ()):
                    self.alone.pop(key, None)
            return bind(self.program.outputs, self.reference), bind(self.program.outputs, self.quantized)

    def _advance(self, step: Step) -> int:
        """Runs a step, and the steps that follow it piece by piece; returns the number of the last one."""
        if step.site is not None:
            source = step.reads[0]
            groups = [group for group in self._groups_of_producer(source) if (group, source) in self.alone]
            isolated = {group: self.alone[group, source] for group in groups}
            self._round_all(step, (), self.reference[source], self.quantized[source], isolated)
            return step.index
        ref, quant, isolated = self._op(step)
        splits = ref is not quant and self._splits([ref, quant, *isolated.values()])
        ops, site = self._pointwise_after(step) if splits else ([], None)
        end = ops[-1] if ops else step
        self.reference[end.out], self.quantized[end.out] = ref, quant
        for group, value in isolated.items():
            self._keep(group, end, value)
        if not ops:
            self.visit(Event(step, ref, quant, isolated, shape=tuple(ref.shape) if isinstance(ref, Tensor) else ()))
            return step.index
        if site is not None:
            self._round_all(site, [step, *ops], ref, quant, isolated)
            return site.index
        for ref_piece, quant_piece, *alone in _pieces([ref, quant, *isolated.values()]):
            by_group = dict(zip(isolated, alone, strict=True))
            self._in_place([step, *ops], ref_piece, quant_piece, by_group, ref.shape)
        return end.index

    # -- ops -----------------------------------------------------------------------------------------------------

    def _op(self, step: Step) -> tuple[Any, Any, dict[int, Any]]:
        """The value of an op in the reference, in the quantized run, and in each of its groups."""
        call, reference, quantized = self.simulator.call, self.reference, self.quantized
        inputs = (*step.reads, *step.constants)
        # Rounded weights are made once for all runs of the op.
        on = {slot: read(self.simulator.on[slot]) for slot in step.constants}
        isolated = {group: self._run_isolated(step, group, on) for group in self.groups_of.get(step.index, ())}
        if self.program.may_share and all(reference[slot] is quantized[slot] for slot in inputs):
            ref = call(step, reference, False)
            return ref, ref, isolated
        # Overwriting the first input in one run must not affect the other run.
        private = not step.reads or reference[step.reads[0]] is not quantized[step.reads[0]]
        own = {slot: quantized[slot] for slot in step.reads}
        own |= {slot: on[slot] if type(quantized[slot]) is Stored else quantized[slot] for slot in step.constants}
        quant = call(step, own, step.reuse_all_on and private)
        return call(step, reference, step.reuse and private), quant, isolated

    def _keep(self, group: int | None, step: Step, value: Any) -> None:
        if (group, step.out) in self.needed:
            self.alone[group, step.out] = value

    def _run_isolated(self, step: Step, group: int, constants: Mapping[int, Any]) -> Any:
        env = dict(constants)
        # A group may overwrite its own values after their last reader, but not the reference's.
        reuse = step.reuse_all_on and self._inside(group, step.reads[0]) and self._allocated(step.reads[0])
        for slot in step.reads:
            if self._inside(group, slot):
                env[slot] = self.alone[group, slot]
            elif slot in self.site_source:
                env[slot] = self.alone[None, slot]
            else:
                env[slot] = self.reference[slot]
            if step.mutates and isinstance(env[slot], Tensor):
                env[slot] = env[slot].clone()
        return self.simulator.call(step, env, reuse)

    def _allocated(self, slot: int) -> bool:
        return self.program.producers.get(slot) in self.allocating

    # -- pieces --------------------------------------------------------------------------------------------------

    def _splits(self, values: Sequence[Any]) -> bool:
        """Whether the values have one shape, can be split into flat pieces, and are large enough to be worth it."""
        return self.pieces and all(
            isinstance(value, Tensor)
            and value.dtype == torch.float32
            and value.numel() > CHUNK
            and is_plain(value)
            and value.shape == values[0].shape
            and value.stride() == values[0].stride()
            for value in values
        )

    def _pointwise_after(self, step: Step) -> tuple[list[Step], Step | None]:
        """The ops right after a step that may overwrite its value element by element, in all runs and groups.

        And the site right after them, if it rounds the last of their values in pieces.
        """
        found: list[Step] = []
        steps, last = self.program.steps, step
        for follower in steps[step.index + 1 :]:
            if follower.reads == (last.out,) and self._rounds_pieces(follower):
                return found, follower
            alike = self.groups_of.get(follower.index, []) == self.groups_of.get(step.index, [])
            overwrites = self._allocated(step.out) and follower.reuse and follower.reuse_all_on
            alone = follower.reads == (last.out,) and not follower.constants
            pointwise = op_rules.is_pointwise(follower.function)
            if not (alike and overwrites and alone and pointwise and follower.site is None):
                break
            found.append(follower)
            last = follower
        return found, None

    def _rounds_pieces(self, step: Step) -> bool:
        return step.site is not None and self.simulator.fused and is_elementwise(step.function)

    def _round_all(
        self, site: Step, ops: Sequence[Step], ref: Tensor, quant: Tensor, isolated: dict[int, Tensor]
    ) -> None:
        """Rounds a value in all runs that read it, after the ops of its chain, the first of which has already run."""
        # After another site, the reference value that this one rounds has been rounded once.
        alone = [self.alone.get((None, site.reads[0]), ref)] if self.rounding else []
        inputs = [quant, *alone, *isolated.values()]
        reuses = [
            site.reuse_all_on and quant is not ref,
            *([False] if self.rounding else []),
            *[site.reuse_all_on and self._allocated(site.reads[0])] * len(isolated),
        ]
        if not (self._rounds_pieces(site) and self._splits([ref, *inputs])):
            targets = [value if own else None for value, own in zip(inputs, reuses, strict=True)]
            event, results = self._round(site, ref, inputs, targets, isolated, ref.shape)
            self.visit(event)
        else:
            results = [value if own else torch.empty_like(value) for value, own in zip(inputs, reuses, strict=True)]
            for ref_piece, *rest in _pieces([ref, *inputs, *results]):
                sources, into = rest[: len(inputs)], rest[len(inputs) :]
                by_group = dict(zip(isolated, sources[1 + self.rounding :], strict=True))
                ranges = self._in_place(ops, ref_piece, sources[0], by_group, ref.shape)
                self.visit(self._round(site, ref_piece, sources, into, isolated, ref.shape, ranges)[0])
        self.reference[site.out], self.quantized[site.out] = ref, results[0]
        for group, value in zip([*[None] * self.rounding, *isolated], results[1:], strict=True):
            self._keep(group, site, value)

    def _in_place(
        self, ops: Sequence[Step], ref: Tensor, quant: Tensor, isolated: dict[int, Tensor], shape: Sequence[int]
    ) -> tuple[Range, ...]:
        """Visits the values of the first op, overwrites them with those of the second, visits these, and so on.

        Finds the ranges of the reference and of the quantized value after the last op, if requested.
        """
        ranges: tuple[Range, ...] = ()
        for number, op in enumerate(ops):
            if number:
                for value in (ref, quant, *isolated.values()):
                    self.simulator.call(op, {op.reads[0]: value}, True)
            if not self.ranges:
                ranges = ()
            elif number and op_rules.keeps_order(op.function):
                ends = self.simulator.call(op, {op.reads[0]: torch.tensor(ranges, device=ref.device)}, True)
                ranges = tuple((float(low), float(high)) for low, high in ends.tolist())
            else:
                ranges = value_range(ref), value_range(quant)
            self.visit(Event(op, ref, quant, isolated, shape=tuple(shape), ranges=ranges))
        return ranges

    def _round(
        self,
        site: Step,
        ref: Tensor,
        inputs: Sequence[Tensor],
        into: Sequence[Tensor | None],
        groups: Iterable[int],
        shape: Sequence[int],
        ranges: Sequence[Range] = (),
    ) -> tuple[Event, list[Tensor]]:
        """Rounds the quantized value, the reference value if requested, and the isolated ones.

        ``ranges`` are those of the reference and of the quantized value, if known.
        """
        function = self.simulator.site_function(site)
        fits = self.ranges and ref.is_floating_point() and ref.numel() > 0
        known = (ranges[0] if ranges else value_range(ref)) if fits else None
        stats = RoundingStats(source=ranges[1] if ranges else None) if fits else None
        once = site.reads[0] not in self.site_source
        uncounted = RoundingStats(source=known, count=False) if self.rounding and fits and once else None
        noted = [stats, uncounted, *[None] * len(inputs)]
        clamped = None if stats is None else self._clamped(site, inputs[0])
        results = [function(value, out=out, stats=note) for value, out, note in zip(inputs, into, noted, strict=False)]
        by_group = dict(zip(groups, results[1 + self.rounding :], strict=True))
        event = Event(site, ref, results[0], by_group, results[1] if self.rounding else None, tuple(shape))
        if known is not None and stats is not None and stats.range is not None:
            event = replace(event, clamped=stats.clamped if clamped is None else clamped, ranges=(known, stats.range))
        return event, results

    def _clamped(self, site: Step, value: Tensor) -> int | None:
        """How many of the elements that count the clamp moves; None if all count, or all are rounded together."""
        if self.counted is None or not self._rounds_pieces(site):
            return None
        stats = RoundingStats()
        self.simulator.site_function(site)(self.counted(site, value), stats=stats)
        return stats.clamped


def _pieces(tensors: Sequence[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Flat pieces of plain tensors of one shape and layout."""
    return zip(*(flat(tensor).split(CHUNK) for tensor in tensors), strict=True)
