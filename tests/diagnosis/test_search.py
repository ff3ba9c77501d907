"""Which remedies a search measures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pt2qa._diagnosis.analysis import _needed
from pt2qa._diagnosis.case import Case, Hypothesis
from pt2qa._diagnosis.search import Search, _how
from pt2qa._diagnosis.worth import Worth
from pt2qa._repair.guard import Method
from pt2qa._simulator.data import Data
from pt2qa._trials.evidence import Gain
from pt2qa._trials.judge import Judge
from pt2qa._trials.target import Target
from pt2qa._trials.treatment import Treatment
from tests.flows import quantized_pair


@pytest.fixture
def search() -> Search:
    """Of a model whose calibration data are too small, by a factor of 10 for all sites."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    batch = torch.randn(8, 8)
    pair = quantized_pair(net, (0.1 * batch,))
    data = Data("batches", [batch])
    judge = Judge(pair, data, None, "diagnose")
    return Search(Case(pair, judge, data, judge.outcome(Treatment())), None)


def in_float(search: Search, cause: str, share: float, sites: int) -> Hypothesis:
    """All sites of the model in float but some."""
    places = list(search.case.places.values())
    return Hypothesis(
        cause, f"of {share}", "", "", Treatment(exact=frozenset(places[: len(places) - sites])), share=share
    )


@pytest.mark.parametrize(
    ("cause", "share", "measured"),
    [
        ("precision", 0.002, False),  # 0.02 dB twice over, of an error of which a hundredth is asked for
        ("precision", 0.3, True),
        ("site-range", 0.2, True),  # no matter of degree
        ("site-range", 1e-4, False),
    ],
)
def test_what_makes_little_noise_is_not_tried(search: Search, cause: str, share: float, measured: bool) -> None:
    search._take([in_float(search, cause, share, 0)])
    assert len(search.rows) == measured
    assert [row.reason.partition(" of the noise")[0] for row in search.tried] == (
        [] if measured else [f"its sites cause only {100 * share:.2f} %"]
    )
    assert all(math.isnan(row.gain) for row in search.tried)


def test_it_is_tried_after_a_larger_fault(search: Search) -> None:
    large, small = in_float(search, "site-range", 1.0, 2), in_float(search, "precision", 0.01, 0)
    search.bounds = {name: search.case.judge.outcome(small.treatment) for name in ("fitted", "by channel")}
    search._take([small, large])
    assert [row.name for row in search.rows] == ["of 1.0", "of 0.01"]


def test_an_infinite_gain_at_the_cost_of_all_int8_is_taken_last(search: Search) -> None:
    all_in_float, exact = (Hypothesis(cause, "", "", "", Treatment()) for cause in ("masked-values", "site-range"))
    every, most = (replace(all_in_float, cost=1.0), Gain(math.inf)), (exact, Gain(42.0))
    assert search._best([every, most]) == most
    assert search._best([every]) == every


def test_a_metric_that_gains_while_the_outputs_do_not_is_chance(search: Search) -> None:
    each, before = in_float(search, "site-range", 1.0, 0), replace(search.quality, of_metric=True)
    assert search._is_worth(each, Gain(0.1, 5.0, 9.0, "output"), before)
    assert not search._is_worth(each, Gain(0.1, -5.0, 9.0, "output"), before)
    assert not search._is_worth(each, Gain(0.1, 0.0001, 0.0002, "output"), before)


def test_what_is_free_is_taken_before_a_repair(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(search, "repairs", (Method,))
    monkeypatch.setattr(search, "_repair", lambda: taken.extend(row.cause for row in search.rows))
    with torch.no_grad():
        search.run()
    assert "narrow-calibration" in taken


def test_what_is_left_after_ctrl_c_is_listed_with_its_gain(search: Search) -> None:
    best, other = in_float(search, "site-range", 1.0, 0), in_float(search, "precision", 0.9, 2)
    search._left = [(other, Gain(1.0)), (best, Gain(5.0))]
    search.so_far()
    assert [row.name for row in search.rows] == [best.name]
    assert [(row.name, row.gain) for row in search.tried] == [(other.name, 1.0)]
    assert search.tried[0].reason == "interrupted before it was measured after the remedies above"


def test_how_a_gain_was_measured(search: Search) -> None:
    remedy = in_float(search, "deployed-kernel", 1.0, 0)
    measured = replace(remedy, gain=1.0)
    assert [_how(measured), _how(replace(measured, treatment=Treatment()))] == ["deployed", "compared"]
    assert [_how(remedy), _how(replace(remedy, treatment=Treatment(options=(("qat", True),))))] == [
        "simulated",
        "quantized again",
    ]


@pytest.mark.parametrize(
    ("at_least", "of_float", "needed"), [(0.7, False, 0.7), (0.7, True, 0.56), (-math.inf, False, 0.792)]
)
def test_a_target_is_a_number_a_share_or_nearly_all(
    search: Search, monkeypatch: pytest.MonkeyPatch, at_least: float, of_float: bool, needed: float
) -> None:
    monkeypatch.setattr(search.case.judge, "of_float", lambda: 0.8)
    aim = Target(at_least, metric=lambda model: 0.0, of_float=of_float)
    assert _needed(aim, search.case.judge, Worth()) == pytest.approx(needed)
