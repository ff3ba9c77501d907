"""Float weights against dequantized ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import pt2qa
from tests.flows import direct_sqnr, quantized_pair, residual_pair
from tests.models import Linears, Recurrent, images


@pytest.mark.parametrize("per_channel", [True, False])
def test_numbers_equal_numpy(per_channel: bool) -> None:
    torch.manual_seed(0)
    example = (torch.randn(4, 16),)
    pair = quantized_pair(Linears(), example, pt2qa.quantizer("xnnpack", per_channel=per_channel))
    row = next(r for r in pt2qa.compare_weights(pair).rows if (r.name, r.attr) == ("first/linear", "weight"))
    weight = pair.reference.state_dict()["first.weight"].double().numpy()
    peak = np.abs(weight).max(1, keepdims=True) if per_channel else np.abs(weight).max()
    scale = np.maximum(peak / 127, 2.0**-12)
    dequantized = np.clip(np.round(weight / scale), -127, 127) * scale
    noise = (weight - dequantized) ** 2
    by_channel = 10 * np.log10((weight**2).sum(1) / noise.sum(1))
    assert row.sqnr == pytest.approx(10 * math.log10((weight**2).sum() / noise.sum()), abs=1e-3)
    assert row.worst_channel == int(by_channel.argmin())
    assert row.worst_channel_sqnr == pytest.approx(by_channel.min(), abs=1e-3)
    assert row.max_lsb == pytest.approx((np.abs(weight - dequantized) / scale).max(), abs=1e-3)
    assert row.scale == pytest.approx(float(np.max(scale)), rel=1e-6)
    assert (row.axis, row.shape, row.dtype) == (0 if per_channel else -1, (32, 16), "int8")
    handle = next(number for number, known in pair.names.items() if known.name == "first/linear")
    assert (row.handle, row.module, row.op, row.note, row.dead_channels) == (handle, "first", "linear", "", 0)
    assert row.mse == pytest.approx(noise.mean(), rel=1e-3)
    assert row.l1 == pytest.approx(np.abs(weight - dequantized).mean(), rel=1e-3)
    assert row.atol == pytest.approx(np.abs(weight - dequantized).max(), rel=1e-3)
    lengths = np.linalg.norm(weight) * np.linalg.norm(dequantized)
    assert 1 - row.cosine == pytest.approx(1 - (weight * dequantized).sum() / lengths, rel=1e-2)
    ends = weight.min(), dequantized.min(), weight.max(), dequantized.max()
    assert (row.ref_min, row.quant_min, row.ref_max, row.quant_max) == pytest.approx(ends)


def test_dead_channels_hide_behind_a_good_sqnr() -> None:
    """Trap 12: channel maxima 90 and 0.14 with one scale: the small channel is all zeros, the tensor's SQNR is high."""
    torch.manual_seed(0)
    model = Linears()
    with torch.no_grad():
        model.first.weight.uniform_(-90, 90)
        model.first.weight[3].uniform_(-0.14, 0.14)
    pair = quantized_pair(model, (torch.randn(4, 16),), pt2qa.quantizer("xnnpack", per_channel=False))
    row = next(r for r in pt2qa.compare_weights(pair).rows if (r.name, r.attr) == ("first/linear", "weight"))
    assert row.sqnr > 40
    assert (row.dead_channels, row.worst_channel, row.worst_channel_sqnr) == (1, 3, 0.0)
    assert "1 dead channel, all zeros once quantized, in 1 weight " in pt2qa.compare_weights(pair).summary()
    per_channel = quantized_pair(model, (torch.randn(4, 16),), pt2qa.quantizer("xnnpack", per_channel=True))
    report = pt2qa.compare_weights(per_channel)
    assert all(r.dead_channels == 0 for r in report.rows)
    assert "dead" not in report.summary()


def test_a_channel_that_is_not_finite_is_the_worst_and_is_said_first() -> None:
    model = Linears()
    with torch.no_grad():
        model.first.weight[3, 0] = math.inf
    pair = quantized_pair(model, (torch.randn(4, 16),), pt2qa.quantizer("xnnpack", mode="dynamic"))
    report = pt2qa.compare_weights(pair)
    row = next(r for r in report.rows if (r.name, r.attr) == ("first/linear", "weight"))
    assert math.isnan(row.sqnr)
    assert row.worst_channel == 3
    _, float_counts, _ = report.histogram(row)
    assert float_counts.sum() == math.prod(row.shape) - 1
    assert math.isnan(row.worst_channel_sqnr)
    first, second = report.summary().splitlines()[:2]
    assert first.startswith(
        "Without an SQNR: 1 quantized weight, such as first/linear, weight, channel 3 (16 values are"
    )
    assert second.startswith("Channel SQNR of 1 quantized weight: lowest")
    assert "No weight has a channel SQNR." in report.with_rows([row]).summary().splitlines()
    assert not pt2qa.gate(report, require="rows.worst_channel_sqnr>=0").passed


def test_weights_that_stay_float_are_rows_too() -> None:
    rows = pt2qa.compare_weights(residual_pair()).rows
    assert [(row.name, row.attr, row.quantized) for row in rows] == [
        ("conv1/conv2d", "weight", True),
        ("conv1/conv2d", "bias", False),
        ("conv2/conv2d", "weight", True),
        ("conv2/conv2d", "bias", False),
        ("fc/linear", "weight", True),
        ("fc/linear", "bias", False),
    ]
    bias = rows[1]
    assert (bias.note, bias.dtype, bias.sqnr) == ("not quantized", "float32", math.inf)


def test_half_precision_weights() -> None:
    example = (torch.randn(4, 16),)
    pair = quantized_pair(Linears(), example, pt2qa.quantizer("x86", mode="weight_only"))
    row = next(r for r in pt2qa.compare_weights(pair).rows if r.attr == "weight")
    weight = next(c for c in pair.program.constants if c.reader == "first/linear" and c.argument == 1)
    assert torch.equal(weight.quantized, weight.reference.half().float())
    assert (row.dtype, row.quantized) == ("float16", True)
    assert row.sqnr > 60


def test_tied_weights_are_compared_at_each_reader() -> None:
    """Trap 27."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.second = nn.Linear(16, 16)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    report = pt2qa.compare_weights(quantized_pair(Tied(), (torch.randn(4, 16),)))
    weights = [row for row in report.rows if row.attr == "weight"]
    assert [row.name for row in weights] == ["first/linear", "second/linear"]
    assert weights[0].sqnr == weights[1].sqnr


def test_transposed_convolutions_count_output_channels() -> None:
    """Trap 23: output channels of a transposed convolution are its second axis."""
    model = nn.Sequential(nn.ConvTranspose2d(3, 5, 3), nn.Conv2d(5, 4, 1))
    report = pt2qa.compare_weights(quantized_pair(model, images()))
    row = next(r for r in report.rows if r.attr == "weight" and r.op.startswith("conv_transpose"))
    assert row.shape == (3, 5, 3, 3)
    assert 0 <= row.worst_channel < 5


def test_a_weight_that_every_step_reads_is_one_row() -> None:
    torch.manual_seed(0)
    example = (torch.randint(0, 10, (5, 3)), torch.zeros(2, 3, 8), torch.ones(2, 3, 8))
    capture = pt2qa.capture(Recurrent().eval(), example, decompose="lstm")
    for mode in ("static", "dynamic"):
        pair = pt2qa.quantize(capture, pt2qa.quantizer("x86", mode=mode), [example], progress=False)
        rows = [row for row in pt2qa.compare_weights(pair).rows if row.quantized]
        assert [(row.name, row.attr, row.note) for row in rows] == [
            ("rnn/linear", "weight_ih_l0", ""),
            ("rnn/linear_1", "weight_hh_l0", "read by 5 ops"),
            ("rnn/linear_6", "weight_ih_l1", ""),
            ("rnn/linear_7", "weight_hh_l1", "read by 5 ops"),
            ("decoder/linear", "weight", ""),
        ]
        for row in rows:
            weight = pair.reference.get_parameter(f"{row.module}.{row.attr}").detach().double()
            scale = weight.abs().amax(1, keepdim=True) / 127.5
            rounded = (weight / scale).round().clamp(-128, 127) * scale
            assert row.sqnr == pytest.approx(direct_sqnr(weight, rounded), abs=1e-3)


def test_a_quantized_weight_has_histograms_of_both_sides() -> None:
    torch.manual_seed(0)
    report = pt2qa.compare_weights(quantized_pair(Linears(), (torch.randn(4, 16),), pt2qa.quantizer("xnnpack")))
    quantized = [row for row in report.rows if row.quantized]
    assert {side: counts.shape for side, counts in report.histograms.items()} == {
        "float": (len(quantized), 32),
        "dequantized": (len(quantized), 32),
    }
    row = quantized[0]
    edges, float_counts, dequantized_counts = report.histogram(row)
    assert float_counts.sum() == dequantized_counts.sum() == math.prod(row.shape)
    assert (edges[0], edges[-1]) == (min(row.ref_min, row.quant_min), max(row.ref_max, row.quant_max))
    charts = report.charts([report])
    assert [chart["row"] for chart in charts] == [i for i, each in enumerate(report.rows) if each.quantized]
    assert charts[0]["series"][0]["counts"] == float_counts.tolist()
    unquantized = next(row for row in report.rows if not row.quantized)
    with pytest.raises(pt2qa.ReportError, match="the report holds no histogram of its"):
        report.histogram(unquantized)
