"""What a diagnosis claims holds on data that it has not seen; what costs nothing comes before what does."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationSpec

import pt2qa
from pt2qa._diagnosis.search import Search
from pt2qa._reconfigure.candidates import costs_of
from pt2qa._simulator.data import Data
from pt2qa._trials.judge import Judge
from pt2qa._trials.treatment import Treatment
from pt2qa.overrides.plan import Edit
from pt2qa.report import Diagnosis
from tests.check.quantizers import every


def linears(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).eval()


def samples(seed: int, batches: int = 3) -> list[Tensor]:
    """Samples of different contrast."""
    generator = torch.Generator().manual_seed(seed)
    size = 1 + 0.3 * torch.rand(batches, 8, 1, generator=generator)
    return list(torch.randn(batches, 8, 16, generator=generator) * size)


def diagnosed(pair: Any, batches: Any, evaluation: Any, **options: Any) -> Diagnosis:
    return pt2qa.diagnose(pair, batches, evaluation=evaluation, verify_code=False, progress=False, **options)


def quantized(model: nn.Module, quantizer: Any, calibration: list[Tensor]) -> pt2qa.QuantizedPair:
    return pt2qa.quantize(pt2qa.capture(model, calibration[0]), quantizer, calibration, progress=False)


def on_third(pair: pt2qa.QuantizedPair, found: Diagnosis, third: list[Tensor]) -> list[float]:
    """The gains of the rows, one after the other, on data that the diagnosis has not seen."""
    judge, state, gains = Judge(pair, Data("third", third), None, "third"), Treatment(), []
    for treatment in found.treatments:
        before, state = judge.outcome(state), state.then(treatment)
        gains.append(judge.outcome(state).gain_over(before).value)
    return gains


def test_a_bound_is_never_below_what_the_model_has_and_calibration_is_found_with_evaluation_apart() -> None:
    calibration, batches, evaluation, third = (samples(seed) for seed in range(4))
    pair = quantized(linears(16, 32, 32, 8), "xnnpack", [batch / 8 for batch in calibration])
    found = diagnosed(pair, batches[:1], evaluation)
    figures = {row.name: row.sqnr for row in found.figures}
    assert figures["ranges fitted to the data"] >= figures["now"]
    assert figures["ranges fitted by channel"] >= figures["now"]
    row = found.rows[0]
    assert row.cause == "narrow-calibration"
    assert "smaller" in row.evidence  # the input, not its victims
    (gain, *_) = on_third(pair, found, third)
    assert row.low <= gain <= row.high


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86"])
def test_unequal_channels_are_scaled_for_free(quantizer: str) -> None:
    model = linears(16, 32, 32, 8)
    first, second = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    with torch.no_grad():
        first.weight[3] *= 300
        second.weight[:, 3] /= 300
    pair = quantized(model, quantizer, samples(0))
    found = diagnosed(pair, samples(1), samples(2))
    row = found.rows[0]
    assert (row.cause, row.cost) == ("outlier-channel", 0.0)
    (gain, *_) = on_third(pair, found, samples(3))
    assert gain > 10


class Heads(nn.Module):
    """Two outputs in units so small that the observers' smallest scale is too large for them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = linears(16, 32, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
        for head in self.heads:
            head.weight.data *= 1e-3
            head.bias.data *= 1e-3

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x).relu()
        return [head(x) for head in self.heads]


def test_outputs_in_small_units_are_treated_together() -> None:
    pair = quantized(Heads().eval(), "xnnpack", samples(0))
    found = diagnosed(pair, samples(1), samples(2))
    assert found.rows[0].cause == "observer"
    assert "eps" in found.rows[0].evidence
    assert found.sqnr_after - found.sqnr > 10
    assert on_third(pair, found, samples(3))[0] > 10


def test_weights_at_the_observers_eps_are_not_another_scheme() -> None:
    model = linears(16, 32, 8)
    model[0].weight.data /= 300  # type: ignore[operator]
    sets = [[300 * batch for batch in samples(number)] for number in range(4)]
    pair = quantized(model, "x86", [1.5 * batch for batch in sets[0]])
    found = diagnosed(pair, sets[1], sets[2])
    assert (found.rows[0].cause, found.rows[0].name, found.rows[0].others) == ("observer", "0/linear", ())
    assert on_third(pair, found, sets[3])[0] > 3


def test_levels_that_a_spec_leaves_unused_are_found() -> None:
    spec = QuantizationSpec(torch.int8, MinMaxObserver, -64, 63, torch.per_tensor_affine)
    wide = [1.5 * batch for batch in samples(0)]
    pair = quantized(linears(16, 32, 32, 8), every("linear", spec), wide)
    found = diagnosed(pair, samples(1), samples(2))
    assert found.rows[0].cause == "activation-scheme"
    assert 2 < on_third(pair, found, samples(3))[0] < 9  # a bit


def test_what_an_untouched_model_is_told_holds_on_a_third_set() -> None:
    pair = quantized(linears(16, 24, 24, 8), "x86", samples(0))
    found = diagnosed(pair, samples(1), samples(2), least=0.0, macs=0.0)
    assert all(gain > 0 for gain in on_third(pair, found, samples(3)))


def test_nothing_to_do_comes_with_what_repairs_give() -> None:
    found = diagnosed(quantized(linears(16, 24, 24, 8), "xnnpack", samples(0)), samples(1), samples(2))
    assert "pt2qa.repair" in found.verdict or found.sqnr > 40
    assert any("repair" in row.name for row in found.figures)


class Scaled(nn.Module):
    """A model with a number that is no tensor, so that its program keeps the one at capture."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = linears(16, 32, 8)

    def forward(self, x: Tensor) -> Any:
        return self.body(x) * self.gain


def test_a_row_whose_remedy_cannot_be_applied_has_no_gain() -> None:
    model = Scaled()
    pair = quantized(model.eval(), "xnnpack", samples(0))
    model.gain = 1.5  # the captured program is another model
    found = diagnosed(pair, samples(1), samples(2))
    row = found.rows[0]
    assert row.cause == "capture-changed"
    assert row.gain != row.gain
    assert "not measured" in str(found)


def test_weights_that_are_all_others_are_one_row_whose_remedy_was_played() -> None:
    model, other = linears(16, 32, 32, 8), linears(16, 32, 32, 8)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    pair, stranger = (quantized(each, "xnnpack", samples(0)) for each in (model, other))
    graph = copy.deepcopy(pair.quantized)
    graph.load_state_dict(stranger.quantized.state_dict())
    found = diagnosed(pt2qa.pair(pair.reference, graph), samples(1), samples(2))
    changed = [row for row in found.rows if row.cause == "prepare-changed"]
    assert len(changed) == 1
    assert changed == [found.rows[0]]
    assert "another checkpoint" in changed[0].remedy
    assert changed[0].gain > 10


def test_one_corrupt_batch_is_the_cause_where_other_observers_gain_more_than_other_data() -> None:
    """A histogram clips: without the batch, and without clipping, is better than either, and as good as other data."""
    sets = [samples(number, 6) for number in range(4)]
    sets[0][4] = sets[0][4].clone()
    sets[0][4][1] *= 20
    pair = quantized(linears(16, 32, 8), "x86", sets[0])
    found = diagnosed(pair, sets[1], sets[2])
    assert found.rows[0].cause == "calibration-outlier"
    assert "drop batch 4" in found.rows[0].remedy
    tried = [row for row in (*found.rows, *found.tried) if row.cause == "calibration-outlier"]
    assert [row.remedy.endswith("with min-max observers") for row in tried].count(True) == 1
    assert on_third(pair, found, sets[3])[0] > 6


def test_with_a_corrupt_batch_all_other_data_come_second() -> None:
    """Data in use are better than what calibrates without the batch, and yet one batch is the cause."""
    sets = [samples(number, 6) for number in range(4)]
    sets[0] = [0.8 * batch for batch in sets[0]]
    sets[0][4][1] *= 30
    pair = quantized(linears(16, 32, 8), "x86", sets[0])
    found = diagnosed(pair, sets[1], sets[2])
    assert found.rows[0].cause == "calibration-outlier"
    assert "narrow-calibration" in {row.cause for row in (*found.rows, *found.tried)}
    assert on_third(pair, found, sets[3])[0] > 6


def test_values_beyond_the_ranges_are_named_where_no_part_of_the_samples_covers_the_others() -> None:
    x = torch.rand(64, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    rare = x.roll(1, 0)
    rare[3, 0], rare[20, 1], rare[35, 0], rare[50, 1] = 4.0, -5.0, 6.0, -7.0
    pair = quantized(linears(8, 8, 4), "xnnpack", [*x.split(16)])
    found = pt2qa.diagnose(pair, rare.split(16), progress=False)
    # Both layers in float would be the float model, though XNNPACK's quantizer still rounds the ReLU between them.
    assert found.rows == ()
    assert [row.remedy for row in found.tried if row.reason.startswith("it is the float model")] == [
        "keep these ops in float: 0/linear, 2/linear"
    ]
    assert re.search(
        r"No certain remedy: .*Values beyond the calibrated range, most at input, cause \S+ % of the noise: "
        r"calibrate on more samples\. The best of those that were tried is narrow-calibration, \+2\d",
        found.verdict,
    ), found.verdict
    # Half of the noise is no reason to say so: a bit is three quarters of it.
    calm = pt2qa.diagnose(pair, x.roll(1, 0).split(16), progress=False)
    assert calm.verdict.startswith("Nothing to do")


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + x.flip(1)) + x


@pytest.mark.parametrize(("floats", "whole"), [(("add",), False), (("add", "add_1"), True), ((), False)])
def test_what_leaves_nothing_in_int8_is_the_float_model_where_nothing_multiplies_either(
    floats: tuple[str, ...], whole: bool
) -> None:
    (x,) = samples(0, 1)
    pair = quantized(Sum().eval(), "xnnpack", [x])
    judge = SimpleNamespace(annotations=lambda treatment: pair.recipe.annotations if pair.recipe else None)
    search: Any = SimpleNamespace(case=SimpleNamespace(judge=judge, costs=costs_of(pair, pair.values(x))))
    treatment = Treatment(floats=(Edit("float", floats),) if floats else ())
    assert Search._is_float_model(search, treatment) == whole
