"""Places: what a row of a sensitivity report covers, a site, or the sites of a region or a module together.

And exact sensitivity, which runs the model with each place alone quantized: :func:`walk_places`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pt2qa._capture.inputs import detached
from pt2qa._grouping import grouped
from pt2qa._sensitivity.ledger import Place
from pt2qa._sensitivity.report import ALL_SITES
from pt2qa._simulator import op_rules
from pt2qa._simulator.lifetimes import slots_in
from pt2qa._simulator.program import Program, Step
from pt2qa._simulator.simulator import Body, Simulator, bind
from pt2qa.errors import SelectionError

Group = Literal["region", "module"]


@dataclass(frozen=True, slots=True)
class SiteGroup(Place):
    """Sites that are quantized together: one site and its duplicates, or a group, whose ``site`` is -1.

    ``sites`` are indices in ``pair.sites``, duplicates included; ``steps`` are the ops that produce the values or read
    the weights, whose flops are the place's.
    """

    sites: tuple[int, ...] = ()
    steps: frozenset[int] = frozenset()

    def place(self, flops: Mapping[int, float]) -> Place:
        """What the row is about; ``flops`` are by step, per sample."""
        own, total = sum(flops.get(step, 0.0) for step in self.steps), sum(flops.values())
        known = {each.name: getattr(self, each.name) for each in fields(Place)}
        return Place(**{**known, "flops": own, "flops_share": own / total if total else 0.0})


def find_site_groups(program: Program, group: Group | None) -> tuple[SiteGroup, ...]:
    """The places of a program in the order of their first site.

    An activation belongs to the op that produces it, a weight to the op that reads it first, so each site is in one
    group.  A value that is quantized twice with equal parameters is one place: its copies cannot differ.
    """
    if group not in (None, *get_args(Group)):
        raise SelectionError(
            f"cannot group by {group!r}; expected one of {', '.join(get_args(Group))}, or None for single sites."
        )
    single = _single_places(program)
    if group is None:
        return single
    members: dict[object, list[SiteGroup]] = defaultdict(list)
    for place in single:
        if not place.steps:
            members[place.name].append(place)  # an input of the model belongs to nothing
        else:
            members[place.region if group == "region" else (place.module,)].append(place)
    return tuple(_together(program, places, group) for places in members.values())


def _single_places(program: Program) -> tuple[SiteGroup, ...]:
    # Sites of the same value with the same parameters, by the first of them.
    copies = grouped(
        (program.steps[program.producers[step.duplicate_of]].site, step.site)
        for step in program.steps
        if step.site is not None and step.duplicate_of is not None
    )
    # Reversed, so that the first step that reads a constant wins.
    readers = {slot: step for step in reversed(program.steps) for slot in step.constants}
    duplicates, places = {site for later in copies.values() for site in later}, []
    for site in program.sites:
        if site.index in duplicates:
            continue
        place = SiteGroup(
            name=site.name,
            kind="activation" if site.kind == "activation" else "weight",
            op=site.op,
            dtype=site.params.dtype,
            site=site.index,
            handle=site.handle,
            sites=(site.index, *copies[site.index]),
        )
        home = readers.get(site.source)
        if site.source != site.result:
            producer = program.producers.get(program.unrounded(site.source))
            home = None if producer is None else program.steps[producer]
        if home is not None:  # else it is a model input
            place = replace(place, module=home.module, region=home.region, steps=frozenset({home.index}))
        places.append(place)
    return tuple(places)


def _together(program: Program, places: list[SiteGroup], group: Group) -> SiteGroup:
    first = places[0]
    merged = replace(
        first,
        kind="activation" if any(place.kind == "activation" for place in places) else "weight",
        site=-1,
        dtype=", ".join(dict.fromkeys(place.dtype for place in places)),
        sites=tuple(sorted(site for place in places for site in place.sites)),
        steps=frozenset(step for place in places for step in place.steps),
    )
    if not first.steps:
        return merged
    if group == "region":
        region = program.regions[first.region]
        op = program.steps[region.steps[0]]
        return replace(merged, name=region.name, op=op.op, handle=op.handle, module=op.module)
    step = program.steps[min(first.steps)]
    return replace(
        merged, name=first.module or "(top level)", op=step.module_type.rpartition(".")[2], handle=-1, region=-1
    )


def steps_behind(program: Program, place: SiteGroup) -> Iterator[int]:
    """The steps that read something that a place changes, in order."""
    own = (program.sites[site] for site in place.sites)
    changed = {site.source for site in own if site.source == site.result}  # constants and nested graphs
    for step in program.steps:
        if step.site in place.sites or not changed.isdisjoint((*step.reads, *step.constants)):
            changed.add(step.out)
            yield step.index


Finish = Callable[[int, Any], None]
"""Consumes the number of a place and the graph's outputs with it quantized."""


def walk_places(
    simulator: Simulator, values: Sequence[Any], places: Sequence[SiteGroup], wanted: Collection[int], finish: Finish
) -> Any:
    """Runs each wanted place alone; returns the reference's outputs, computed by the walk.

    Upstream of a place the perturbed run equals the reference, so a fork starts there and runs only the ops whose
    inputs changed.  Their other inputs come from the reference: values that the walk has passed, or values still ahead
    of it (on a branch that the place does not reach), which are computed early, once, and kept until the walk reads
    them.

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
