"""Exact sensitivity: walks the reference once and forks at each place with that place alone quantized.

Upstream of a place the perturbed run equals the reference, so a fork starts there and runs only the ops whose inputs
changed.  Their other inputs come from the reference: values that the walk has passed, or values still ahead of it (on a
branch that the place does not reach), which are computed early, once, and kept until the walk reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from pt2qa._sensitivity.metrics import detached
from pt2qa._sensitivity.report import ALL_SITES
from pt2qa._sensitivity.site_groups import SiteGroup, steps_behind
from pt2qa._simulator import op_rules
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Step
from pt2qa._simulator.simulator import Body, Simulator, bind

Finish = Callable[[int, Any], None]
"""Consumes the number of a place and the graph's outputs with it quantized."""


def walk_places(
    simulator: Simulator, values: Sequence[Any], places: Sequence[SiteGroup], wanted: Collection[int], finish: Finish
) -> Any:
    """Runs each wanted place alone; returns the reference's outputs, computed by the walk.

    ``ALL_SITES`` forks before the first op, with every site on.  ``finish`` must not keep the outputs.
    """
    if not simulator.program.may_share:
        # In-place ops that write to other values: no value can be reused from another run.
        for number in sorted(wanted):
            finish(number, simulator.run(values, on=True if number == ALL_SITES else places[number].sites))
        return simulator.run(values, on=False)
    return _Walk(simulator, values).run(places, wanted, finish)


def whole_model(simulator: Simulator, values: Sequence[Any]) -> tuple[Any, Any]:
    """Copies of the outputs of the reference and the quantized model, computed by the walk that runs the places."""
    found: dict[int, Any] = {}
    reference = walk_places(simulator, values, (), [ALL_SITES], found.__setitem__)
    return detached(reference), detached(found[ALL_SITES])


class _Walk:
    """The reference's values at one point of the graph, and some ahead of it."""

    def __init__(self, simulator: Simulator, values: Sequence[Any]) -> None:
        self.simulator, self.program = simulator, simulator.program
        self.reference = simulator.environment(values, False)
        self.known = set(self.program.inputs) | {constant.slot for constant in self.program.constants}
        self.outputs = frozenset(slots_in(self.program.outputs))

    def run(self, places: Sequence[SiteGroup], wanted: Collection[int], finish: Finish) -> Any:
        on = {number: None if number == ALL_SITES else frozenset(places[number].sites) for number in wanted}
        starts, last = defaultdict[int, list[int]](list), len(self.program.steps)
        for number in sorted(wanted):
            first = 0 if number == ALL_SITES else next(steps_behind(self.program, places[number]), last)
            starts[first].append(number)
        with torch.no_grad():
            for index, step in enumerate((*self.program.steps, None)):
                for number in starts[index]:
                    finish(number, self._fork(index, on[number]))
                if step is not None:
                    self._value(step.out)
                    for slot in step.releases:
                        self.reference[slot] = None
        return bind(self.program.outputs, self.reference)

    def _value(self, slot: int) -> Any:
        """A value of the reference; computed now if the walk has not reached it."""
        open_slots = [slot]
        while open_slots:
            top = open_slots[-1]
            if top in self.known:
                open_slots.pop()
                continue
            step = self.program.steps[self.program.producers[top]]
            missing = [read for read in step.reads if read not in self.known]
            if missing:
                open_slots += missing
                continue
            if step.site is None:
                self.reference[top] = self.simulator.call(step, self.reference, False)
            else:
                self.reference[top] = self.reference[step.reads[0]]
            self.known.add(top)
        return self.reference[slot]

    def _fork(self, start: int, on: frozenset[int] | None) -> Any:
        """The graph's outputs with some sites on; None for all, including constants without a site."""
        changed: dict[int, Any] = {}
        for constant in self.program.constants:
            value = self.simulator.on[constant.slot]
            if on is None or constant.site in on:
                changed[constant.slot] = value
            elif isinstance(value, Body) and not on.isdisjoint(value.sites):
                changed[constant.slot] = value.switched(on)
        constants = frozenset(changed)
        owned: set[int] = set()
        for step in self.program.steps[start:]:
            quantizes = step.site is not None and (on is None or step.site in on)
            if quantizes or not changed.keys().isdisjoint(step.reads) or not constants.isdisjoint(step.constants):
                self._run_changed(step, changed, owned, quantizes)
            for slot in step.releases:
                changed.pop(slot, None)
        ahead = {slot: changed[slot] if slot in changed else self._value(slot) for slot in self.outputs}
        return bind(self.program.outputs, ahead)

    def _run_changed(self, step: Step, changed: dict[int, Any], owned: set[int], quantizes: bool) -> None:
        """Runs a step of a fork; ``owned`` are the slots whose memory the fork itself allocated."""
        source = step.reads[0] if step.reads else -1
        if step.site is not None and not quantizes:
            changed[step.out] = changed[source]
            if source in owned:
                owned.add(step.out)
            return
        own = {slot: changed[slot] if slot in changed else self._value(slot) for slot in (*step.reads, *step.constants)}
        reuse = step.reuse and source in owned
        if step.site is None:
            changed[step.out] = self.simulator.call(step, own, reuse)
            if op_rules.allocates(step.function):
                owned.add(step.out)
        elif step.duplicate_of in changed:
            changed[step.out] = changed[step.duplicate_of]
        else:
            value: Tensor = own[source]
            changed[step.out] = self.simulator.site_function(step)(value, out=value if reuse else None)
            owned.add(step.out)
