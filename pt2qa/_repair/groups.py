"""Sites that share a range, by the labels of their values: what changes of channels do to ranges, and what that costs.

The range of each label at each site comes from one forward and one backward pass of each batch, and with it::

    sum(g**2)          and          sum((g * x)**2)

with g the gradients of random projections of the output.  An error of a rounding to steps costs ``step**2 / 12`` times
the first, to first order and as if the errors of elements were independent; at most the second, where all becomes 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._repair.guard import squared, visit_gradients
from pt2qa._repair.ranges import RangeGroup, groups_in
from pt2qa._sensitivity.gradients import float_tensors
from pt2qa._simulator.program import Site, Step
from pt2qa._trials.outcome import Add, Folds, Item, Sums
from pt2qa.overrides.channels import Chain, Channels, Labelled


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that share a range, or one that computes its own from each batch, if there is no ``group``.

    Attributes:
        values: the labels of each site's value.
        labels: all of these, each once, and 0.
        ends: the range of each label at each site, infinite the wrong way round without one: of shape (2, sites,
            labels).
        gains: by fold, the sums of g**2, and of (g * x)**2, likewise: of shape (2, 2, sites, labels).
    """

    sites: tuple[Site, ...]
    group: RangeGroup | None
    values: tuple[Labelled, ...]
    labels: Tensor
    ends: Tensor
    gains: Tensor

    @property
    def degrees(self) -> Tensor:
        """Of the values, of shape (sites, 1)."""
        return torch.tensor([each.degree for each in self.values], dtype=torch.float64)[:, None]

    @classmethod
    def of(cls, sites: tuple[Site, ...], group: RangeGroup | None, values: tuple[Labelled, ...]) -> Group:
        labels = torch.cat([torch.tensor([0]), *(each.labels.flatten() for each in values)]).unique()
        ends = torch.tensor([math.inf, -math.inf], dtype=torch.float64)[:, None, None]
        gains = torch.zeros(2, 2, len(sites), len(labels), dtype=torch.float64)
        return cls(sites, group, values, labels, ends.repeat(1, *gains.shape[2:]), gains)

    def add(self, fold: int, place: int, value: Tensor, gradients: Sequence[Tensor]) -> None:
        if not value.numel():
            return
        labels = fitting(self.values[place].labels, value)
        axes = [axis for axis, size in enumerate(labels.shape) if size == 1]
        index = torch.searchsorted(self.labels, labels.flatten())
        value = value.float().nan_to_num(0.0, 0.0, 0.0)
        squares = squared(gradients)
        for sums, how, kept in (
            (self.ends[0, place], "amin", value),
            (self.ends[1, place], "amax", value),
            (self.gains[fold, 0, place], "sum", squares),
            (self.gains[fold, 1, place], "sum", squares * value.square()),
        ):
            kept = (getattr(kept, how)(axes, keepdim=True) if axes else kept).cpu().double().flatten()
            sums.scatter_reduce_(0, index, kept, how)


def fitting(labels: Tensor, value: Tensor) -> Tensor:
    """Labels for a value with more or fewer samples, which may share an axis with heads."""
    labels = labels if labels.dim() == value.dim() else labels.reshape([1] * value.dim())
    for axis, size in enumerate(value.shape):
        if labels.shape[axis] not in (1, size):
            labels = labels.index_select(axis, torch.arange(size) % labels.shape[axis])
    return labels


def groups_with(pair: QuantizedPair, channels: Channels) -> tuple[tuple[Group, ...], tuple[Chain, ...]]:
    """The groups of sites with labels, and their chains, but for those where a site's range is fixed."""
    steps = Counter(step.name for step in pair.program.steps if step.site is None)
    none = Labelled(torch.tensor(0))
    values = {
        site.index: channels.values.get(site.name, none) if steps[site.name] == 1 else none
        for site in pair.sites
        if site.kind == "activation"
    }
    shared = [(group.sites, group) for group in groups_in(pair)]
    static = {site for sites, _ in shared for site in sites}
    groups, fixed = [], [torch.tensor([0])]
    for sites, group in [*shared, *(((site,), None) for site in values if site not in static)]:
        own = tuple(values[site] for site in sites)
        if group is None and pair.sites[sites[0]].params.scale is not None:
            fixed.append(own[0].labels.flatten())
        elif group is not None or own[0].labels.any():
            groups.append(Group.of(tuple(pair.sites[site] for site in sites), group, own))
    known = torch.cat([each.labels for each in groups] or [torch.tensor([0])])
    return tuple(groups), tuple(
        chain
        for chain in channels.chains
        if torch.isin(chain.labels, known).any() and not torch.isin(chain.labels, torch.cat(fixed)).any()
    )


def add_up(
    pair: QuantizedPair,
    data: Folds,
    groups: Sequence[Group],
    elsewhere: Callable[[Step, Sequence[Tensor], Any, Add], None] = lambda step, gradients, env, add: None,
) -> tuple[Sums, Sums]:
    """Fills in the ends and gains of groups; returns the sums of what is added at steps that are no sites of these."""
    places = {site.index: (group, place) for group in groups for place, site in enumerate(group.sites)}

    def add_batch(item: Item, add: Add) -> None:
        def visit(step: Step, gradients: Sequence[Tensor], env: Any) -> None:
            if step.site not in places:
                elsewhere(step, gradients, env, add)
            elif step.duplicate_of is None:
                group, place = places[step.site]
                [value] = float_tensors(env[step.reads[0]])
                group.add(data.fold_of[item.key], place, value, gradients)

        visit_gradients(pair, item, visit)

    sums = data.summed(add_batch)
    parts = everywhere([(group.ends, group.gains) for group in groups])
    for number, group in enumerate(groups):
        ends, gains = (torch.stack([own[number][which] for own in parts]) for which in (0, 1))
        group.ends.copy_(torch.stack([ends[:, 0].amin(0), ends[:, 1].amax(0)]))
        group.gains.copy_(gains.sum(0))
    return sums
