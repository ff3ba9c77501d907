"""The positions that count in a profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from pt2qa._profile.plan import Plan
from pt2qa._profile.watch import ValueStatistics, Wanted
from pt2qa._report.prose import few
from pt2qa._simulator.batches import Batch, count_samples
from pt2qa._simulator.positions import Axes, Inside, Mask, without_axes


class Masked:
    """A graph with a mask, or without one; ``name`` is the mask's, empty without one."""

    def __init__(self, graph: GraphModule, mask: Mask | None) -> None:
        self._axes = None if mask is None else Axes(graph, mask)
        self.name = "" if self._axes is None else self._axes.name

    def of(self, batch: Batch, values: Sequence[Any]) -> Inside | None:
        """Which positions of a batch count; None: all do."""
        return None if self._axes is None or not count_samples(list(values)) else self._axes.of(batch, values)

    def notes(self, plan: Plan, seen: Mapping[int, ValueStatistics], wanted: Wanted) -> Iterator[str]:
        """What is not masked, and what has no numbers by channel because of the mask."""
        if self._axes is None or self._axes.layouts is None:
            return
        names: dict[int, str] = {}
        for place in plan.places:
            if place.value in seen and not plan.values[place.value].constant:
                names.setdefault(place.value, place.of)
        layouts = {number: self._axes.layouts.get(plan.values[number].node.name) for number in names}
        yield from without_axes([names[number] for number, layout in layouts.items() if layout is None], len(names))
        along = [
            names[number]
            for number, layout in layouts.items()
            if layout is not None and seen[number].channels is None and len(seen[number].shape) > 1
        ]
        if along and wanted.per_channel:
            yield f"no numbers by channel, the channels are samples or positions: {few(along, 3)}"
