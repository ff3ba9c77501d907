"""What is wrong with the data is the first thing that every report says: batches set apart, values no range holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa import Edit
from pt2qa._diagnosis.report import _tried
from pt2qa._reconfigure.analysis import _verdict
from pt2qa._trials.outcome import Outcome
from pt2qa.report import InputRange, TriedRow
from tests.flows import quantized_pair

Reported = Callable[[pt2qa.QuantizedPair, Any], Any]

FIRST = "The input data contain NaN or infinities in 1 of 3 batches: NaN in the input x (batch 1, sample 2)."


def _repair(pair: pt2qa.QuantizedPair, data: Any) -> Any:
    return pt2qa.repair(pair, data, methods=["ranges"], verify_code=False, progress=False)


def _reconfigure(pair: pt2qa.QuantizedPair, data: Any) -> Any:
    return pt2qa.reconfigure(pair, data, target=90, repairs=[], verify_code=False, progress=False)


def _candidates(pair: pt2qa.QuantizedPair, data: Any) -> Any:
    return pt2qa.compare_quantizers(pair.capture, {"own": pair}, [BATCHES[0]], data, progress=False)


ANALYSES: dict[str, Reported] = {
    "layers": lambda pair, data: pt2qa.compare_layers(pair, data, progress=False),
    "bad cases": lambda pair, data: pt2qa.find_bad_cases(pair, data, progress=False),
    "exact": lambda pair, data: pt2qa.sensitivity(pair, data, method="exact", progress=False),
    "projection": lambda pair, data: pt2qa.sensitivity(pair, data, method="projection", progress=False),
    "budget": lambda pair, data: pt2qa.error_budget(pair, data, progress=False),
    "diagnosis": lambda pair, data: pt2qa.diagnose(pair, data, verify_code=False, progress=False),
    "repair": _repair,
    "reconfiguration": _reconfigure,
    "candidates": _candidates,
    "profile": lambda pair, data: pt2qa.profile(pair, data, side="quantized", progress=False),
    "deployed": lambda pair, data: pt2qa.compare_deployed(pair, data, progress=False),
    "graphs": lambda pair, data: pt2qa.compare_graphs(pair.reference, pair.quantized, data, progress=False),
    "findings": lambda pair, data: pt2qa.check(pair, batches=data, rules=["saturation"], progress=False),
}


def _batch(seed: int, count: int = 4) -> Tensor:
    return torch.rand(count, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1


BATCHES = [_batch(seed) for seed in (1, 2, 3)]


@functools.cache
def _pair() -> pt2qa.QuantizedPair:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)))

    torch.manual_seed(0)
    model = Net()
    shapes = ({0: torch.export.Dim("batch")},)
    capture = pt2qa.capture(model.eval(), BATCHES[0], dynamic_shapes=shapes)
    return pt2qa.quantize(capture, "xnnpack", BATCHES, progress=False)


def _spoilt() -> list[Tensor]:
    broken = BATCHES[1].clone()
    broken[2, 3] = math.nan
    return [BATCHES[0], broken, BATCHES[2]]


@functools.cache
def _reported(analysis: str, data: str) -> Any:
    batches = {
        "sound": BATCHES,
        "nan": _spoilt(),
        "wide": [3 * batch for batch in BATCHES],
        "empty": [BATCHES[0], BATCHES[1][:0], BATCHES[2]],
        "zero": [torch.zeros(4, 8)] * 2,
    }[data]
    return ANALYSES[analysis](_pair(), batches)


@pytest.mark.parametrize("analysis", ANALYSES)
def test_one_nan_batch_of_three_is_the_first_thing_said(analysis: str) -> None:
    report = _reported(analysis, "nan")
    assert report.lines()[0].startswith(FIRST)
    assert FIRST in " ".join(str(report).split())
    assert report.health.batches == 3
    assert [(each.batch, each.sample, each.side, each.name) for each in report.set_apart] == [(1, 2, "batch", "x")]
    assert report.grade() in ("warning", "bad")


@pytest.mark.parametrize("analysis", [name for name in ANALYSES if name not in ("graphs", "findings", "deployed")])
def test_data_wider_than_the_calibration_is_the_first_thing_said(analysis: str) -> None:
    (found,) = _reported(analysis, "wide").input_ranges
    x = torch.cat([3 * batch for batch in BATCHES])
    (site,) = (site for site in _pair().sites if site.name == "x")
    grid = torch.round(x / site.params.scale) + site.params.zero_point
    outside = int(((grid < site.params.quant_min) | (grid > site.params.quant_max)).sum())
    assert found.name == "x"
    assert (found.outside, found.values) == (outside, x.numel())
    assert (found.smallest, found.largest) == (float(x.min()), float(x.max()))
    assert (
        _reported(analysis, "wide")
        .lines()[0]
        .startswith(f"{100 * outside / x.numel():.2f} % of the values of x, which are ")
    )


@pytest.mark.parametrize("analysis", [name for name in ANALYSES if name != "deployed"])
def test_sound_data_take_one_line_after_the_verdict(analysis: str) -> None:
    report = _reported(analysis, "sound")
    assert report.health.is_sound
    (line,) = (line for line in report.lines() if line.startswith("Data: "))
    assert line.startswith("Data: 3 batches, 12 samples, all used")
    assert report.lines()[0] != line
    if analysis != "graphs":  # two graphs have no calibration
        assert line.endswith(" % of the input values outside the calibrated range.")


@pytest.mark.parametrize("analysis", ["layers", "diagnosis", "repair", "profile", "findings"])
def test_empty_batches_and_zeros_are_no_sound_data(analysis: str) -> None:
    assert _reported(analysis, "empty").lines()[0].startswith("No samples in 1 of 3 batches: batch 1.")
    assert _reported(analysis, "zero").lines()[0].startswith("Every input value is zero")


@pytest.mark.parametrize("analysis", ["layers", "bad cases", "exact", "budget", "candidates", "profile"])
def test_shards_have_the_health_of_one_run_and_files_keep_it(analysis: str, tmp_path: Path) -> None:
    data = [3 * batch for batch in BATCHES]
    merged = pt2qa.merge([ANALYSES[analysis](_pair(), part) for part in (data[:1], data[1:])])
    assert merged.health == _reported(analysis, "wide").health
    merged.save(tmp_path / "merged.safetensors")
    assert pt2qa.load(tmp_path / "merged.safetensors").health == merged.health


def test_a_verdict_alone_says_what_is_wrong_with_its_data() -> None:
    assert _reported("diagnosis", "nan").verdict.startswith(
        f"{FIRST} The numbers are of the other 2 batches, 8 samples"
    )
    assert _reported("repair", "nan").verdict.startswith(FIRST)
    assert _reported("reconfiguration", "nan").met == 0
    assert "1 batch set apart could not be measured" in _reported("reconfiguration", "nan").verdict


def test_what_is_finite_in_a_batch_with_nan_counts_only_where_samples_are_ranked_or_profiled() -> None:
    whole = "All finite values count: 12 samples in all"
    for analysis in ("bad cases", "profile"):
        assert whole in _reported(analysis, "nan").summary()
    assert whole not in _reported("layers", "nan").summary()
    for analysis in ("bad cases", "profile", "layers"):
        said = " ".join(_reported(analysis, "empty").summary().split())
        assert "No samples in 1 of 3 batches: batch 1. The numbers are of the other 2 batches, 8 samples" in said


def test_values_at_1e38_are_named_with_the_site_that_holds_the_error() -> None:
    huge = [batch.sign() * 1e38 for batch in BATCHES]
    said = pt2qa.diagnose(_pair(), huge, verify_code=False, progress=False).verdict
    assert said.startswith("100.00 % of the values of x, which are -1e+38 to 1e+38, lie outside the calibrated range, ")
    assert "narrow-calibration at x: the calibration data have x in another unit than the data in use (+3" in said
    assert "No single cause" not in said


def test_positions_that_do_not_count_are_in_no_range() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.fc(x) + 0.0 * keep.float().unsqueeze(-1)

    x, keep = _batch(5, 2 * 3).reshape(2, 3, 8)[..., :4], torch.tensor([[True, True, False], [True, False, False]])
    pair = quantized_pair(Tokens(), (x, keep))
    padded = torch.where(keep.unsqueeze(-1), x, 100.0)
    every, some = (
        next(
            r
            for r in pt2qa.compare_layers(pair, [(padded, keep)], mask=m, progress=False).input_ranges
            if r.name == "x"
        )
        for m in (None, "keep")
    )
    assert (every.outside, every.values) == (12, 24)
    assert (some.outside, some.values) == (0, 12)


def test_reports_of_0_2_say_what_they_know() -> None:
    report = replace(_reported("layers", "nan"), input_ranges=())
    assert report.summary().splitlines()[:2] == [FIRST, "The numbers are of the other 2 batches, 8 samples."]
    assert InputRange("x", -1.0, 1.0, 0.0, 0.0, 0, 0) not in report.health.beyond


def test_a_hundredth_of_a_decibel_is_no_repair() -> None:
    def said(after: float) -> str:
        figures = (Outcome(value, (("output", value),)) for value in (40.0, after))
        return _verdict(*figures, [Edit("float", ("an/op",))])

    assert said(40.03).startswith("Hardly any gain: SQNR 40 dB before, 40.03 dB converted and measured.")
    assert said(40.2).startswith("Repaired at no cost at run time: SQNR 40 dB before, 40.2 dB")


def test_what_could_not_be_measured_is_said_once() -> None:
    rows = [TriedRow("precision", name, "leave it in float", math.nan, "could not be measured") for name in "ab"]
    rows.append(TriedRow("observer", "c", "another observer", 0.5, "it helps too little"))
    assert list(_tried(rows, "dB")) == [
        "observer at c: another observer: +0.5 dB; it helps too little",
        "could not be measured: precision at a: leave it in float; precision at b: leave it in float",
    ]


def test_an_index_without_an_entry_is_the_fault_of_the_batch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 4)).eval()
    good, bad = torch.arange(8).reshape(2, 4), torch.full((2, 4), 10)
    pair = quantized_pair(model, (good,))
    for analysis in (pt2qa.compare_layers, pt2qa.error_budget, pt2qa.find_bad_cases, pt2qa.diagnose, pt2qa.profile):
        with pytest.raises(pt2qa.BatchError, match=r"has an index, at \S*embedding, that the model has no entry for"):
            analysis(pair, [good, bad], progress=False)
