"""What a report says of real models is so: nobody is named whom the numbers do not show."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantizer import FixedQParamsQuantizationSpec

import pt2qa
from pt2qa._decibels import LOW_SQNR
from pt2qa._layers.sums import Compared, _reach
from pt2qa._layers.verdict import NEAR, clamped_share, growth, summary_of
from pt2qa._metrics import ErrorSums
from pt2qa.plugins import available
from tests.check.plain_quantizer import AFFINE, PlainQuantizer, per_channel
from tests.flows import quantized_pair, residual_pair
from tests.models import images


def rows_of(pair: pt2qa.QuantizedPair, batches: list[Tensor]) -> tuple[pt2qa.LayerReport, dict[str, pt2qa.LayerRow]]:
    report = pt2qa.compare_layers(pair, batches, progress=False)
    return report, {row.name: row for row in report.rows}


def fixed(scale: float, zero_point: int = 0) -> FixedQParamsQuantizationSpec:
    """int8 with a range that no data chose."""
    return FixedQParamsQuantizationSpec(torch.int8, scale, zero_point, -128, 127, torch.per_tensor_affine)


class Gate(nn.Module):
    """A linear whose relu throws away what its weights round worst, and a score in float."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.score, self.norm = nn.Linear(16, 16), nn.Linear(16, 4), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.score(self.norm(torch.relu(self.first(x)))))


class Branches(nn.Module):
    """Two branches side by side, one of them hardly rounded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x.round())], dim=1)


def test_a_value_answers_for_itself_for_a_float_op_behind_it_or_for_nothing() -> None:
    x = torch.randn(32, 16)
    report, rows = rows_of(quantized_pair(Gate(), x, "x86"), [x])
    assert {name: (row.observed_at, row.answers_for) for name, row in rows.items()} == {
        "x": ("dq", "x"),
        "first/linear": ("raw", ""),  # its relu alone reads it, in one kernel
        "relu": ("raw", "first/linear"),  # in float, as the layer norm reads it
        "norm/layer_norm": ("dq", "norm/layer_norm"),
        "score/linear": ("raw", ""),
        "sigmoid": ("raw", "score/linear"),
    }
    assert [row.answers_for for row in report.outputs] == [""]


def test_a_float_op_that_reads_rounded_values_answers_for_nothing() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.fc(x))

    x = torch.randn(32, 16)
    _, rows = rows_of(quantized_pair(Normed(), x, PlainQuantizer(outputs=AFFINE)), [x])
    assert rows["fc/linear"].answers_for == "fc/linear"
    assert (rows["norm/layer_norm"].observed_at, rows["norm/layer_norm"].answers_for) == ("raw", "")
    assert not math.isinf(rows["norm/layer_norm"].isolated_sqnr)


def test_the_lowest_value_that_nobody_reads_is_not_in_the_verdict() -> None:
    class Cut(nn.Module):
        """The weights of eight channels round to zero, and the relu throws away what they make."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16, bias=False)
            self.fc.weight.data = torch.eye(16)
            self.fc.weight.data[:8] = -0.003

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.fc(x))

    x = torch.full((4, 16), 10.0)
    x[:, 8:] = 0.6
    report, rows = rows_of(quantized_pair(Cut(), x, PlainQuantizer(inputs=fixed(0.5))), [x])
    assert report.sqnr == pytest.approx(20 * math.log10(0.6 / 0.1), abs=1e-3)
    assert rows["fc/linear"].isolated_sqnr < 10
    assert "lowest 15.6 dB (fc/linear, read after relu)" in report.summary()


def test_what_an_op_reads_is_its_own_input_not_the_row_before() -> None:
    x = 0.3 * torch.randn(64, 16)
    _, rows = rows_of(quantized_pair(Branches(), x, PlainQuantizer(inputs=fixed(0.25))), [x])
    assert [row.name for row in rows.values()] == ["x", "one/linear", "round", "two/linear", "cat"]
    first, second = rows["one/linear"], rows["two/linear"]
    assert first.input_sqnr == rows["x"].sqnr < 20
    # Whole numbers are multiples of the step: nothing is lost, whatever the other branch lost just before.
    assert (rows["round"].input_sqnr, second.input_sqnr) == (math.inf, math.inf)
    assert growth(second) < 1e-4
    assert rows["cat"].input_sqnr == first.sqnr < second.sqnr


def test_what_an_op_reads_is_known_where_rows_are_chosen() -> None:
    pair = residual_pair()
    every = {row.name: row for row in pt2qa.compare_layers(pair, [images()], progress=False).rows}
    chosen = pt2qa.compare_layers(pair, [images()], ops=["linear"], progress=False).rows
    assert [row.input_sqnr for row in chosen] == [every[row.name].input_sqnr for row in chosen]
    assert all(math.isfinite(row.input_sqnr) for row in chosen)


def test_excess_is_how_far_the_reference_reaches_beyond_the_integers() -> None:
    x = torch.linspace(-20, 30, 64 * 16).reshape(64, 16)
    pair = quantized_pair(nn.Linear(16, 4), x, PlainQuantizer(inputs=fixed(0.1, 3)))
    _, rows = rows_of(pair, [x])
    low, high = (-128 - 3) * 0.1, (127 - 3) * 0.1
    assert rows["input"].excess_lsb == pytest.approx(max(30 - high, low + 20) / 0.1, rel=1e-5)
    _, rows = rows_of(pair, [x / 10])
    assert rows["input"].excess_lsb == 0.0


@pytest.mark.parametrize("scale", [math.nan, 1e-300], ids=["none", "too small"])
def test_without_a_scale_that_fits_a_range_has_no_use(scale: float) -> None:
    steps = Compared("x", scale=scale, low=-128, high=127)
    assert _reach(steps, ErrorSums(1, ref_min=-1.0, ref_max=1e10)) == pytest.approx((math.nan, math.nan), nan_ok=True)


def test_the_share_of_the_error_that_a_clamp_makes_equals_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.randn(64, 16, generator=generator)
    pair = quantized_pair(nn.Linear(16, 4), x, PlainQuantizer(inputs=fixed(0.1)))
    _, rows = rows_of(pair, [x])
    values = x.double().numpy()
    clamped = np.maximum(values - 12.7, 0) + np.maximum(-12.8 - values, 0)
    rounded = np.clip(np.rint(values / 0.1), -128, 127) * 0.1
    expected = float(np.sum(clamped**2) / np.sum((values - rounded) ** 2))
    assert 0.5 < expected < 1
    assert clamped_share(rows["input"]) == pytest.approx(expected, abs=0.01)


def test_a_few_values_clipped_by_less_than_a_step_are_not_blamed() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 24 * torch.rand(10, 4, generator=generator) - 12
    x[0, :3] = 12.76
    report, rows = rows_of(quantized_pair(nn.Linear(4, 2), x, PlainQuantizer(inputs=fixed(0.1))), [x])
    assert rows["input"].saturation == pytest.approx(3 / 40)
    assert rows["input"].excess_lsb == pytest.approx(0.6, abs=1e-4)
    assert clamped_share(rows["input"]) < 0.5
    assert "Counts: 0 values with most of the error from clamping" in report.summary()
    assert not any("calibration" in line for line in report.summary().splitlines())


def test_data_far_beyond_the_range_is_told_with_its_share_and_its_reach() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    report, rows = rows_of(quantized_pair(nn.Linear(16, 4), x / 4, "x86"), [x])
    assert clamped_share(rows["input"]) > 0.9
    (line,) = [line for line in report.summary().splitlines() if line.startswith("Values are clamped at input")]
    assert f"values up to {rows['input'].excess_lsb:.4g} steps beyond its range" in line


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_a_healthy_models_reports_name_nobody(quantizer: str) -> None:
    pair = residual_pair(quantizer)
    report, _ = rows_of(pair, [images(seed=seed) for seed in range(3)])
    assert report.sqnr > 20
    assert not [row.name for row in report.rows if row.name in report.summary()]
    assert not [note for note in report.notes if "runs in float" in note]
    at_the_limit = replace(report, outputs=tuple(replace(row, sqnr=LOW_SQNR) for row in report.outputs))
    for each in (report, at_the_limit):
        assert each.summary().splitlines()[-1].startswith("Nothing stands out")
    weights = pt2qa.compare_weights(pair)
    assert not [row.name for row in weights.rows if row.name in weights.summary()]


def test_noise_that_is_just_half_of_the_outputs_is_named() -> None:
    report, rows = rows_of(residual_pair(), [images()])
    row = replace(rows["conv2/conv2d"], sqnr=15.0, isolated_sqnr=15.0, input_sqnr=math.inf)
    for output, named in ((15.0 - NEAR, True), (15.1 - NEAR, True), (14.9 - NEAR, False)):
        outputs = [replace(report.outputs[0], sqnr=output)]
        assert any(f"most at {row.name}" in line for line in summary_of([row], outputs, 0, 0, [])) is named


def test_a_bad_models_report_claims_no_culprit() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    report, _ = rows_of(quantized_pair(Gate(), x / 8, "xnnpack"), [x])
    assert report.sqnr < 20
    assert " first" not in report.summary()
    assert report.summary().splitlines()[-1].startswith("What each layer costs the output is not measured here: ")


def test_per_channel_weights_are_not_told_to_be_quantized_per_channel() -> None:
    model = nn.Linear(16, 4)
    with torch.no_grad():
        model.weight[1] = 1e-6
    x = torch.randn(8, 16)
    pair = quantized_pair(model, x, PlainQuantizer(weights=per_channel(eps=2.0**-12)))
    report = pt2qa.compare_weights(pair)
    (weight,) = [row for row in report.rows if row.quantized]
    assert (weight.axis, weight.dead_channels) == (0, 1)
    assert "their per-channel scales are too large" in report.summary()
    assert "per channel" not in report.summary()


def test_no_text_of_the_core_names_a_plugin() -> None:
    """Whoever reads a finding or an error may use another quantizer."""
    names = set(available())
    assert {"xnnpack", "x86"} <= names
    found = [
        f"{path}: {text}"
        for path in sorted(Path(pt2qa.__file__).parent.rglob("*.py"))
        for text in spoken(ast.parse(path.read_text(encoding="utf-8")))
        if any(name in text.lower() for name in names)
    ]
    assert found == []


def spoken(tree: ast.Module) -> Iterator[str]:
    """The texts of a module but docstrings."""
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value
