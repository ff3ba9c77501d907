"""Scores of configurations: the simulator with sites switched, without preparing again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._ranks import same_everywhere
from pt2qa._reconfigure.figures import Figures, figures_of
from pt2qa._reconfigure.reference import Item, Reference
from pt2qa._reconfigure.target import Target
from pt2qa._simulator.batches import as_batch
from pt2qa._simulator.outputs import structured
from pt2qa._simulator.simulator import Simulator
from pt2qa._simulator.verification import Outputs, Verification, graph_outputs
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
        self._figures: dict[frozenset[int], Figures] = {}

    def of(self, pair: QuantizedPair) -> Scorer:
        """The same for another pair of the model."""
        return Scorer(pair, self.reference.of(pair), self.target, self.tally)

    def quality(self, on: Collection[int]) -> Quality:
        """The quality with these sites on; each configuration is scored once."""
        sites = frozenset(on)
        if self.target.metric is None:
            return _quality(self.figures(sites))
        if sites not in self._known:
            self.tally.add()
            self._known[sites] = self._metric(SimulatedModel(self.pair, sites))
        return self._known[sites]

    def figures(self, on: Collection[int]) -> Figures:
        """The figures of the outputs with these sites on; with all of them, held against the converted graph."""
        sites = frozenset(on)
        if sites not in self._figures:
            self.tally.add()
            model = SimulatedModel(self.pair, sites)
            run = verified_run(self.pair) if sites == self.every else (lambda item: model.run(item.values))
            self._figures[sites] = figures_of(self.reference, run)
        return self._figures[sites]

    def converted(self) -> Quality:
        """The quality of the pair's converted graph itself."""
        graph = self.pair.quantized
        if self.target.metric is not None:
            return self._metric(graph)
        return _quality(figures_of(self.reference, lambda item: graph_outputs(graph, item.values)))

    def _metric(self, model: Callable[..., Any]) -> Quality:
        assert self.target.metric is not None
        return Quality(same_everywhere(float(self.target.metric(model)), self.target.name))

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


def verified_run(pair: QuantizedPair) -> Callable[[Item], Any]:
    """What a pair's converted graph returns, by the simulator, which is held against it."""
    check = Verification(pair.graphs)

    def run(item: Item) -> Any:
        return check.run(lambda: Outputs(quantized=pair.simulator.run(item.values, on=True)), item.values).quantized

    return run


def _quality(figures: Figures) -> Quality:
    return Quality(figures.value, tuple(sqnr for _, sqnr in figures.outputs), figures.missing)


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
