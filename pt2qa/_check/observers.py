"""What the observers of a prepared graph have seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2qa._graph.internals.torchao import range_keeper
from pt2qa._quantize.observers import find_observers


@dataclass(frozen=True, slots=True)
class Observed:
    """What one observer has seen, at one of the places where it looks.

    Attributes:
        source: the node whose value it observes.
        low, high: the smallest and largest value, one for each channel where it observes channels: float64 of shape
            (channels,); empty where it never saw a value.
        integers: how many integers its scale has to cover the range with.
    """

    source: Node
    low: Tensor
    high: Tensor
    integers: int

    @property
    def saw(self) -> bool:
        """Whether it saw a value."""
        return self.low.numel() > 0

    @property
    def is_constant(self) -> bool:
        """Whether it observes a weight, or another constant."""
        return self.source.op == "get_attr"


def observed(prepared: GraphModule) -> tuple[Observed, ...]:
    """The observers of a prepared graph that keep a range, in graph order; of a fake-quantize op its observer.

    Those with a fixed scale, and those that choose one for each batch, keep none.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    found = []
    for target, node in find_observers(prepared).items():
        observer, source = range_keeper(modules[target]), node.args[0]
        if observer is None or not isinstance(source, Node) or getattr(observer, "is_dynamic", False):
            continue
        ends = torch.stack([end.detach().double().flatten() for end in (observer.min_val, observer.max_val)])
        # Before the first value an observer holds +inf and -inf, or nothing at all.
        if bool(((ends[0] == torch.inf) & (ends[1] == -torch.inf)).all()):
            ends = ends[:, :0]
        integers = int(getattr(observer, "quant_max", 255)) - int(getattr(observer, "quant_min", 0)) + 1
        found.append(Observed(source, ends[0], ends[1], integers))
    return tuple(found)
