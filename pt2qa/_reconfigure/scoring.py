"""Scores of configurations: the simulator with sites switched, without preparing again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm import tqdm

from pt2qa._metrics import ErrorSums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import everywhere, same_everywhere
from pt2qa._reconfigure.reference import Item, Reference
from pt2qa._reconfigure.target import Target
from pt2qa._simulator.batches import as_batch
from pt2qa._simulator.outputs import structured
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import graph_outputs
from pt2qa.errors import SelectionError


@dataclass(frozen=True)
class Quality:
    """The measured quality of a configuration; ``missing`` says which outputs have no number and why.

    ``value`` is what the target limits: the SQNR of the worst of the ``outputs`` in dB, nan if one has none, or the
    user's metric, for which ``outputs`` is empty.
    """

    value: float
    outputs: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def rank(self) -> float:
        """The value for comparisons: nan ranks below any number."""
        return -math.inf if math.isnan(self.value) else self.value


class Tally:
    """Number of configurations scored, over all pairs of a search, with a progress bar."""

    def __init__(self, progress: bool | None) -> None:
        self.count = 0
        self.bar = tqdm(
            desc="reconfigure", unit="evaluation", disable=None if progress is None else not progress, leave=False
        )

    def add(self) -> None:
        """Counts one more."""
        self.count += 1
        self.bar.update()


class Scorer:
    """The quality of a pair with any set of sites on; SQNR requires a floating-point output."""

    def __init__(self, pair: QuantizedPair, reference: Reference, target: Target, tally: Tally) -> None:
        if target.metric is None and not reference.names:
            raise SelectionError(
                "no output is a floating-point tensor, so there is no SQNR to reach. "
                "Pass target=pt2qa.Target(at_least, metric=a function of a model)."
            )
        self.pair, self.reference, self.target, self.tally = pair, reference, target, tally
        self.every = frozenset(site.index for site in pair.sites)
        self._known: dict[frozenset[int], Quality] = {}

    def of(self, pair: QuantizedPair) -> Scorer:
        """The same for another pair of the model."""
        return Scorer(pair, self.reference.of(pair), self.target, self.tally)

    def quality(self, on: Collection[int]) -> Quality:
        """The quality with these sites on; each configuration is scored once."""
        sites = frozenset(on)
        if sites not in self._known:
            self.tally.add()
            model = SimulatedModel(self.pair, sites)
            self._known[sites] = self._measured(model, lambda item: model.run(item.values))
        return self._known[sites]

    def converted(self) -> Quality:
        """The quality of the pair's converted graph itself."""
        return self._measured(self.pair.quantized, lambda item: graph_outputs(self.pair.quantized, item.values))

    def of_float(self) -> float:
        """The user's metric of the float model; it must be a number, so that a share of it can be a target."""
        assert self.target.metric is not None
        value = float(self.target.metric(SimulatedModel(self.pair, frozenset())))
        if math.isnan(value):
            raise SelectionError(
                f"target: {self.target.name} of the float model is nan, so there is no share of it to reach. "
                "Return a number, or pass of_float=False."
            )
        return value

    def _measured(self, model: Callable[..., Any], run: Callable[[Item], Any]) -> Quality:
        if self.target.metric is not None:
            return Quality(same_everywhere(float(self.target.metric(model)), self.target.name))
        names = self.reference.names
        sums = [ErrorSums() for _ in names]
        for item in self.reference:
            outputs = self.reference.floating(run(item), item.batch, item.values)
            sums = [
                total.update(ref, _of_shape(name, ref, quant))
                for name, total, ref, quant in zip(names, sums, item.outputs, outputs, strict=True)
            ]
        sums, *others = everywhere(sums)
        for other in others:
            sums = [total.merge(further) for total, further in zip(sums, other, strict=True)]
        found = tuple(total.sqnr for total in sums)
        absent = ((name, total) for name, total in zip(names, sums, strict=True) if math.isnan(total.sqnr))
        missing = tuple(f"{name} has no SQNR: {total.reason}" for name, total in absent)
        return Quality(math.nan if missing else min(found), found, missing)


def _of_shape(name: str, reference: Tensor, quantized: Tensor) -> Tensor:
    if reference.shape != quantized.shape:
        raise SelectionError(
            f"{name} has the shape {tuple(reference.shape)} in float and {tuple(quantized.shape)} quantized, so there "
            "is no SQNR. Pass target=pt2qa.Target(at_least, metric=a function of a model)."
        )
    return quantized


class SimulatedModel:
    """A callable model: the simulator with some sites on; ``simulator`` is another one than the pair's own."""

    def __init__(self, pair: QuantizedPair, on: frozenset[int], simulator: Simulator | None = None) -> None:
        self.pair, self.on, self.simulator = pair, on, simulator or pair.simulator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, in the model's structure."""
        graph_module = self.pair.quantized
        return structured(graph_module, self.run(self.pair.values(as_batch(args, kwargs, graph_module))))

    def run(self, values: list[Any]) -> Any:
        """The outputs as the graph returns them, from flat inputs."""
        every = len(self.on) == len(self.pair.sites)
        return self.simulator.run(values, on=True if every else self.on)
