"""What a search keeps of its batches: their inputs, their ranges, their faults and its settings."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._report.sums import settings_of
from pt2qa.report import SetApart
from tests.flows import quantized_pair, residual_pair
from tests.models import Recurrent, images

BATCHES = [images(seed=seed) for seed in (1, 2, 3)]


def found(pair: pt2qa.QuantizedPair, batches: Any, **options: Any) -> pt2qa.BadCases:
    return pt2qa.find_bad_cases(pair, batches, progress=False, **options)


class Scaled(nn.Module):
    """An input without an axis belongs to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.fc(x) * scale


@functools.cache
def scaled(dynamic: bool = False) -> pt2qa.QuantizedPair:
    torch.manual_seed(0)
    shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch")}, None)} if dynamic else {}
    return quantized_pair(Scaled(), (torch.randn(3, 6), torch.tensor(2.0)), **shapes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_without_an_axis_belongs_to_every_sample(dynamic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(3, 6, generator=generator), torch.tensor(float(number + 1))) for number in range(3)]
    report = found(scaled(dynamic), batches, k=9, metric=["l1", "atol"])
    assert len(report.cases) == 9
    assert {case.repeats for case in report.cases} == {1 if dynamic else 3}
    for row in report.rows:
        x, scale = report.batch(row)
        own, given = batches[row.batch]
        assert torch.equal(x, own[row.sample : row.sample + 1].expand(1 if dynamic else 3, -1))
        assert torch.equal(scale, given)
        with torch.no_grad():
            error = (scaled(dynamic).reference(own, given) - scaled(dynamic).quantized(own, given))[row.sample].abs()
        assert row.value == pytest.approx(float(error.mean() if row.metric == "l1" else error.max()), rel=1e-5)
    # Of each ranking the same cases, each stored once, the worst of the first one first.
    order = [(row.batch, row.sample) for row in report.rows]
    assert [(case.batch, case.sample) for case in report.cases] == list(dict.fromkeys(order))
    assert [case.index for case in report.cases] == [3 * case.batch + case.sample for case in report.cases]
    assert list(report.inputs) == [f"{case.batch}/{case.sample}/{n}" for case in report.cases for n in range(2)]


def test_a_report_has_the_fields_of_its_run() -> None:
    pair = residual_pair()
    report = found(pair, BATCHES, k=2, metric=["atol", "sqnr"], num_steps=5)
    assert "num_steps is 5, but the data has only 3 batches" in report.notes
    assert not any("num_steps" in note for note in found(pair, BATCHES, num_steps=3).notes)
    assert (report.steps, report.samples, report.batch_axis) == (3, 6, 0)
    assert (report.quantizer, report.model, report.environment) == (pair.quantizer, pair.model, pair.environment)
    assert report.input_ranges == pt2qa.compare_layers(pair, BATCHES, progress=False).input_ranges
    settings = settings_of(report.sums)
    assert (settings["metric"], settings["k"], settings["feedback"]) == ("atol, sqnr", "2", "")
    assert "mask" not in settings
    assert [(ranking.metric, ranking.values) for ranking in report.rankings] == [("atol", 6), ("sqnr", 6)]
    whole = found(pair, BATCHES, batch_axis=None)
    assert (whole.steps, whole.samples, whole.batch_axis) == (3, 6, -1)
    assert [(row.sample, row.index) for row in whole.rows] == [(-1, 2 * whole.rows[0].batch)]
    assert torch.equal(whole.batch(), BATCHES[whole.rows[0].batch])


def test_a_spoilt_batch_is_in_no_range_and_its_fault_is_named_by_axis() -> None:
    pair = residual_pair()
    spoilt = images(seed=9)
    spoilt[1, 0, 0, 0] = math.nan
    report = found(pair, [BATCHES[0], spoilt, BATCHES[1]], metric="atol", k=3)
    assert report.set_apart == (SetApart(1, 2, 1, "batch", "NaN", "x"),)
    assert report.input_ranges == found(pair, BATCHES[:2]).input_ranges
    assert (report.steps, report.samples) == (3, 6)
    whole = found(pair, [spoilt], metric="atol", batch_axis=None)
    assert [apart.sample for apart in whole.set_apart] == [-1]


def test_samples_of_another_batch_size_or_without_an_axis_are_ranked_whole() -> None:
    pair = residual_pair()
    report = found(pair, BATCHES[:2], k=2, metric="l1", post_process=lambda y: {"all": y, "one": y[:1], "sum": y.sum()})
    assert [(row.output, row.sample >= 0) for row in report.rows] == [
        *[("output.all", True)] * 2,
        *[("output.one", False)] * 2,
        *[("output.sum", False)] * 2,
    ]
    values = [ranking.values for ranking in report.rankings]
    assert values == [4, 2, 2]
    assert {(case.batch, case.sample) for case in report.cases} >= {(0, -1), (1, -1)}
    for row in report.rows:
        assert len(report.batch(row)) == 2


def test_the_search_goes_on_from_what_each_model_returned() -> None:
    torch.manual_seed(0)
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    pair = quantized_pair(Recurrent(), example, pt2qa.quantizer("xnnpack", mode="dynamic"))
    feedback = {"h": "output[1]", "c": "output[2]"}
    tokens = [torch.randint(0, 10, (5, 3)) for _ in range(2)]
    report = found(pair, [(tokens[0], *example[1:]), tokens[1]], metric="l1", k=2, batch_axis=None, feedback=feedback)
    assert settings_of(report.sums)["feedback"] == "h, c"
    assert (report.steps, report.samples) == (2, 10)
    with torch.no_grad():
        state = pair.reference(tokens[0], *example[1:])[1:]
    (case,) = [case for case in report.cases if case.batch == 1]
    kept = report.batch(next(row for row in report.rows if row.batch == 1))
    assert all(torch.equal(left, right) for left, right in zip(kept[1:], state, strict=True))
    assert (case.sample, case.repeats) == (-1, 1)


def test_where_a_vector_is_for_the_whole_batch_so_is_the_case() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x: Tensor, names: list[Tensor]) -> Tensor:
            return self.fc(x) + names[0]

    torch.manual_seed(0)
    pair = quantized_pair(Typed(), (torch.randn(3, 6), [torch.ones(4)]))
    report = found(pair, [(torch.randn(3, 6), [torch.ones(4)])], k=3)
    assert {case.sample for case in report.cases} == {-1}
    x, (names,) = report.batch()
    assert (x.shape, names.tolist()) == ((3, 6), [1.0] * 4)
