"""Ranking, prediction, curve, target and measurement are about one thing: the worst output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._reconfigure.analysis import noises_of
from pt2qa._reconfigure.search import Baseline
from pt2qa._simulator.data import Data
from pt2qa._trials.judge import Judge
from tests.flows import quantized_pair
from tests.reconfigure.detector import data, detector_pair, measured, subsets

QUANTIZERS = pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])


@QUANTIZERS
def test_the_curve_predicts_what_it_measures(quantizer: str) -> None:
    pair = detector_pair(quantizer)
    before = min(measured(pair).values())
    fixed = pt2qa.reconfigure(pair, data(), target=before + 8, repairs=(), verify_code=False, progress=False)
    curve = fixed.to_pandas(part="curve")
    both = curve.dropna()
    assert len(both) >= 2
    assert (both.predicted - both.measured).abs().max() < 2.5  # of all outputs added up it would be off by tens of dB
    assert both.measured[0] == pytest.approx(before, abs=1e-3)


@QUANTIZERS
def test_each_output_is_reported_as_the_graphs_give_it(quantizer: str) -> None:
    pair = detector_pair(quantizer)
    fixed = pt2qa.reconfigure(pair, data(), target=min(measured(pair).values()) + 5, progress=False)
    stages = {stage.name: stage.quality for stage in fixed.stages}
    for stage, each in (("before", pair), ("converted", fixed.pair)):
        direct = measured(each)
        assert stages[stage] == pytest.approx(min(direct.values()), abs=1e-3)
        for name, sqnr in direct.items():
            assert stages[f"{stage}: output.{name}"] == pytest.approx(sqnr, abs=1e-3)
        assert f"dB (output.{min(direct, key=lambda name: direct[name])})" in fixed.verdict


def test_noise_is_known_for_each_output_apart() -> None:
    pair = detector_pair()
    judge = Judge(pair, Data("batches", data()), None, "noises")
    of_site, notes = noises_of(Baseline(judge), None, False)
    names = {site.index: (site.kind, site.name) for site in pair.sites}
    of = {names[site]: noise for site, noise in of_site.items()}
    assert of["weight", "boxes/linear"][0] > 0
    assert of["weight", "boxes/linear"][1] == 0
    assert of["weight", "head/linear"][0] == 0
    assert of["weight", "head/linear"][1] > 0
    assert not [note for note in notes if "no gradient" in note]


@pytest.mark.parametrize(
    ("quantizer", "more"), [("xnnpack", 5.0), ("x86", 5.0), ("x86", 8.0), ("x86", 11.0)], ids=lambda value: f"{value}"
)
def test_no_subset_of_a_plan_meets_the_target_as_well(quantizer: str, more: float) -> None:
    pair = detector_pair(quantizer)
    target = min(measured(pair).values()) + more
    fixed = pt2qa.reconfigure(pair, data(), target=target, repairs=(), verify_code=False, progress=False)
    assert fixed.met
    assert min(measured(fixed.pair).values()) >= target
    assert pair.capture is not None
    for fewer in subsets(fixed.plan.edits):
        plan = pt2qa.OverridePlan(fewer)
        other = pt2qa.quantize(pair.capture, quantizer, data(), overrides=plan, progress=False) if fewer else pair
        assert min(measured(other).values()) < target, f"{len(fewer)} of {len(fixed.plan.edits)} edits are enough"


def test_a_sensitivity_report_of_all_outputs_together_ranks_nothing() -> None:
    pair = detector_pair("x86")
    together = pt2qa.sensitivity(pair, data(), progress=False)
    target = min(measured(pair).values()) + 5
    given = pt2qa.reconfigure(
        pair, data(), target=target, repairs=(), sensitivity=together, verify_code=False, progress=False
    )
    assert (
        given.plan == pt2qa.reconfigure(pair, data(), target=target, repairs=(), verify_code=False, progress=False).plan
    )


def test_outputs_that_do_not_count_are_named() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            scores = self.fc(x)
            return {"scores": scores, "label": scores.argmax(1), "sure": scores.amax(1) > 1}

    torch.manual_seed(0)
    batches = [torch.randn(8, 8) for _ in range(2)]
    pair = quantized_pair(Labelled(), batches[0], "x86", batches=batches)
    said = "integer and boolean outputs are not measured: output.label, output.sure"
    assert said in pt2qa.reconfigure(pair, batches, target=20, verify_code=False, progress=False).notes
    assert said in pt2qa.repair(pair, batches, verify_code=False, progress=False).notes
