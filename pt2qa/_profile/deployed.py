"""The profile of what a backend's kernels write: the values that are observed in the lowered program."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node

from pt2qa._deployed.analysis import explained
from pt2qa._deployed.deployment import backend_for, program_for, run_program
from pt2qa._deployed.lowerable import Lowerable, ObservedValue, lowerable
from pt2qa._graph.internals.nodes import VALUE
from pt2qa._profile.measuring import Measurements, ProfileTarget
from pt2qa._profile.plan import Plan, Value, make_plan
from pt2qa._profile.report import Profile
from pt2qa._profile.values import ValueStatistics, Wanted, measured
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._report.prose import counted, few
from pt2qa._simulator.accumulate import accumulate, peeked
from pt2qa._simulator.batches import Batch
from pt2qa._simulator.data import Data
from pt2qa._simulator.positions import Inside, Mask
from pt2qa._simulator.program import QuantParams
from pt2qa.errors import DeploymentError
from pt2qa.plugins import Backend, DeployedProgram


def profile_deployed(
    target: ProfileTarget,
    pair: QuantizedPair,
    data: Data,
    backend: str | Backend | None,
    program: str | os.PathLike[str] | None,
    wanted: Wanted,
    **chosen: Any,
) -> Profile:
    """The deployed side of :func:`pt2qa.profile`; ``chosen`` are the options of :func:`make_plan`."""
    plan = make_plan(target.graph, target.names, **chosen)
    first, every = peeked(data, "profile")
    place, runs_on = lowerable(pair), backend_for(pair, backend)
    with explained(pair, runs_on):
        runs = program_for(pair, place, runs_on, first, program, data.progress)
        profiler = _DeployedProfiler(target, pair, plan, place, runs, wanted, data.mask)
        notes = accumulate(profiler, every, title="profile", purpose="profile")
    return profiler.profile([f"run by {runs_on.name}", *runs.facts, *notes])


class _DeployedProfiler(Measurements):
    """Which values of a plan are observed, in ``taps`` by number, why the others are not, and their statistics.

    In its ``plan``, a value that is observed before a kernel rounds it is a float value.
    """

    def __init__(
        self,
        target: ProfileTarget,
        pair: QuantizedPair,
        plan: Plan,
        place: Lowerable,
        program: DeployedProgram,
        wanted: Wanted,
        mask: Mask | None,
    ) -> None:
        self.program = program
        self._taps = {tap.step.node: tap for tap in place.values}
        results = {tap.step.out: tap for tap in place.values}
        steps = (step for step in pair.program.steps if step.duplicate_of is not None)
        self._taps |= {step.node: results[step.duplicate_of] for step in steps if step.duplicate_of in results}
        self._reasons = dict(program.taps)
        self._fused = {step.node: f"inside the kernel that writes {last}" for step, last in place.fused}
        self.taps: dict[int, ObservedValue] = {}
        self._missing: dict[int, str] = {}
        values = list(plan.values)
        for number, value in enumerate(plan.values):
            if value.constant or not isinstance(_source(value).meta.get(VALUE), Tensor):
                continue
            tap = self._taps.get(value.node.name) or self._taps.get(_source(value).name)
            reason = self._why_not(value, tap)
            if tap is None or reason:
                self._missing[number] = reason
                continue
            self.taps[number] = tap
            values[number] = replace(value, params=tap.params)
        super().__init__(target, replace(plan, values=tuple(values)), wanted, mask)

    def _why_not(self, value: Value, tap: ObservedValue | None) -> str:
        if value.reader is not None:
            return "it is modified in place before it is read"
        if tap is not None:
            return tap.refused or self._reasons.get(tap.node, "the backend does not say whether it observes it")
        if _source(value).op == "placeholder":
            return "an input that no kernel rounds"
        return self._fused.get(value.node.name, "it is neither quantized nor a float value that a kernel writes")

    def _not_observed(self) -> Iterator[str]:
        names = self.plan.names
        groups: dict[str, list[str]] = defaultdict(list)
        for number, reason in self._missing.items():
            groups[reason].append(names[number])
        for reason, found in groups.items():
            yield f"not observed, {counted(len(found), 'value')}: {reason}: {few(found)}"
        if fixed := sum(value.constant for value in self.plan.values):
            yield f"not observed, {counted(fixed, 'value')}: weights and constants, which the program holds"

    def add(self, batch: Batch) -> None:
        values = self.target.values(batch)
        if self.takes_empty(values):
            return
        inside = self.inside(batch, values)
        ran = run_program(self.program, values)
        found = {number: self._measured(number, ran.values, inside) for number in (() if ran.changed else self.taps)}
        self.take(values, found, ran.outputs, inside, changed=ran.changed)

    def _measured(self, number: int, values: Mapping[str, Tensor], inside: Inside | None) -> ValueStatistics:
        tap, value = self.taps[number], self.plan.values[number]
        seen = values[tap.node]
        clamped = None
        if tap.params is not None and not seen.is_floating_point():
            counted = seen if inside is None else inside.of(value.node.name, seen)
            clamped = count_at_ends(counted, tap.params)
        return measured(value, tap.value(seen), self.wanted, clamped, inside)

    def profile(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> Profile:
        said = [*before, *self._not_observed()]
        report = super().profile(said, after)
        if not self.seen:
            why = "; ".join([*said, *self.notes()])
            raise DeploymentError(f"no value of the deployed program was observed: {why}")
        return report


def _source(value: Value) -> Node:
    """The node that makes a value, before it is quantized."""
    source = value.node if value.quantize is None else value.quantize.args[0]
    assert isinstance(source, Node)
    return source


def count_at_ends(integers: Tensor, params: QuantParams) -> int:
    """How many integers lie at or beyond an end of the range; those at an end that stands for 0.0 do not count.

    After a relu, that end holds all that was negative, and was not clamped by the rounding.
    """
    low = params.quant_min - (params.quant_min == params.zero_point)
    high = params.quant_max + (params.quant_max == params.zero_point)
    # In a wider type, since the ends may lie outside that of the integers.
    steps = integers.int()
    return int(((steps <= low) | (steps >= high)).sum())
