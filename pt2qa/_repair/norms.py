"""What shifts of norms are, what they cost, ranges by channel, and how a site rounds another range."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere
from pt2qa._sensitivity.played import fitted
from pt2qa._sensitivity.roundings import Rounding, own_rounding, rounding
from pt2qa._simulator.program import Site, Step
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials.folds import Folds
from pt2qa.overrides.plan import Edit, in_base64


@dataclass(frozen=True, slots=True)
class FittedNorms:
    """Shifts of some norms, by the ops of the edit: float32 of shape (channels,)."""

    weaker: ClassVar[tuple[()]] = ()

    values: Mapping[tuple[str, ...], Tensor]

    @property
    def edits(self) -> tuple[Edit, ...]:
        return tuple(Edit("shift", ops, values=in_base64(values.tolist())) for ops, values in self.values.items())

    def simulator(self, pair: QuantizedPair) -> Simulator | None:
        """None: observers see other values."""
        return None


def costs_of(gradients: Sequence[Tensor], errors: Iterable[Tensor]) -> Tensor:
    """What the errors of candidates cost the output: float64 of shape (candidates,)."""
    weights = torch.stack([each.square() for each in gradients]).sum(0)
    costs = [(error.square() * weights).sum(dtype=torch.float64) for error in errors]
    return torch.stack(costs).nan_to_num(0.0, 0.0, 0.0).cpu()


def on_all_ranks(parts: Sequence[Sequence[Sequence[Tensor]]]) -> tuple[tuple[Tensor, ...], ...]:
    """The costs of all ranks, by fold."""
    return tuple(
        tuple(torch.stack(each).sum(0) for each in zip(*(costs[fold] for costs in parts), strict=True))
        for fold in (0, 1)
    )


def ranges_by_channel(pair: QuantizedPair, steps: Collection[int], data: Folds) -> dict[int, tuple[Tensor, Tensor]]:
    """The lowest and highest value of some steps' outputs by channel, the last axis, over all data."""
    own: dict[int, tuple[Tensor, Tensor]] = {}

    def visit(step: Step, value: Any) -> None:
        if step.index in steps and isinstance(value, Tensor):
            rows = value.reshape(-1, value.shape[-1]).float().nan_to_num(0.0, 0.0, 0.0)
            low, high = rows.amin(0).cpu(), rows.amax(0).cpu()
            known = own.get(step.index, (low, high))
            own[step.index] = torch.minimum(low, known[0]), torch.maximum(high, known[1])

    for _, values in data:
        pair.simulator.run(values, on=False, visit=visit)
    parts = everywhere(own)
    return {
        step: (
            torch.stack([each[step][0] for each in parts if step in each]).amin(0),
            torch.stack([each[step][1] for each in parts if step in each]).amax(0),
        )
        for step in steps
    }


def rounding_of(pair: QuantizedPair, site: Site | None, low: Tensor, high: Tensor) -> Rounding:
    """How a site would round values of another range; dynamic scales adapt."""
    if site is None:
        return lambda value: value
    if not isinstance(site.params.scale, float):
        return own_rounding(pair.simulator, site)
    params = site.params
    lowest, highest = float(low.min().clamp(max=0.0)), float(high.max().clamp(min=0.0))
    if params.zero_point == 0 and params.quant_min < 0:  # symmetric, or as good as that
        highest = max(-lowest, highest)
        lowest = -highest
    found = fitted(lowest, highest, params.quant_min, params.quant_max)
    return rounding(replace(params, scale=found.scale, zero_point=found.zero_point))
