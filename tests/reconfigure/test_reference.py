"""The float model runs once on each batch, whatever the number of configurations; memory for its outputs is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pt2qa
from pt2qa._simulator.data import Data
from pt2qa._simulator.simulator import Simulator
from pt2qa._trials import judge, outcome
from pt2qa._trials.outcome import Reference
from tests.reconfigure.detector import data, detector_pair, measured


@pytest.fixture
def float_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each run of the float model on a simulator."""
    runs: list[int] = []
    run = Simulator.run

    def counted(self: Simulator, values: Any, on: Any = True, **options: Any) -> Any:
        if on is False or on == frozenset():
            runs.append(1)
        return run(self, values, on, **options)

    monkeypatch.setattr(Simulator, "run", counted)
    return runs


def test_the_float_model_is_not_run_again_for_each_configuration(float_runs: list[int]) -> None:
    fixed = pt2qa.reconfigure(detector_pair("x86"), data(), target=100.0, repairs=(), verify_code=False, progress=False)
    assert fixed.evaluations > 20
    # Once on each batch, a few times for the sensitivity of each output and for verification.
    assert len(float_runs) < 12


def test_what_does_not_fit_into_the_memory_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = detector_pair("x86")
    batch = data()[0]
    size = sum(
        leaf.numel() * 4 for leaf in Reference(pair, Data("batches", [batch]))._outputs("", batch, pair.values(batch))
    )
    monkeypatch.setattr(outcome, "KEPT_BYTES", size)  # one of the two batches
    kept = Reference(pair, Data("batches", data()))
    assert kept.runs == 2
    first, second = list(kept), list(kept)
    assert kept.runs == 4
    for left, right in zip(first, second, strict=True):
        assert all(torch.equal(*leaves) for leaves in zip(left.outputs, right.outputs, strict=True))


def test_batches_in_another_order_each_time_are_compared_with_their_own_outputs() -> None:
    class Shuffled:
        order = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.order += 1
            return iter(data()[:: 1 if self.order % 2 else -1])

    pair = detector_pair("x86")
    fixed = pt2qa.reconfigure(pair, Shuffled(), target=1.0, verify_code=False, progress=False)
    assert fixed.stages[0].quality == pytest.approx(min(measured(pair).values()), abs=1e-3)


def test_the_last_number_is_measured_on_the_converted_graph_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Callable[..., Any] = judge.graph_outputs
    graphs: list[Any] = []

    def watched(graph_module: Any, values: Any) -> Any:
        graphs.append(graph_module)
        return [2 * leaf if leaf.is_floating_point() else leaf for leaf in run(graph_module, values)]

    monkeypatch.setattr(judge, "graph_outputs", watched)
    pair = detector_pair("x86")
    fixed = pt2qa.reconfigure(pair, data(), target=5.0, verify_code=False, progress=False)
    assert fixed.pair.quantized in graphs
    assert not fixed.met  # a converted graph that returns the double
    assert fixed.stages[-1].quality == pytest.approx(0.0, abs=0.5)
