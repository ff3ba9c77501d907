"""Scores of configurations: the simulator with sites switched, nothing prepared anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pt2qa.errors import BatchError
from pt2qa.metrics import ErrorSums
from pt2qa.pairing import QuantizedPair
from pt2qa.reconfiguration.target import Target
from pt2qa.simulator.batches import Batch, as_batch, read_batches
from pt2qa.simulator.outputs import structured


class Scorer:
    """The quality of a pair with any choice of sites on.

    Args:
        pair: the pair.
        batches: what the SQNR is measured on; must start over each time it is iterated.
        target: what is measured.
        inputs_of: from an item of ``batches`` to a batch.
        progress: whether to show a progress bar; None: where stderr is a terminal.
        evaluations: how many configurations were scored before.

    Attributes:
        every: the indices of all sites.
        evaluations: how many configurations were scored.
        noise: Σ of the squared output errors of the configuration that was scored last; nan for a user's metric.
    """

    def __init__(
        self,
        pair: QuantizedPair,
        batches: Iterable[Any],
        target: Target,
        inputs_of: Callable[[Any], Batch] | None,
        progress: bool | None,
        evaluations: int = 0,
    ) -> None:
        self.pair, self.batches, self.target, self.inputs_of = pair, batches, target, inputs_of
        self.progress = progress
        self.every = frozenset(site.index for site in pair.sites)
        self.evaluations = evaluations
        self.noise = float("nan")
        self._known: dict[frozenset[int], tuple[float, float]] = {}
        self._bar = tqdm(
            desc="reconfigure", unit="evaluation", disable=None if progress is None else not progress, leave=False
        )

    def quality(self, on: Collection[int]) -> float:
        """The target's metric with these sites on; each configuration is scored once."""
        sites = frozenset(on)
        if sites not in self._known:
            self.evaluations += 1
            self._bar.update()
            metric = self.target.metric
            if metric is None:
                self._known[sites] = self._sqnr(sites)
            else:
                self._known[sites] = float(metric(SimulatedModel(self.pair, sites))), float("nan")
        quality, self.noise = self._known[sites]
        return quality

    def measured(self, pair: QuantizedPair) -> float:
        """The target's metric of another pair's converted graph."""
        if self.target.metric is not None:
            return float(self.target.metric(pair.quantized))
        return Scorer(pair, self.batches, self.target, self.inputs_of, False).quality({s.index for s in pair.sites})

    def of_float(self) -> float:
        """The user's metric of the float model."""
        assert self.target.metric is not None
        return float(self.target.metric(SimulatedModel(self.pair, frozenset())))

    def _sqnr(self, sites: frozenset[int]) -> tuple[float, float]:
        """SQNR in dB of the worst output, and the noise of all outputs."""
        sums: list[ErrorSums] = []
        seen = False
        on: bool | frozenset[int] = True if len(sites) == len(self.pair.sites) else sites
        for batch in read_batches(self.batches, self.inputs_of):
            values = self.pair.values(batch)
            leaves = [pytree.tree_leaves(self.pair.simulator.run(values, on=state)) for state in (False, on)]
            pairs = list(zip(*leaves, strict=True))
            sums = sums if seen else [ErrorSums() for _ in pairs]
            seen = True
            sums = [
                total.update(ref, quant) if isinstance(ref, Tensor) and ref.shape == quant.shape else total
                for total, (ref, quant) in zip(sums, pairs, strict=True)
            ]
        if not seen:
            raise BatchError("no batch to measure on. Pass a list or a loader that starts over, not an iterator.")
        known = [total.sqnr for total in sums if total.sqnr == total.sqnr]
        return min(known, default=float("nan")), sum(total.noise for total in sums)


class SimulatedModel:
    """A model to call: the simulator with some sites on."""

    def __init__(self, pair: QuantizedPair, on: frozenset[int]) -> None:
        self.pair, self.on = pair, on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, nested as the model nests them."""
        graph_module = self.pair.quantized
        values = self.pair.values(as_batch(args, kwargs, graph_module))
        every = len(self.on) == len(self.pair.sites)
        outputs = self.pair.simulator.run(values, on=True if every else self.on)
        return structured(graph_module, outputs)
