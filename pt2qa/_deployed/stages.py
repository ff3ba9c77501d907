"""The outputs of each stage of the way to the device, and how far each is from the stage before and from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pt2qa._capture.exporting import State, run
from pt2qa._deployed.rows import StageRow
from pt2qa._exclusion import computes
from pt2qa._metrics import NoiseSums, noise_sums
from pt2qa._quantize.pairing import QuantizedPair
from pt2qa._simulator.batches import Batch, as_call
from pt2qa._simulator.outputs import leaves_of
from pt2qa._simulator.verification import graph_outputs


@dataclass
class Stages:
    """What runs at each stage before the pair's own graphs, and the sums between the outputs of all stages.

    ``sums`` are by stage, of each output against the stage before and against the first.
    """

    pair: QuantizedPair
    notes: list[str] = field(default_factory=list)
    sums: dict[str, list[tuple[NoiseSums, NoiseSums]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.eager: nn.Module | None = None if self.pair.capture is None else self.pair.capture.eager
        if self.eager is None or self.eager.training:
            why = "the pair does not hold the eager model" if self.eager is None else "the model is in training mode"
            self.notes.append(f"{why}: the stages begin with its program")
            self.eager = None

    @computes
    def before(self, batch: Batch, values: list[Any]) -> dict[str, list[Tensor]]:
        """The outputs of the stages that the simulator does not run; ``values`` are the batch, flat."""
        found = {}
        if self.eager is not None:
            state = State(self.eager)
            try:
                with torch.no_grad():
                    found["eager"] = leaves_of(run(self.eager, *as_call(batch, self.pair.quantized)))
            finally:
                state.restore()
        if self.pair.float_graph is not None:
            found["capture"] = leaves_of(graph_outputs(self.pair.float_graph, values))
        return found

    def add(self, outputs: Mapping[str, Sequence[Tensor]]) -> None:
        """Adds the outputs of a batch at each stage, in order, all at once."""
        first, *_ = stages = list(outputs.values())
        sums = {}
        for before, (name, values) in zip([first, *stages], outputs.items(), strict=False):
            new = [noise_sums(each, ((0, 2), (1, 2))) for each in zip(before, first, values, strict=True)]
            known = self.sums.get(name, [(NoiseSums(), NoiseSums())] * len(new))
            sums[name] = [(a.merge(c), b.merge(d)) for (a, b), (c, d) in zip(known, new, strict=True)]
        self.sums = sums

    def rows(self) -> tuple[StageRow, ...]:
        return tuple(
            StageRow(
                name, math.nan if number == 0 else _worst(step for step, _ in sums), _worst(all_ for _, all_ in sums)
            )
            for number, (name, sums) in enumerate(self.sums.items())
        )


def _worst(sums: Any) -> float:
    """The smallest SQNR; nan only if no output has one."""
    return min((each.sqnr for each in sums if not math.isnan(each.sqnr)), default=math.nan)
