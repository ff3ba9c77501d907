"""``pt2qa.error_budget``: its parts are those of copies of the graph, and what it says of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import pt2qa
from pt2qa._diagnosis.budget import budget_of, sites_before
from pt2qa._simulator.program import Site
from pt2qa.report import ErrorBudget
from tests.check.plain_quantizer import EXACT, PlainQuantizer
from tests.diagnosis import facts
from tests.diagnosis.switched import clamped, noise, with_function
from tests.flows import quantized_pair
from tests.models import SameInputTwice
from tests.sensitivity.brute_force import quantized_at

QUANTIZERS = ("xnnpack", "x86", "xnnpack:mode=dynamic", "xnnpack:per_channel=False")
FOUR_BITS = QuantizationSpec(torch.uint8, MinMaxObserver.with_args(eps=2.0**-12), 0, 15, torch.per_tensor_affine)


class Clipped(nn.Module):
    """A clip that is not fused with the convolution before it, and pooling: sites in series."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(72, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.hardtanh(self.conv(x), 0.0, 0.5)
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))


BATCHES: dict[Callable[[], nn.Module], list[tuple[Tensor]]] = {
    linear: [(3 * torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)],
    Clipped: [(3 * torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),) for seed in range(2)],
}


@functools.cache
def pair_of(model: Callable[[], nn.Module], quantizer: str, calibrated_by: float = 1 / 3) -> pt2qa.QuantizedPair:
    """Calibrated on the first batch times a factor."""
    torch.manual_seed(0)
    return quantized_pair(model(), (BATCHES[model][0][0] * calibrated_by,), quantizer)


def truth(pair: pt2qa.QuantizedPair, batches: Any) -> dict[tuple[int, str], float]:
    """The parts from copies of the graph."""
    series = {index: [before.site.index] for index, before in sites_before(pair.simulator).items()}
    found = {}
    for site in pair.sites:
        before = series.get(site.index, [])
        start, whole = (quantized_at(pair, sites) for sites in (before, [*before, site.index]))
        if site.kind == "bias":
            found[site.index, "bias"] = noise(pair, batches, whole, start)
            continue
        clamp = with_function(pair, site, functools.partial(clamped, site.params), before)
        found[site.index, f"{site.kind} rounding"] = noise(pair, batches, whole, clamp)
        found[site.index, f"{site.kind} clamping"] = noise(pair, batches, clamp, start)
    return found


def parts(report: ErrorBudget) -> dict[tuple[int, str], float]:
    return {(row.site, row.mechanism): row.noise for row in report.rows}


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("method", ["exact", "projection"])
def test_each_part_of_a_linear_net_is_that_of_a_copy_of_the_graph(quantizer: str, method: Any) -> None:
    pair, batches = pair_of(linear, quantizer), BATCHES[linear]
    projections = 8 if method == "projection" else None
    report = pt2qa.error_budget(pair, batches, method=method, projections=projections, progress=False)
    assert report.method == method
    assert parts(report) == pytest.approx(truth(pair, batches), rel=1e-3, abs=1e-9 * report.signal)
    assert report.noise == pytest.approx(noise(pair, batches, pair.quantized, pair.reference), rel=1e-4)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_sites_in_series_count_with_what_they_add(quantizer: str) -> None:
    pair, batches = pair_of(Clipped, quantizer), BATCHES[Clipped]
    exact = pt2qa.error_budget(pair, batches, method="exact", progress=False)
    assert parts(exact) == pytest.approx(truth(pair, batches), rel=1e-3, abs=1e-7 * exact.signal)
    projected = pt2qa.error_budget(pair, batches, projections=4, progress=False)
    # Four outputs: four vectors leave nothing to chance.
    assert parts(projected) == pytest.approx(parts(exact), rel=0.1, abs=1e-5 * exact.signal)


def test_what_is_rounded_alike_before_and_behind_a_clip_is_counted_once() -> None:
    pair = pair_of(Clipped, "xnnpack", 1.0)
    series = sites_before(pair.simulator)
    names = {pair.sites[index].name: (before.site.name, before.settles) for index, before in series.items()}
    # 0.5 is no multiple of the scale, so what is clipped is rounded once more.
    assert names["hardtanh"] == ("conv/conv2d", False)
    assert names["max_pool2d"] == ("hardtanh", True)
    report = pt2qa.error_budget(pair, BATCHES[Clipped], method="exact", progress=False)
    pooled = [row for row in report.rows if row.name == "max_pool2d"]
    assert [row.noise for row in pooled] == [0.0, 0.0]
    assert abs(report.interactions) < 0.2 * report.noise


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_what_was_rounded_alike_and_put_together_is_not_counted_again(quantizer: str) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 3, 8, 8),)
    pair = quantized_pair(SameInputTwice(), batch, quantizer)
    series = sites_before(pair.simulator)
    assert ("cat", "conv/conv2d") in {(pair.sites[index].name, before.site.name) for index, before in series.items()}
    report = pt2qa.error_budget(pair, [batch], method="exact", progress=False)
    assert parts(report) == pytest.approx(truth(pair, [batch]), rel=1e-3, abs=1e-9 * report.signal)
    assert [row.noise for row in report.rows if row.name == "cat"] == [0.0, 0.0]


def test_what_was_clipped_once_and_put_together_is_not_counted_again() -> None:
    class Joined(Clipped):
        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()
            return self.head(nn.functional.max_pool2d(torch.cat([x, x], 1), 2).flatten(1)[:, 36:108])

    batch = (torch.randn(4, 3, 8, 8),)
    quantizer = PlainQuantizer(("conv2d", "cat"), inputs=None, outputs=EXACT)
    pair = pt2qa.quantize(pt2qa.capture(Joined().eval(), batch), quantizer, [batch], progress=False)
    report = pt2qa.error_budget(pair, [batch], method="exact", progress=False)
    assert parts(report) == pytest.approx(truth(pair, [batch]), rel=1e-3, abs=1e-9 * report.signal)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_parts_and_interactions_are_the_measured_noise(quantizer: str) -> None:
    report = pt2qa.error_budget(pair_of(Clipped, quantizer), BATCHES[Clipped], progress=False)
    assert report.parts == pytest.approx(sum(row.noise for row in report.rows))
    assert report.parts + report.interactions == pytest.approx(report.noise)
    for column in ("mechanism", "module", "op", "kind", "name", "dtype"):
        sums = report.by(column)  # type: ignore[arg-type]
        assert sum(sums.values()) == pytest.approx(report.parts)
        assert list(sums.values()) == sorted(sums.values(), reverse=True)
    for row in report.rows:
        assert row.noise_share == pytest.approx(row.noise / report.noise)


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_calibrated_too_narrow_is_a_range_fault(quantizer: str) -> None:
    report = pt2qa.error_budget(pair_of(linear, quantizer), BATCHES[linear], projections=8, progress=False)
    assert report.fault == "range"
    assert next(iter(report.by("mechanism"))) == "activation clamping"
    assert "Range fault: " in str(report)


@pytest.mark.parametrize(("inputs", "weights"), [(FOUR_BITS, None), (EXACT, "four bits")])
def test_four_bits_are_a_precision_fault(inputs: Any, weights: str | None) -> None:
    coarse = QuantizationSpec(torch.int8, MinMaxObserver.with_args(eps=2.0**-12), -7, 7, torch.per_tensor_symmetric)
    torch.manual_seed(0)
    options = {} if weights is None else {"weights": coarse}
    pair = quantized_pair(linear(), BATCHES[linear][0], PlainQuantizer(inputs=inputs, **options))
    report = pt2qa.error_budget(pair, BATCHES[linear][:1], projections=8, progress=False)
    assert report.fault == "precision"
    assert next(iter(report.by("mechanism"))) == ("activation rounding" if weights is None else "weight rounding")
    # Calibrated on the same data without cutting off: nothing is clamped.
    assert sum(row.noise for row in report.rows if row.mechanism.endswith("clamping")) == 0.0
    assert "Precision fault: " in str(report)


def test_calibrated_too_wide_is_a_precision_fault() -> None:
    report = pt2qa.error_budget(pair_of(linear, "xnnpack", 40.0), BATCHES[linear], projections=8, progress=False)
    assert report.fault == "precision"


def test_biases_are_a_part() -> None:
    torch.manual_seed(0)
    pair = quantized_pair(linear(), BATCHES[linear][0], PlainQuantizer(inputs=EXACT, int32_bias=True))
    assert sum(_is_bias(site) for site in pair.sites) == 2
    report = pt2qa.error_budget(pair, BATCHES[linear][:1], projections=8, progress=False)
    assert parts(report) == pytest.approx(truth(pair, BATCHES[linear][:1]), rel=1e-2, abs=1e-12 * report.signal)
    assert report.by("kind")["bias"] > 0.0


def _is_bias(site: Site) -> bool:
    return site.kind == "bias"


def test_batches_without_a_number_are_set_apart() -> None:
    broken = BATCHES[linear][1][0].clone()
    broken[2, 5] = torch.nan
    report = pt2qa.error_budget(pair_of(linear, "xnnpack"), [BATCHES[linear][0], (broken,)], progress=False)
    assert (report.batches, report.samples) == (1, 8)
    assert [each.batch for each in report.set_apart] == [1]
    assert "NaN in the input" in report.summary()


def test_says_the_decibels_first_then_mechanisms_then_places(tmp_path: Path) -> None:
    report = pt2qa.error_budget(pair_of(linear, "xnnpack"), BATCHES[linear], projections=8, progress=False)
    lines = str(report).splitlines()
    assert lines[0].startswith(f"Output SQNR {report.sqnr:.1f} dB; error budget of Sequential · xnnpack")
    assert report.lines()[0].startswith("30.08 % of the values of input, which are -9.993 to 10.23, lie outside the ")
    (line,) = (line for line in report.lines() if line.startswith("Of what sites cause alone: activation clamping"))
    assert "errors of several sites mostly cancel" in line
    worst = max(report.rows, key=lambda row: row.noise)
    table = next(number for number, line in enumerate(lines) if line.startswith("---"))
    assert lines[table + 1].split()[:3] == [worst.name, worst.op, "activation"]
    report.save(tmp_path / "budget.safetensors")
    assert pt2qa.load(tmp_path / "budget.safetensors") == report
    assert list(report.to_pandas()) == ["name", "op", "kind", "mechanism", "noise", "noise_share", "dtype"]
    modules, mechanisms = report.charts([])
    assert (modules["title"], mechanisms["title"]) == ("Noise by module", "Noise by mechanism")
    assert modules["series"] == mechanisms["series"]
    assert len(report.csv(extended=True).splitlines()) == len(report.rows) + 1
    pt2qa.write_html(report, tmp_path / "page.html")


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (10.0, "bias 25 %, errors of several sites mostly cancel, to 25 % of that"),
        (38.0, "bias 25 %, interactions -5 % of the whole"),
        (80.0, "bias 25 %, interactions 50 % of the whole"),
        (100.0, "bias 25 %, errors of several sites add up, to 2.5 times that"),
    ],
)
def test_shares_are_of_what_adds_up_and_large_interactions_are_words(whole: float, said: str) -> None:
    report = pt2qa.error_budget(pair_of(linear, "xnnpack"), BATCHES[linear], progress=False)
    first = report.rows[0]
    rows = (replace(first, mechanism="weight rounding", noise=30.0), replace(first, mechanism="bias", noise=10.0))
    assert f"weight rounding 75 %, {said}" in replace(report, rows=rows, noise=whole).in_short()


def test_a_site_that_alone_gives_no_number_is_named_and_the_rest_adds_up() -> None:
    """A range with minus infinity has a scale without end: NaN, that a softmax rounds to a number again."""

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh().masked_fill(torch.ones(6, 6).tril() == 0, float("-inf")).softmax(-1).clamp(-0.7, 1.0)

    x = torch.randn(2, 6, 6)
    quantizer = PlainQuantizer(("tanh", "masked_fill", "softmax"), inputs=None, outputs=EXACT)
    pair = pt2qa.quantize(pt2qa.capture(Masked().eval(), x), quantizer, [x], progress=False)
    report = pt2qa.error_budget(pair, [x], progress=False)
    assert any(isnan(row.noise) for row in report.rows)
    assert report.noise > 0
    assert report.parts == pytest.approx(sum(row.noise for row in report.rows if not isnan(row.noise)))
    assert report.interactions == report.noise - report.parts
    said = " ".join(str(report).split())  # lines are as long as the terminal is wide
    assert "Not attributed, because each alone makes the output NaN or infinite: masked_fill." in said
    assert "nan" not in report.in_short()
    assert "nan dB" not in str(pt2qa.sensitivity(pair, [x], method="exact", progress=False).lines())


def test_equal_models_have_nothing_to_split() -> None:
    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 4, bias=False)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    batch = BATCHES[linear][0]
    report = pt2qa.error_budget(quantized_pair(Zero(), batch), [batch], progress=False)
    assert (report.noise, report.parts, report.fault) == (0.0, 0.0, "")
    assert "there is no noise to attribute" in str(report)


def test_noise_has_no_share_where_none_was_measured() -> None:
    case = facts.joined("xnnpack")
    found = {(0, "activation rounding"): 1.0, (1, "weight rounding"): 0.0}
    loud, silent = budget_of(case.pair, facts.noises(found, measured=0.0)).rows
    assert isnan(loud.noise_share)
    assert silent.noise_share == 0.0


class Phases(nn.Module):
    """Numbers up to 1,000 are read by a sine and a cosine, as diffusion models embed time."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.head = nn.Parameter(torch.linspace(1.0, 0.01, 16)), nn.Linear(32, 8)

    def forward(self, time: Tensor) -> Tensor:
        phases = time * self.rates
        return self.head(torch.cat([phases.sin(), phases.cos()], 1))


def test_an_error_too_large_for_a_gradient_is_measured() -> None:
    torch.manual_seed(0)
    times = 600 * torch.rand(8, 1)
    pair = quantized_pair(Phases(), (times,))
    own = [1.5 * times]  # beyond the range of calibration
    exact, projected = (
        pt2qa.error_budget(pair, own, method=method, progress=False)  # type: ignore[arg-type]
        for method in ("exact", "projection")
    )
    assert projected.method == "projection"
    for row, right in zip(projected.rows, exact.rows, strict=True):
        assert row.noise == pytest.approx(right.noise, rel=1e-3) or row.noise <= projected.noise
    ranking = pt2qa.sensitivity(pair, own, method="projection", progress=False)
    alone = pt2qa.sensitivity(pair, own, method="exact", progress=False)
    assert ranking.worst(1)[0].value == pytest.approx(alone.worst(1)[0].value, abs=0.5)
