"""Places: what a row of a sensitivity report covers, a site, or the sites of a region or a module together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from pt2qa._sensitivity.ledger import Place
from pt2qa._simulator.program import Program
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
    copies: dict[int | None, list[int]] = defaultdict(list)
    for step in program.steps:
        if step.site is not None and step.duplicate_of is not None:
            copies[program.steps[program.producers[step.duplicate_of]].site].append(step.site)
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
