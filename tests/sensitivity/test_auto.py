"""``method="auto"`` takes the method that is cheaper, says which, and has as many projections as the ranking needs."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import pt2qa
from pt2qa._sensitivity import analysis
from pt2qa._sensitivity.costs import Costs
from pt2qa._sensitivity.metrics import OutputMetric
from pt2qa._sensitivity.precision import ALIKE, FEWEST, MOST, error_of, reached_by_most
from pt2qa._simulator.data import Positions
from pt2qa._simulator.verification import Verification
from tests.flows import quantized_pair, residual_pair
from tests.models import images
from tests.sensitivity.brute_force import noises


def waves() -> nn.Module:
    """Seven 1-d convs and a linear: 21 sites or so."""
    convs = (nn.Conv1d(8 if number else 1, 8, 9, stride=2, padding=4) for number in range(7))
    return nn.Sequential(*(each for conv in convs for each in (conv, nn.ReLU())), Mean(), nn.Linear(8, 5))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-1)


class Detector(nn.Module):
    """Three dense outputs of two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.up = nn.Conv2d(16, 8, 1)
        self.box, self.score, self.kind = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1), nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.stem(x)
        coarse = self.down(fine)
        fine = F.relu(fine + F.interpolate(self.up(coarse), scale_factor=2.0))
        return self.box(fine), self.score(fine).sigmoid(), self.kind(coarse)


class Tall(nn.Module):
    """Forty linears: one by one they take several times what the projection takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        return x


@functools.cache
def detector() -> tuple[pt2qa.QuantizedPair, list[Tensor]]:
    torch.manual_seed(0)
    batches = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    return quantized_pair(Detector(), (batches[0],), batches=batches), batches


@functools.cache
def tall(samples: int = 16) -> tuple[pt2qa.QuantizedPair, list[Tensor]]:
    torch.manual_seed(0)
    batches = [torch.randn(samples, 64) for _ in range(2)]
    return quantized_pair(Tall(), (batches[0],), batches=batches), batches


def choice(report: pt2qa.SensitivityReport) -> str:
    return next(note for note in report.notes if note.startswith('method="auto"'))


def test_small_models_are_measured_exactly() -> None:
    torch.manual_seed(0)
    wave = torch.randn(4, 1, 2000)
    for pair, batch in (
        (quantized_pair(waves(), (wave,)), wave),
        (detector()[0], detector()[1][0]),
        (residual_pair(), images()),
    ):
        report = pt2qa.sensitivity(pair, [batch])
        assert report.method == "exact"
        assert report.rows == pt2qa.sensitivity(pair, [batch], method="exact").rows
        said = re.fullmatch(
            r'method="auto" took the exact method: for each batch it takes about ([\d.]+) float forwards, '
            r"the projection with 4 random vectors about ([\d.]+)",
            choice(report),
        )
        assert said is not None, choice(report)
        assert float(said[1]) < 1.3 * float(said[2])


def test_tall_models_are_projected() -> None:
    pair, batches = tall()
    report = pt2qa.sensitivity(pair, batches)
    assert report.method == "projection"
    assert "took the projection: for each batch it takes about" in choice(report)
    assert spearmanr([row.noise for row in report.rows], noises(pair, batches)).statistic >= ALIKE


@pytest.mark.parametrize(("exact", "method"), [(1.25, "exact"), (1.35, "projection")])
def test_near_a_tie_the_method_without_an_error_is_taken(
    exact: float, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "estimate", lambda *given: Costs(1.0, exact, 1.0, 0.0))
    assert pt2qa.sensitivity(residual_pair(), [images()]).method == method


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"metric": "kl"}, "the projection supports sqnr only, not kl"),
        ({"metric": lambda ref, quant: 0.0}, "the projection supports sqnr only, not <lambda>"),
        ({"post_process": lambda out: (out > 0).float()}, "post_process returns an output without a gradient"),
        ({"post_process": lambda out: torch.from_numpy(out.numpy())}, "post_process cannot be differentiated"),
    ],
)
def test_what_cannot_be_projected_is_measured_exactly(options: dict[str, Any], why: str) -> None:
    pair, batches = tall()
    report = pt2qa.sensitivity(pair, batches[:1], **options)
    assert report.method == "exact"
    assert f'method="auto" took the exact method: {why}' in " ".join(report.notes)


def test_an_op_without_a_gradient_is_measured_exactly() -> None:
    pair, batches = tall.__wrapped__()
    step = next(step for step in pair.program.steps if step.op == "relu")

    def opaque(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().clip(0))

    step.function, step.in_place = opaque, None
    report = pt2qa.sensitivity(pair, batches[:1])
    assert report.method == "exact"
    assert "has no gradient here" in " ".join(report.notes)


def test_goes_on_with_the_method_that_it_took() -> None:
    pair, batches = tall()
    whole, part = (pt2qa.sensitivity(pair, some) for some in (batches, batches[:1]))
    resumed = pt2qa.sensitivity(pair, batches, resume=part)
    assert resumed.method == "projection"
    assert (resumed.rows, resumed.data, resumed.parts) == (whole.rows, whole.data, whole.parts)
    exact = pt2qa.sensitivity(pair, batches[:1], method="exact")
    assert pt2qa.sensitivity(pair, batches[:1], resume=exact).method == "exact"


def test_projections_are_raised_until_the_ranking_can_be_trusted() -> None:
    pair, batches = tall(samples=1)
    report = pt2qa.sensitivity(pair, batches, method="projection")
    assert FEWEST < report.projections <= MOST
    assert report.data[0].projections == report.projections
    assert f"projections: up to {report.projections} on" in " ".join(report.notes)
    assert spearmanr([row.noise for row in report.rows], noises(pair, batches)).statistic >= ALIKE


def test_two_rows_within_their_errors_may_be_the_other_way_round() -> None:
    assert reached_by_most([1.0, 1.001], [4.0, 4.0]) == -1.0
    assert reached_by_most([1.0, 1.001], [0.0, 0.0]) == 1.0


def test_a_batch_is_measured_exactly_where_more_projections_cost_more() -> None:
    pair, batches = detector()
    report = pt2qa.sensitivity(pair, batches, method="projection")
    exact = pt2qa.sensitivity(pair, batches, method="exact")
    alone = [number for number, batch in enumerate(report.data) if not batch.projections]
    assert 0 in alone
    said = f"{len(alone)} of 2 batches: each row measured alone, cheaper than the projections that its ranking needs"
    assert said in report.notes
    assert report.method == "projection"
    for number in alone:
        own, other = ([part for part in each.parts if part.batch == number] for each in (report, exact))
        assert [part.noise for part in own] == [part.noise for part in other]
        assert not any(part.variance for part in own)
    assert spearmanr([row.noise for row in report.rows], [row.noise for row in exact.rows]).statistic >= ALIKE
    merged = pt2qa.merge([pt2qa.sensitivity(pair, [each], method="projection") for each in batches])
    assert said.replace(str(len(alone)), "2", 1) in merged.notes
    assert [row.value for row in merged.rows] == pytest.approx([row.value for row in exact.rows])


def test_groups_are_projected_however_many_projections_they_take() -> None:
    # Quantized together, the sites of a region are not the sum of their noise.
    pair, batches = detector()
    report = pt2qa.sensitivity(pair, batches, method="projection", group="region")
    assert all(batch.projections for batch in report.data)
    assert all(row.error > 0 for row in report.rows)


def test_the_stated_error_is_that_of_the_estimates() -> None:
    pair, _ = tall(samples=1)
    batches = list(torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(5)))
    exact, report = (
        pt2qa.sensitivity(pair, batches, **options)
        for options in ({"method": "exact"}, {"method": "projection", "projections": 4})
    )
    right = {(part.place, part.batch): part.noise for part in exact.parts}
    off = [
        10 * math.log10(part.noise / right[part.place, part.batch]) / error_of(part.noise, part.variance)
        for part in report.parts
        if part.variance
    ]
    within = [sum(abs(each) < sigmas for each in off) / len(off) for sigmas in (1, 2, 3)]
    assert len(off) == 8 * len(report.rows)
    assert within == pytest.approx([0.68, 0.95, 1.0], abs=0.08)


def test_projections_that_were_asked_for_are_what_is_taken() -> None:
    pair, batches = detector()
    report = pt2qa.sensitivity(pair, batches, method="projection", projections=1)
    assert [batch.projections for batch in report.data] == [1, 1]
    assert "the ranking is uncertain" in " ".join(report.notes)


def test_rounds_of_projections_give_what_one_round_gives() -> None:
    pair, batches = tall(samples=1)
    raised = pt2qa.sensitivity(pair, batches[:1], method="projection")
    assert raised.projections > FEWEST
    at_once = pt2qa.sensitivity(pair, batches[:1], method="projection", projections=raised.projections)
    assert [row.noise for row in raised.rows] == pytest.approx([row.noise for row in at_once.rows], rel=1e-5)
    assert [row.error for row in raised.rows] == pytest.approx([row.error for row in at_once.rows], rel=1e-4)


@pytest.mark.parametrize(("exact", "method"), [(True, "exact"), (False, "projection")])
def test_a_rank_without_a_batch_takes_the_method_of_the_others(
    exact: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "first_anywhere", lambda own: (exact, ["chosen elsewhere"]))
    pair = residual_pair()
    check, every = Verification(pair.graphs), Positions(pair.quantized, pair.program, None)
    own = analysis._Analysis(pair, (), OutputMetric.of("sqnr", None), None, "auto", None, None, check, every)
    assert list(own.agree(iter(()))) == []
    assert (own.method, own.choices) == (method, ["chosen elsewhere"])
