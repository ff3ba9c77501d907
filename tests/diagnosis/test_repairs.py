"""Repairs as remedies of a diagnosis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pt2qa
from pt2qa.report import Diagnosis
from tests.flows import direct_sqnr

BOTH = ("ranges", "biases")


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    """An input of which one channel is large and hardly read."""
    torch.manual_seed(0)
    size = torch.tensor([1.0, 1.0, 20.0]).reshape(3, 1, 1)
    return [torch.randn(8, 3, 8, 8) * size for _ in range(8)]


@pytest.fixture(scope="module")
def pair(batches: list[torch.Tensor]) -> pt2qa.QuantizedPair:
    """Convolutions that reach far beyond the ReLU6 behind them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU6(), nn.Conv2d(16, 16, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(256, 10)
    ).eval()
    with torch.no_grad():
        model[0].weight[:, 2] *= 0.001
        model[2].weight.mul_(10)
    return pt2qa.quantize(pt2qa.capture(model, batches[0]), "xnnpack", batches[:4], progress=False)


@pytest.fixture(scope="module")
def diagnosis(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> Diagnosis:
    """With both repairs that apply to it."""
    return pt2qa.diagnose(pair, batches[4:], repairs=BOTH, progress=False)


def test_are_causes_with_measured_gains(
    diagnosis: Diagnosis, pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]
) -> None:
    causes = {row.cause: row for row in diagnosis.rows}
    row = causes["range"]
    assert row.name in {site.name for site in pair.sites}
    assert row.cost == 0
    assert row.gain_in_sequence > 1
    assert diagnosis.pair is not None
    assert pair.float_graph is not None
    reference, before, after = (
        torch.cat([graph(batch) for batch in batches[4:]])
        for graph in (pair.float_graph, pair.quantized, diagnosis.pair.quantized)
    )
    gain = direct_sqnr(reference, after) - direct_sqnr(reference, before)
    assert gain == pytest.approx(sum(each.gain_in_sequence for each in diagnosis.rows), abs=0.01)


def test_are_in_the_plan_and_in_the_code(
    diagnosis: Diagnosis, pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]
) -> None:
    assert pair.capture is not None
    assert diagnosis.pair is not None
    again = pt2qa.quantize(pair.capture, "xnnpack", batches[:4], overrides=diagnosis.plan, progress=False)
    assert torch.equal(again.quantized(batches[5]), diagnosis.pair.quantized(batches[5]))
    assert diagnosis.code_verified == "equal"


def test_are_not_tried_unless_they_are_named(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> None:
    plain = pt2qa.diagnose(pair, batches[4:], verify_code=False, progress=False)
    assert not {"range", "bias"} & {row.cause for row in plain.tried}
    assert "bias" not in {row.cause for row in plain.rows}


def test_ranges_are_the_remedy_where_only_they_keep_an_op_in_int8(
    pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]
) -> None:
    plain = pt2qa.diagnose(pair, batches[4:], verify_code=False, progress=False)
    (row,) = plain.rows
    assert (row.cause, row.name, row.cost) == ("range", "input", 0.0)
    assert plain.pair is not None
    assert pair.float_graph is not None
    reference, before, after = (
        torch.cat([graph(batch) for batch in batches[4:]])
        for graph in (pair.float_graph, pair.quantized, plain.pair.quantized)
    )
    assert direct_sqnr(reference, after) - direct_sqnr(reference, before) == pytest.approx(row.gain, abs=0.01)
    assert row.gain > 15


def test_name_why_they_were_refused(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> None:
    assert pair.capture is not None
    alone = pt2qa.quantize(pair.capture, "xnnpack", batches[:1], progress=False)
    found = pt2qa.diagnose(alone, batches[:1], repairs=["ranges"], verify_code=False, progress=False)
    (row,) = (row for row in found.tried if row.cause == "range")
    assert "one distinct batch" in row.reason


def test_stop_at_the_target(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> None:
    found = pt2qa.diagnose(pair, batches[4:], repairs=BOTH, target=1.0, verify_code=False, progress=False)
    assert not found.rows


def test_need_a_pair_that_can_be_quantized_again(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> None:
    graphs = pt2qa.pair(pair.reference, pair.quantized)
    found = pt2qa.diagnose(graphs, batches[4:], repairs=["ranges"], progress=False)
    (row,) = (row for row in found.tried if row.cause == "range")
    assert row.reason == "the pair was not made by pt2qa.quantize"


def test_have_names(pair: pt2qa.QuantizedPair, batches: list[torch.Tensor]) -> None:
    with pytest.raises(pt2qa.errors.SelectionError, match="repairs: got"):
        pt2qa.diagnose(pair, batches, repairs=["scales"], progress=False)
