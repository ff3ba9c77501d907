"""Offsets of a norm's channels moved into the biases around it, as far as that helps the output.

All channels of an activation share one range.  If they lie in different places, it is wider than that of any channel;
with z subtracted from each channel it need not be.  What reads the norm adds it again: linears in their bias, as
``weight @ z``, and a residual in the bias of the linear whose output is added there.  The output of that linear moves
instead, which is why it has to be counted where it is rounded, too.  Two shifts are tried for each norm:

- all channels around 0;
- the smallest ones with which all channels lie within the range of the widest.

The first is better where ranges are drawn in afterwards, the second moves less of what is added.  For each norm, one of
them, or none, is what costs the output least, by the ranges that sites have then: see :mod:`pt2qa._repair.groups`.

Source:
    the shift of each channel is that of "Outlier Suppression+: Accurate quantization of large language models by
    equivalent and effective shifting and scaling" (Wei et al., 2023), there around 0, and not across a residual.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._repair.groups import Group, add_up, groups_with
from pt2qa._repair.guard import Fit
from pt2qa._repair.ranges import moved
from pt2qa._report.prose import counted
from pt2qa._sensitivity.roundings import Rounding, rounding, with_roundings
from pt2qa._simulator.program import Program
from pt2qa._trials.outcome import Folds
from pt2qa.errors import SelectionError
from pt2qa.overrides.channels import Chain
from pt2qa.overrides.parameters import norms_in, with_folded_norms
from pt2qa.overrides.plan import Edit, in_base64

LEAST = 0.1
"""The share of a norm's cost that a shift must save, against none, and against one that is tried before it; and that of
all norms' cost that all shifts must save, so that calibrating again is worth it."""


@dataclass(frozen=True, slots=True)
class FittedShifts(Fit):
    """A shift for each label, float64."""

    look: Shifting
    table: Tensor

    @property
    def edits(self) -> tuple[Edit, ...]:
        by_chain = ((chain.ops, self.table[chain.labels]) for chain in self.look.chains)
        return tuple(Edit("shift", ops, values=in_base64(own.tolist())) for ops, own in by_chain if bool(own.any()))

    def program(self, pair: QuantizedPair) -> Program:
        program = pair.program
        constants = {(each.reader, each.argument): each for each in program.constants}
        for side in (side for chain in self.look.chains for side in chain.sides):
            bias, shift = constants[side.op, side.argument], self.table[side.labels] * side.power
            if side.axis:
                shift = constants[side.op, 1].reference.detach().cpu().double() @ shift
            value = bias.quantized
            stored = (value.cpu().double() + shift.reshape(value.shape)).to(value)
            constants[side.op, side.argument] = replace(bias, stored=stored)
        roundings: dict[int, Rounding] = {}
        for group in self.look.groups:
            if group.group is not None:
                before, after = (_shifted(group, table) for table in (torch.zeros_like(self.table), self.table))
                own = rounding(moved(group.group, before, after))
                roundings |= dict.fromkeys((site.index for site in group.sites), own)
        return with_roundings(replace(program, constants=tuple(constants.values())), roundings)


@dataclass(frozen=True, slots=True)
class Shifting:
    """What one look at the data tells about the chains of norms, and the groups of sites that round what they move."""

    name: ClassVar[str] = "shifting"

    left_out: str

    chains: tuple[Chain, ...]
    groups: tuple[Group, ...]
    count: int

    @classmethod
    def look(cls, pair: QuantizedPair, data: Folds) -> Shifting:
        assert pair.float_graph is not None, "what is repaired was captured"
        channels = norms_in(with_folded_norms(pair.float_graph), pair.names)
        groups, chains = groups_with(pair, channels)
        at_norms = [each.labels.flatten() for group in groups for each in group.values if each.degree > 0]
        rounded = torch.cat([torch.tensor([0]), *at_norms])
        chains = tuple(chain for chain in chains if bool(torch.isin(chain.labels, rounded).any()))
        if not chains:
            raise SelectionError("no quantized norm has a bias that the biases around it can absorb")
        own = torch.cat([chain.labels for chain in chains])
        groups = tuple(group for group in groups if bool(torch.isin(group.labels, own).any()))
        add_up(pair, data, groups)
        norms = [step.name for step in pair.program.steps if step.op == "layer_norm"]
        left = len({*norms}.difference(chain.ops[0] for chain in chains))
        left_out = f"{left} of {counted(len(norms), 'norm')} unchanged: not quantized, or no biases to absorb a shift"
        return cls(left_out if left else "", chains, groups, channels.count)

    def fit(self, folds: Collection[int]) -> FittedShifts:
        none = torch.zeros(self.count, dtype=torch.float64)
        table, before, saved = none, 0.0, 0.0
        for chain in self.chains:
            groups = [group for group in self.groups if bool(torch.isin(group.labels, chain.labels).any())]
            tried = [none.index_copy(0, chain.labels, shift) for shift in self._candidates(chain)]
            costs = [sum(_cost(group, each, folds) for group in groups) for each in tried]
            best = 0
            for candidate, cost in enumerate(costs):
                if cost < costs[best] * (1 - LEAST):
                    best = candidate
            table = table + tried[best]
            before, saved = before + costs[0], saved + costs[0] - costs[best]
        return FittedShifts(self, table if saved >= before * LEAST else none)

    def _candidates(self, chain: Chain) -> Iterator[Tensor]:
        """Shifts of the channels of a norm: none, around 0, and into the range of the widest."""
        low, high = (torch.full((self.count,), end, dtype=torch.float64) for end in (math.inf, -math.inf))
        for group in self.groups:
            for place, each in enumerate(group.values):
                if each.degree > 0:
                    low.scatter_reduce_(0, group.labels, group.ends[0, place], "amin")
                    high.scatter_reduce_(0, group.labels, group.ends[1, place], "amax")
        low, high = low[chain.labels], high[chain.labels]
        yield torch.zeros_like(low)
        if bool((low <= high).all()):
            yield (low + high) / 2
            widest = int((high - low).argmax())
            yield (high - high[widest]).clamp(min=0.0) + (low - low[widest]).clamp(max=0.0)


def _shifted(group: Group, table: Tensor) -> tuple[float, float]:
    """The range, with 0, of all values that share one, shifted."""
    low, high = group.ends - group.degrees * table[group.labels]
    return min(float(low.min()), 0.0), max(float(high.max()), 0.0)


def _cost(group: Group, table: Tensor, folds: Collection[int]) -> float:
    low, high = _shifted(group, table)
    params = group.sites[0].params
    width = 2 * max(-low, high) if group.group is not None and group.group.symmetric else high - low
    step = width / (params.quant_max - params.quant_min)
    return step**2 / 12 * float(group.gains[list(folds), 0].sum())
