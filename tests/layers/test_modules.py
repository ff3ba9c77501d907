"""Whole modules: a float block beside its quantized block on the same input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pt2qa
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Recurrent, images

BATCHES = [images(seed=seed) for seed in (1, 2)]


def modules(pair: pt2qa.QuantizedPair, batches: list[object], *wanted: str | type) -> pt2qa.LayerReport:
    return pt2qa.compare_modules(pair, batches, modules=wanted, progress=False)


def test_rows_are_the_module_rows_of_compare_layers() -> None:
    pair = residual_pair()
    report = modules(pair, BATCHES, nn.Conv2d)
    layers = pt2qa.compare_layers(pair, BATCHES, modules=["Conv2d"], progress=False)
    assert [(row.name, row.op) for row in report.rows] == [("conv1", "Conv2d"), ("conv2", "Conv2d")]
    assert report.rows == layers.modules
    assert report.outputs == layers.outputs
    assert report.modules == ()
    assert (report.batches, report.samples) == (layers.batches, layers.samples)


def test_a_block_is_the_quantized_module_on_the_references_input() -> None:
    """Independently: the quantized head, fed with what the reference computes before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    x = torch.randn(16, 8)
    pair = quantized_pair(model, (x,), "x86")
    (row,) = modules(pair, [x], "2").rows
    with torch.no_grad():
        hidden, reference = model[:2](x), model(x)
        head = {site.index for site in pair.sites if site.name in ("1/tanh", "2/linear")}
        alone = pair.simulator.run([x], on=head)[0]
        weight = next(c.quantized for c in pair.program.constants if c.reader == "2/linear" and c.argument == 1)
        (params,) = {str(s.params): s.params for s in pair.sites if s.name == "1/tanh"}.values()
        steps = (hidden / params.scale).round().clamp(-params.zero_point, 255 - params.zero_point)
        by_hand = nn.functional.linear(steps * params.scale, weight, model[2].bias)
    assert row.isolated_sqnr == pytest.approx(direct_sqnr(reference, alone), abs=1e-6)
    assert row.isolated_sqnr == pytest.approx(direct_sqnr(reference, by_hand), abs=1e-2)
    assert row.isolated_sqnr > row.sqnr


def test_an_lstm_with_its_states_is_one_block_of_three_outputs() -> None:
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    capture = pt2qa.capture(Recurrent().eval(), example, decompose="lstm")
    pair = pt2qa.quantize(capture, pt2qa.quantizer("x86", mode="dynamic"), [example], progress=False)
    report = modules(pair, [example], nn.LSTM, nn.Linear)
    assert [(row.name, row.op) for row in report.rows] == [
        ("rnn[0]", "LSTM"),
        ("rnn[1]", "LSTM"),
        ("rnn[2]", "LSTM"),
        ("decoder", "Linear"),
    ]
    assert all(20 < row.isolated_sqnr < 80 for row in report.rows)


def test_a_module_that_is_not_there_lists_near_names() -> None:
    with pytest.raises(
        pt2qa.SelectionError, match=r"no module path or class is called 'Conv3d'\. Closest names: Conv2d"
    ):
        modules(residual_pair(), BATCHES, nn.Conv3d)
    with pytest.raises(pt2qa.BatchError, match="no batch to compare on"):
        modules(residual_pair(), [], "conv1")
