"""Batches without numbers are named and counted, and the rows are those of the other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa.errors import BatchError
from pt2qa.report import SetApart
from tests.flows import quantized_pair, residual_pair
from tests.models import images

METHODS = ("auto", "exact", "projection")


def with_nan(seed: int = 1) -> Tensor:
    batch = images(seed=seed)
    batch[1, 0, 3, 3] = torch.nan
    return batch


def run(batches: Any, **options: Any) -> pt2qa.SensitivityReport:
    return pt2qa.sensitivity(residual_pair(), batches, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_in_one_batch_leaves_the_others_their_numbers(method: Any, position: int) -> None:
    good = [images(), images(seed=2)]
    batches = [*good[:position], with_nan(), *good[position:]]
    options = {"method": method, "projections": 64 if method == "projection" else None}
    report = run(batches, **options)
    assert report.set_apart == (SetApart(position, 2, 1, "batch", "NaN", "x"),)
    assert (report.batches, report.samples, len(report.data)) == (2, 4, 3)
    alone = run(good, **options)
    assert [row.noise for row in report.rows] == pytest.approx([row.noise for row in alone.rows], rel=1e-3)
    assert [report.signal, report.noise] == [alone.signal, alone.noise]
    assert "The input data contain NaN or infinities in 1 of 3 batches: NaN in the input x (batch " in report.summary()
    assert "Set apart (1)" in str(report)


@pytest.mark.parametrize("method", METHODS)
def test_no_batch_with_a_number_is_an_error(method: Any) -> None:
    with pytest.raises(
        BatchError,
        match=r"no batch can be measured\. The input data contain NaN or infinities in 2 of 2 batches: NaN in",
    ):
        run([with_nan(), with_nan(2)], method=method)


class Logarithm(nn.Module):
    """Its outputs are NaN where the linear gives a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4) + 0.1)
            self.fc.bias.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).log()


@pytest.mark.parametrize("method", METHODS)
def test_the_op_and_the_side_are_named(method: Any) -> None:
    good, bad = torch.rand(6, 4), torch.rand(6, 4)
    bad[2, 1] = -5.0
    pair = quantized_pair(Logarithm(), (good,))
    report = pt2qa.sensitivity(pair, [(good,), (bad,)], method=method)
    (apart,) = report.set_apart
    assert (apart.batch, apart.sample, apart.what, apart.name) == (1, 2, "NaN", "log")
    assert apart.side in ("both", "reference")
    assert all(row.noise == row.noise for row in report.rows)


def test_a_post_process_that_gives_nan_is_named() -> None:
    first, second = (residual_pair().simulator.run([images(seed=seed)], on=False)[0].mean() for seed in (0, 1))
    above = (first + second) / 2

    def refuses_one(logits: Tensor) -> Tensor:
        return logits.where((logits.mean() > above) == (first > above), torch.nan)

    report = run([images(), images(seed=1)], post_process=refuses_one, method="exact")
    assert [(apart.batch, apart.side, apart.name) for apart in report.set_apart] == [(1, "both", "post_process")]


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_batch_is_counted(method: Any) -> None:
    dim = torch.export.Dim("batch", min=0, max=16)
    torch.manual_seed(0)
    pair = quantized_pair(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.randn(3, 4),), dynamic_shapes=({0: dim},)
    )
    for batches in ([torch.randn(0, 4), torch.ones(3, 4)], [torch.ones(3, 4), torch.randn(0, 4)]):
        report = pt2qa.sensitivity(pair, batches, method=method)
        assert [(apart.what, apart.samples) for apart in report.set_apart] == [("no samples", 0)]
        assert (report.batches, report.samples) == (1, 3)
        assert "No samples in 1 of 2 batches" in report.summary()
    with pytest.raises(BatchError, match=r"no batch can be measured\. No samples in 1 of 1 batch"):
        pt2qa.sensitivity(pair, [torch.randn(0, 4)], method=method)


def test_a_site_that_alone_breaks_the_output_is_named_not_ranked() -> None:
    pair = residual_pair()
    calls = 0

    def breaks_once(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits * torch.nan if calls == 5 else logits

    report = pt2qa.sensitivity(pair, [images()], method="exact", post_process=breaks_once)
    (row,) = (row for row in report.rows if row.noise != row.noise)
    assert row.rank == len(report.rows)
    assert (
        f"Not ranked, because the output has no number when they alone are quantized: {row.name}." in report.summary()
    )
