"""Turns what was seen into the rows and arrays of a report."""

from __future__ import annotations

from collections.abc import Sequence

from pt2qa._profile.done import Done
from pt2qa._profile.plan import Plan
from pt2qa._profile.report import Profile
from pt2qa._profile.rows import ProfileRow
from pt2qa._profile.sums import described_by, is_uneven, numbers_of, packed_values
from pt2qa._profile.target import ProfileTarget
from pt2qa._profile.watch import Wanted
from pt2qa._report.prose import few
from pt2qa._simulator.lifetimes import UNWRITTEN


def profile_of(
    subject: ProfileTarget,
    plan: Plan,
    done: Done,
    wanted: Wanted,
    notes: Sequence[str],
) -> Profile:
    """The report.  Values that are not tensors, such as sizes, have no rows."""
    seen = done.seen
    numbers = {number: position for position, number in enumerate(sorted(seen))}
    described = {number: described_by(plan.values[number], seen[number]) for number in seen}
    rows = tuple(
        ProfileRow(
            name=place.name.name,
            module=place.name.module,
            op=place.name.op,
            role=place.role,
            argument=place.argument,
            of=place.of,
            source=place.source,
            value=numbers[place.value],
            handle=place.handle,
            **numbers_of(described[place.value], seen[place.value]),
        )
        for place in plan.places
        if place.value in seen
    )
    ordered = sorted(seen)
    uneven = [place for place in plan.places if place.value in seen and is_uneven(seen[place.value])]
    extra = [f"{place.name.name}: no numbers by channel, batches differ in the channel axis" for place in uneven]
    if plan.unwritten:
        extra.append(f"not measured, {UNWRITTEN}: {few(plan.unwritten)}")
    return Profile(
        rows=rows,
        **packed_values([described[number] for number in ordered], [seen[number] for number in ordered], wanted),
        side=subject.side,
        quantizer=subject.quantizer,
        batches=done.batches,
        samples=done.samples,
        notes=tuple(dict.fromkeys((*subject.notes, *extra, *notes))),
        model=subject.model,
        environment=subject.environment,
        set_apart=done.health.set_apart,
        input_ranges=done.health.input_ranges,
    )
