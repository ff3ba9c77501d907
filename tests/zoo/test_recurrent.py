"""Resemblyzer's speech encoder: an LSTM of three layers, taken apart so that its linears are quantized."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from tests.zoo import models
from tests.zoo.pairs import decibels

pytestmark = pytest.mark.zoo

STEPS = 8
"""Of the 160 frames of an utterance: each is written out, so that the graph has 16 rows a layer and step."""

QUANTIZERS = {
    "xnnpack": pt2qa.quantizer("xnnpack"),
    "x86": pt2qa.quantizer("x86"),
    "xnnpack dynamic": pt2qa.quantizer("xnnpack", mode="dynamic"),
    "x86 dynamic": pt2qa.quantizer("x86", mode="dynamic"),
}


@functools.cache
def encoder() -> tuple[nn.Module, pt2qa.Capture, tuple[Tensor, ...]]:
    """The model, its capture and its data: the middle of eight utterances, in two batches."""
    model = models.speech_encoder()
    batches = models.utterances(8)[:, 40 : 40 + STEPS].contiguous().split(4)
    return model, pt2qa.capture(model, (batches[0],), decompose="lstm"), batches


@functools.cache
def quantized(quantizer: str) -> pt2qa.QuantizedPair:
    _, capture, batches = encoder()
    return pt2qa.quantize(capture, QUANTIZERS[quantizer], batches, progress=False)


@functools.cache
def report_of(quantizer: str) -> pt2qa.LayerReport:
    return pt2qa.compare_layers(quantized(quantizer), encoder()[2], progress=False)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_all_linears_of_the_lstm_are_quantized(quantizer: str) -> None:
    pair = quantized(quantizer)
    linears = 3 * (1 + STEPS) + 1
    assert [(e.quantized, e.total) for e in pair.coverage if e.op == "linear"] == [(linears, linears)]
    assert not any("float" in note for note in report_of(quantizer).notes)
    weights = [row for row in pt2qa.compare_weights(pair).rows if row.quantized]
    assert [(row.attr, row.note) for row in weights if row.module == "lstm"] == [
        (f"weight_{kind}_l{layer}", note) for layer in range(3) for kind, note in (("ih", ""), ("hh", "read by 8 ops"))
    ]
    assert all(38 < row.sqnr < 49 for row in weights)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_layer_table_folds_the_steps_and_agrees_with_the_graphs(quantizer: str) -> None:
    report, pair, batches = report_of(quantizer), quantized(quantizer), encoder()[2]
    with torch.no_grad():
        direct = decibels([pair.reference(batch) for batch in batches], [pair.quantized(batch) for batch in batches])
    assert report.sqnr == pytest.approx(direct, abs=1e-3)
    assert len(report.rows) > 400
    # header, rule and six rows: the LSTM is one of them
    table = report.table(limit=None, width=160).splitlines()
    assert sum(line.startswith("lstm/lstm (8 steps)  ") for line in table) == 1
    assert sum(line.startswith("lstm/") for line in report.opened("lstm/lstm").table("graph", None).splitlines()) > 400
    steps = {row.step for row in report.rows if row.part_of}
    assert steps == set(range(-1, STEPS))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_errors_of_healthy_steps_add_up_along_the_sequence(quantizer: str) -> None:
    """No linear is bad by itself, but what a step gets wrong the next one takes as its state."""
    rows = [row for row in report_of(quantizer).rows if row.op == "linear" and row.part_of]
    assert min(row.isolated_sqnr for row in rows) > 20
    last_layer = [row.sqnr for row in rows if row.step >= 0][-STEPS:]
    assert min(last_layer) < min(row.isolated_sqnr for row in rows) - 5


def test_dynamic_quantization_is_no_worse_than_torchs_own_in_eager_mode() -> None:
    """Which has one scale for a weight and 7 bits for activations, against one for each channel and 8."""
    model, _, batches = encoder()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch says that its eager quantization is to go
        eager = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM, nn.Linear}, dtype=torch.qint8)
        theirs = decibels([model(batch) for batch in batches], [eager(batch) for batch in batches])
    for quantizer in ("xnnpack dynamic", "x86 dynamic"):
        assert theirs - 1 < report_of(quantizer).sqnr < theirs + 10
