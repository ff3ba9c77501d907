"""How well plain int8 does on real models, with the figures that `docs/design.md` states."""

from __future__ import annotations

import pytest
import torch

from tests.zoo import models
from tests.zoo.pairs import captured, layers_of, pair_of

pytestmark = pytest.mark.zoo


@pytest.mark.parametrize(
    ("model", "quantizer", "expected", "tolerance"),
    [
        # All 20 pictures calibrate and are measured.  One picture with outliers decides about the scales, so that other
        # selections, orders or crops give up to 18 dB on MobileNetV2; hence the tolerance.
        ("mobilenet_v2", "xnnpack", 13.5, 1.0),
        ("mobilenet_v2", "x86", 16.8, 1.0),
        ("mobilenet_v2", "xnnpack:per_channel=false", 10.0, 1.0),
        ("efficientnet_lite0", "xnnpack", 7.4, 1.5),
        ("efficientnet_lite0", "x86", 17.4, 1.0),
        # 250 of the 5,000 digits calibrate.
        ("digit_net", "xnnpack", 39.8, 1.0),
        ("digit_net", "x86", 43.0, 1.0),
        # Only the last linear is quantized; how many steps its input has depends on the utterances.
        ("speech_encoder", "xnnpack", 32.0, 5.0),
        ("speech_encoder", "x86", 32.0, 5.0),
    ],
)
def test_output_sqnr(model: str, quantizer: str, expected: float, tolerance: float) -> None:
    measured = layers_of(model, quantizer).sqnr
    assert measured == pytest.approx(expected, abs=tolerance), f"{model}, {quantizer}: {measured:.2f} dB"


def test_float_models_know_what_they_see() -> None:
    # Else weights, preprocessing or labels would not belong together, and no figure would mean anything.
    for name in ("mobilenet_v2", "efficientnet_lite0"):
        made = captured(name)
        with torch.no_grad():
            classes = torch.cat([made.model(batch) for batch in made.batches]).argmax(1).tolist()
        right = sum(got == want for got, want in zip(classes, models.labels(), strict=True))
        assert right >= 17, f"{name}: {right} of 20"


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_int8_digits_are_read_as_well_as_float_digits(quantizer: str) -> None:
    batches, pair = captured("digit_net").batches, pair_of("digit_net", quantizer)
    with torch.no_grad():
        right = [
            int((torch.cat([graph(batch) for batch in batches]).argmax(1) == models.digits()[1]).sum())
            for graph in (pair.reference, pair.quantized)
        ]
    assert right[0] >= 4980
    assert abs(right[0] - right[1]) <= 5, right


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_report_says_that_the_lstm_stays_float(quantizer: str) -> None:
    # Trap 25: the op is opaque to every quantizer.
    report = layers_of("speech_encoder", quantizer)
    assert "0 of 1 lstm ops are quantized; the rest runs in float" in report.notes
    assert "0 of 1 lstm ops are quantized" in str(report)
    assert [row.isolated_sqnr for row in report.rows if row.name == "lstm/lstm[1]"] == [float("inf")]
    (linear,) = (row for row in report.rows if row.op == "linear")
    assert linear.isolated_sqnr > 30
