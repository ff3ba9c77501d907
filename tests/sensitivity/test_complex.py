"""Complex numbers inside a model and as its output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pt2qa
from pt2qa._sensitivity.gradients import WithoutGradient

BATCH = torch.linspace(-2, 3, 48).reshape(3, 16).sin()


class Spectrum(nn.Module):
    """A filter of frequencies between two linears; the spectrum is an output, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gains, self.last = nn.Linear(16, 16), nn.Parameter(torch.rand(9)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.first(x)) * self.gains
        return self.last(torch.fft.irfft(spectrum, n=16)), spectrum


@pytest.fixture(scope="module")
def pair() -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(Spectrum().eval(), BATCH), "x86", [BATCH])


def test_no_site_before_complex_numbers_is_without_noise(pair: pt2qa.QuantizedPair) -> None:
    with pytest.raises(WithoutGradient, match="fft_rfft returns complex numbers"):
        pt2qa.sensitivity(pair, [BATCH], method="projection")
    report = pt2qa.sensitivity(pair, [BATCH])
    assert report.method == "exact"
    assert all(row.noise > 0 for row in report.rows)


def test_a_complex_output_counts(pair: pt2qa.QuantizedPair) -> None:
    report = pt2qa.sensitivity(pair, [BATCH], method="exact")
    assert report.outputs == ("output[0]", "output[1]")
    with torch.no_grad():
        references, quantized = pair.reference(BATCH), pair.quantized(BATCH)
    noise = sum(float((a - b).abs().double().square().sum()) for a, b in zip(references, quantized, strict=True))
    signal = sum(float(a.abs().double().square().sum()) for a in references)
    assert report.measured_sqnr == pytest.approx(10 * torch.tensor(signal / noise).log10().item(), abs=1e-4)


def test_a_target_is_that_of_the_worst_output_complex_ones_too(pair: pt2qa.QuantizedPair) -> None:
    before = pt2qa.compare_layers(pair, [BATCH])
    found = pt2qa.reconfigure(pair, [BATCH], target=before.sqnr + 3)
    assert found.met
    assert pt2qa.compare_layers(found.pair, [BATCH]).sqnr >= before.sqnr + 3
